"""A constructor that raises has left nothing behind, and what it raises for a wrong argument is
CallerError: nodes, ranks, groups, transfer sides, pools, configs and requests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixkv import DecodeNode, PrefillNode
from prefixkv.cache.eviction.plain import LeastRecentlyUsed
from prefixkv.config import (
    ControlConfig,
    CurveConfig,
    DecodeConfig,
    KVEventsConfig,
    ModelConfig,
    PrefillConfig,
    TransportConfig,
)
from prefixkv.errors import CallerError, CapacityError, shown
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_layout import StateTensor
from prefixkv.memory.state_pool import StatePool
from prefixkv.protocol.ids import PeerId
from prefixkv.ranks.row_log import RankLog
from prefixkv.request import Request
from prefixkv.spi import DecodeGroup, DecodeRank, PrefillGroup, PrefillRank
from prefixkv.transfer import DecodeTransfers, PrefillTransfers
from tests.support.junk import JUNK, OwnError
from tests.support.node_pair import make_pool

EXAMPLES = int(os.environ.get("PREFIXKV_JUNK_EXAMPLES", "60"))  # more for a long run
PATIENT = ControlConfig(heartbeat_s=60.0, suspect_after_s=600.0, forget_after_s=900.0)
MESH = Mesh(num_layers=1, num_kv_heads=2, tp_size=2)
TENSOR = StateTensor("conv", 0, 2, (4,))
WORKER = PeerId("decode-0", 7)


def rank_pool() -> KVPool:
    """The share of one of MESH's two ranks."""
    return KVPool.create(64, 4, 1, 1, 8)


def decode_config() -> DecodeConfig:
    return DecodeConfig(control=PATIENT, policy=LeastRecentlyUsed(), reserve_tokens=0)


def prefill_config() -> PrefillConfig:
    return PrefillConfig(control=PATIENT, policy=LeastRecentlyUsed())


# --- constructors ---------------------------------------------------------------------------------

Arguments = tuple[list[Any], dict[str, Any]]


def _fields(config: Any) -> Arguments:
    return [], {name: getattr(config, name) for name in type(config).__dataclass_fields__}


CONFIGS: dict[type, Callable[[], Arguments]] = {
    ControlConfig: lambda: _fields(ControlConfig()),
    TransportConfig: lambda: _fields(TransportConfig()),
    ModelConfig: lambda: _fields(ModelConfig()),
    CurveConfig: lambda: _fields(CurveConfig("a" * 40, "b" * 40)),
    KVEventsConfig: lambda: _fields(KVEventsConfig()),
    DecodeConfig: lambda: _fields(DecodeConfig()),
    PrefillConfig: lambda: _fields(PrefillConfig()),
    Request: lambda: (
        ["r", [1, 2, 3], 4],
        {"room": 1, "prefill": "tcp://p:1", "decode": "d", "namespace": "lora", "cacheable": True,
         "generation": 0, "priority": 0, "deadline_s": 1.0},
    ),
}  # fmt: skip

POOLS: dict[Callable[..., Any], Callable[[], Arguments]] = {
    KVPool.create: lambda: (
        [4, 4, 1, 2, 8],
        {"dtype": "float16", "attention": "mha", "order": "layer_major", "device": "cpu",
         "shared": False},
    ),
    KVPool.from_tensors: lambda: (
        [[torch.zeros(4, 4, 2, 8)], [torch.zeros(4, 4, 2, 8)]],
        {"page_size": 4, "axes": ("page", "token", "head", "dim"), "num_kv_heads": 2,
         "head_dim": 8, "opaque": "", "regions": None},
    ),
    StatePool: lambda: (
        [[TENSOR], [torch.zeros(4, 2, 4)]],
        {"mesh": None, "rank": 0, "regions": None, "num_slots": 4},
    ),
    StatePool.create: lambda: (
        [[TENSOR], 4], {"mesh": None, "rank": 0, "device": "cpu", "shared": False},
    ),
}  # fmt: skip

WORKERS: dict[type, Callable[[], Arguments]] = {
    DecodeNode: lambda: (
        [make_pool(), decode_config()],
        {"ranks": None, "mesh": None, "state": None},
    ),
    PrefillNode: lambda: (
        [make_pool(), prefill_config()],
        {"mesh": None, "state": None, "ranks": None},
    ),
    DecodeTransfers: lambda: (
        [make_pool(), decode_config()],
        {"worker": None},
    ),
    PrefillTransfers: lambda: (
        [make_pool(), prefill_config()],
        {"endpoints": ()},
    ),
    DecodeRank: lambda: ([rank_pool(), decode_config(), MESH, 1, WORKER], {"state": None}),
    PrefillRank: lambda: ([rank_pool(), prefill_config(), MESH, 1], {"state": None}),
    DecodeGroup: lambda: (
        [[rank_pool(), rank_pool()], decode_config(), MESH], {"states": ()},
    ),
    PrefillGroup: lambda: (
        [[rank_pool(), rank_pool()], prefill_config(), MESH],
        {"states": ()},
    ),
}  # fmt: skip


@cache
def _odd() -> list[Any]:
    """Objects of the right types in the wrong places."""
    pool, state = rank_pool(), StatePool.create([TENSOR], 4)
    return [
        pool, [pool], [pool, pool, pool], [pool, make_pool()], make_pool(), state, [state, state],
        [state, None], MESH, Mesh(1, 1), Mesh("1", None), Mesh(1, 2, 2.0), Mesh(1, 2, 3),  # type: ignore[arg-type]
        Mesh(1, 2, 2, 1, (1, 1)), Mesh(1, 2, 2, 1, "x"), DecodeConfig(), PrefillConfig(),  # type: ignore[arg-type]
        PATIENT, DecodeConfig, RankLog(), WORKER, StateTensor("x", -1, 0, (), "no"),
        [StateTensor("x", 0, 1, ("a",))], [[torch.zeros(4, 4, 2, 8)]], torch.zeros(4, 4, 2, 8),  # type: ignore[arg-type]
        [torch.zeros(3, 2, 4)], ("tcp://p:1",), ["tcp://p:1", 7], ("page", "page", "dim"),
        [(0, 10)], [("a", None)], ["page", 7],
    ]  # fmt: skip


def _with_junk(data: st.DataObject, args: list[Any], named: dict[str, Any], odd: list[Any]) -> None:
    """Put junk in the place of some arguments."""
    places: list[Any] = [*range(len(args)), *named]
    for place in data.draw(st.sets(st.sampled_from(places), min_size=1, max_size=2)):
        drawn = st.sampled_from(range(len(odd))).map(odd.__getitem__) if odd else JUNK
        value = data.draw(st.one_of(JUNK, drawn))
        if isinstance(place, int):
            args[place] = value
        else:
            named[place] = value


def _is_large(args: list[Any], named: dict[str, Any]) -> bool:
    """Such a pool might even be had."""
    return any(isinstance(one, int) and 10**6 < one < 10**12 for one in (*args, *named.values()))


@pytest.mark.parametrize("make", [*CONFIGS, *POOLS], ids=lambda make: make.__qualname__)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_a_config_a_request_and_a_pool_refuse_what_they_cannot_be(
    make: Callable[..., Any], data: st.DataObject
) -> None:
    args, named = {**CONFIGS, **POOLS}[make]()
    make(*args, **named)
    _with_junk(data, args, named, _odd())
    if make in POOLS and _is_large(args, named):
        return
    said = shown((args, named))
    try:
        make(*args, **named)
    except (CallerError, CapacityError, OwnError):
        pass
    except Exception as error:
        raise AssertionError(f"{make.__qualname__}: {said} raised {error!r}") from error


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORKERS, ids=lambda kind: kind.__name__)
@settings(max_examples=max(8, EXAMPLES // 2), deadline=None)
@given(data=st.data())
def test_a_worker_that_is_not_built_leaves_nothing_behind(kind: type, data: st.DataObject) -> None:
    args, named = WORKERS[kind]()
    rightly = list(args), dict(named)
    _with_junk(data, args, named, _odd())
    threads = set(threading.enumerate())
    try:
        made = kind(*args, **named)
    except (CallerError, OwnError):
        assert set(threading.enumerate()) <= threads
    except Exception as error:
        said = shown((args, named))
        raise AssertionError(f"{kind.__name__}: {said} raised {error!r}") from error
    else:
        made.close()
        return
    # The same policy object: it serves one cache, and there is none.
    if any(one is rightly[0][1] for one in args):
        kind(*rightly[0], **rightly[1]).close()
