"""Replays of traces through the cache: the hit rate of each eviction policy, and of the optimum.

trace.py    a trace in memory; a client that knows which conversations come back; kinds of files
run.py      one policy at one capacity, through the real `RadixCache`, and host tiers behind it
curves.py   several policies at several capacities, from Python; the bound that none exceeds
check.py    what a trace holds, and why nothing in it is found
report.py   the table, the recommendation, the plot
command.py  `prefixkv replay`

All but the command works without the extra `cli`; docs/traces.md has an example.
"""

from __future__ import annotations

from prefixkv.cli.replay.check import TraceCheck, check_trace
from prefixkv.cli.replay.curves import OPTIMUM, check_policy, replay_curves, replay_optimum
from prefixkv.cli.replay.report import draw
from prefixkv.cli.replay.run import HostResult, ReplayResult, RequestHits, replay_policy
from prefixkv.cli.replay.trace import Trace, TraceRequest, client_hints, make_trace, read_trace

__all__ = [
    "OPTIMUM",
    "HostResult",
    "ReplayResult",
    "RequestHits",
    "Trace",
    "TraceCheck",
    "TraceRequest",
    "check_policy",
    "check_trace",
    "client_hints",
    "draw",
    "make_trace",
    "read_trace",
    "replay_curves",
    "replay_optimum",
    "replay_policy",
]
