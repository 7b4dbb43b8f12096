"""Protects what memory is said to be: layouts, pools, meshes, copies, each byte against a naive
reading of it. What is refused stands in `test_refused.py`. Writes into it: tests/unit/transport."""
