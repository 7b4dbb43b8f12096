"""Threads, sockets and memory around the pure parts: what an engine holds.

`node.py`, `decode_node.py` and `prefill_node.py` are a scheduler with its transfer side;
`transfers.py` and its two sides serve an engine that owns its pages. `control_thread.py` carries
out effects. Organs: `ranks.py`, `host_copies.py`, `staging.py`, `record.py`, `death.py`,
`metrics.py`.
"""
