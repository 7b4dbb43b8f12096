"""Decode's decisions: who waits, what each request lacks, and where that comes from. Pure; owned by
the scheduler's thread.

`scheduler.py` comes first: a request from `add` to its end. `admission.py` says who is next;
`plan.py` and `flights.py` where its pages come from; `growth.py` and `ending.py` what a token more
takes and what an end gives back; `ledger.py` what is promised; `rooms.py` what prefill is told.
Organs, which no file of the kernel imports: `compute_source.py`, `host_tier.py`, `sources.py`.
"""
