"""Writes of pages into a peer's memory.

`base.py` is the contract. `nixl/` alone imports NIXL; `shm/` is an organ. `loop.py` gives a
transport its thread, `jobs.py` has the writes under way, `runs.py` the bytes of a page.
"""
