"""Replays of traces through the cache: the hit rate of each eviction policy, and of the optimum.

trace.py     a trace in memory
readers.py   kinds of files; Mooncake's traces and token lists
agents.py    traces of agents: one session per file, and Dynamo's agentic Mooncake
run.py       one policy at one capacity, through the real `RadixCache`
optimum.py   the bound that no policy exceeds
hints.py     a client that knows which conversations come back
curves.py    several policies at several capacities: the table, the sentence, the plot
command.py   `prefixkv replay`
"""

from __future__ import annotations

from prefixkv.cli.replay.command import replay
from prefixkv.cli.replay.curves import draw
from prefixkv.cli.replay.optimum import OPTIMUM, replay_optimum
from prefixkv.cli.replay.readers import make_trace, read_trace
from prefixkv.cli.replay.run import ReplayResult, replay_policy
from prefixkv.cli.replay.trace import Trace, TraceRequest

__all__ = [
    "OPTIMUM",
    "ReplayResult",
    "Trace",
    "TraceRequest",
    "draw",
    "make_trace",
    "read_trace",
    "replay",
    "replay_optimum",
    "replay_policy",
]
