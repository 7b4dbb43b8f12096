"""Prefill's decisions: when a promised request gets pages, and what of it is sent. Pure; owned by
the scheduler's thread. `scheduler.py` comes first.
"""
