"""Replays of traces through the cache: the hit rate of each eviction policy, and of the optimum.

trace.py     a trace in memory
readers.py   kinds of files; Mooncake's traces and token lists
run.py       one policy at one capacity, through the real `RadixCache`
tiers.py     the device's tree of a replay, and those of host tiers behind it
hosts.py     sizes of host tiers
optimum.py   the bound that no policy exceeds
check.py     what a trace holds, and why nothing in it is found
hints.py     a client that knows which conversations come back
curves.py    capacities to replay at, the sentence, the plot
measure.py   several policies at several capacities, from Python
command.py   `prefixkv replay`

All but the command works without the extra `cli`; docs/traces.md has an example.
"""

from __future__ import annotations

from prefixkv.cli.replay.check import TraceCheck, check_trace
from prefixkv.cli.replay.curves import draw
from prefixkv.cli.replay.hints import client_hints
from prefixkv.cli.replay.measure import RequestHits, replay_curves
from prefixkv.cli.replay.optimum import OPTIMUM, replay_optimum
from prefixkv.cli.replay.readers import make_trace, read_trace
from prefixkv.cli.replay.run import ReplayResult, replay_policy
from prefixkv.cli.replay.tiers import HostResult
from prefixkv.cli.replay.trace import Trace, TraceRequest

__all__ = [
    "OPTIMUM",
    "HostResult",
    "ReplayResult",
    "RequestHits",
    "Trace",
    "TraceCheck",
    "TraceRequest",
    "check_trace",
    "client_hints",
    "draw",
    "make_trace",
    "read_trace",
    "replay_curves",
    "replay_optimum",
    "replay_policy",
]
