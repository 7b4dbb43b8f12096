"""The part of `assembly.py` that needs no tensors: eviction policies besides the plain ones.

Loaded before any public name is used, so that a setting may name them.
"""

from __future__ import annotations

from prefixkv.cache.eviction.adaptive import Adaptive
from prefixkv.cache.eviction.hints import Hints
from prefixkv.cache.eviction.policy import use_by_default
from prefixkv.cache.tree import RadixTree

DEFAULT_POLICY = Adaptive.name
"""The policy that held up best in replays of unlike workloads. It needs the time."""

use_by_default(Adaptive)
RadixTree.hint_makers.append(Hints)
