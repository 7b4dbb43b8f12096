"""A call that raises has changed nothing, and what it raises for a wrong argument is CallerError:
the constructors of nodes, ranks, groups, transfer sides, pools and configs, and every public call
of both groups and of a decode rank, in the middle of requests that then end well."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache
from numbers import Real
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
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
from prefixkv.errors import CallerError, CapacityError, RequestError, shown
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_layout import StateTensor
from prefixkv.memory.state_pool import StatePool
from prefixkv.protocol.ids import PeerId
from prefixkv.ranks.row_log import RankLog
from prefixkv.request import Request
from prefixkv.spi import DecodeGroup, DecodeRank, PrefillGroup, PrefillRank
from prefixkv.transfer import DecodeTransfers, PrefillTransfers
from tests.support.junk import JUNK, Broken, OwnError
from tests.support.node_pair import make_pool, scheduling, tokens_of
from tests.support.patience import until
from tests.support.picture import picture

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
        {"ranks": None, "mesh": None, "state": None, "transport": None},
    ),
    PrefillNode: lambda: (
        [make_pool(), prefill_config()],
        {"mesh": None, "state": None, "transport": None, "ranks": None},
    ),
    DecodeTransfers: lambda: (
        [make_pool(), decode_config()],
        {"worker": None, "transport": None},
    ),
    PrefillTransfers: lambda: (
        [make_pool(), prefill_config()],
        {"endpoints": (), "transport": None},
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
    if callable(named.get("transport")):
        return  # what the caller's own function raises comes through
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


# --- calls ----------------------------------------------------------------------------------------


def request(number: int, prefill: PrefillGroup, **fields: Any) -> Request:
    wanted = {"prefill": prefill.endpoint, "decode": "decode-0", **fields}
    return Request(f"r{number}", tokens_of(number, 21), 8, room=number, **wanted)


class Groups:
    """Two workers of two ranks each, and on each side a request under way: `running` on decode,
    `computing` on prefill."""

    def __init__(self) -> None:
        pools = [rank_pool() for _ in range(4)]
        config = DecodeConfig(control=PATIENT, reserve_tokens=0)
        self.prefill = PrefillGroup(pools[:2], PrefillConfig(control=PATIENT), MESH)
        self.decode = DecodeGroup(pools[2:], config, MESH)
        self.ended: list[Any] = []
        self.running = self._begin(1)
        self.computing = self._compute(2)
        # What is still on its way of the first room would change the pictures later.
        until(lambda: len(self.ended) == 1 and self.decode.num_rooms == 1, step=self.step)

    def step(self) -> None:
        self.decode.pop_preallocated()
        self.ended += self.prefill.pop_sent()

    def _compute(self, number: int) -> Any:
        asked = request(number, self.prefill)
        self.prefill.add(asked)
        self.decode.add(asked)
        found: list[Any] = []

        def handed_out() -> bool:
            found.extend(self.prefill.pop_bootstrapped())
            return bool(found)

        until(handed_out, step=self.step)
        (req,) = found
        self.prefill.send_chunk(req, 9)
        return req

    def _begin(self, number: int) -> Any:
        req = self._compute(number)
        self.prefill.send_chunk(req, 21, last=True, aux=b"x")
        arrived: list[Any] = []

        def arrives() -> bool:
            arrived.extend(self.decode.pop_transferred())
            return bool(arrived)

        until(arrives, step=self.step)
        (running,) = arrived
        self.decode.append_many([running], [7])
        return running

    def finish(self) -> None:
        self.prefill.send_chunk(self.computing, 21, last=True, aux=b"x")
        second: list[Any] = []

        def arrives() -> bool:
            second.extend(self.decode.pop_transferred())
            return bool(second) and len(self.ended) == 2

        until(arrives, step=self.step)
        self.decode.append_many([self.running, *second], [8, 7])
        for req in (self.running, *second):
            self.decode.finish(req)
        until(lambda: not self.decode.num_rooms, step=self.step)
        assert not self.decode.pop_failed()
        assert not self.prefill.pop_failed()
        self.decode.audit()
        self.prefill.audit()

    def picture(self) -> Any:
        """All that no call that raises may change."""
        self.decode.audit()
        self.prefill.audit()
        others = *self.decode.others, *self.prefill.others
        rows = [(rank.page_table, rank._rows, rank._views) for rank in others]
        return picture(scheduling(self.decode), scheduling(self.prefill), rows)

    def calls(self) -> dict[str, tuple[list[Any], dict[str, Any]]]:
        """Calls that a group does otherwise than a node, or hands on to its ranks; as they stand
        they are refused, or of no request that is here, or only look."""
        rank = {"wait": (["0"], {}), "apply": ([b"none"], {}), "pages": ([99], {}),
                "state_slot": ([99], {}), "window_pages": ([99, "last"], {}),
                "request": (["nobody"], {})}  # fmt: skip
        return {
            "decode.pages_of": ([self.running], {}),
            "decode.append_many": ([[self.running], [-1]], {}),
            "decode.reserve_many": ([[self.running], 0], {}),
            "decode.finish": ([self.computing], {"after": None, "continues": None}),
            "decode.apply_rank_events": ([b"no message"], {}),
            "decode.fence_rank": ([1], {"after": None}),
            "decode.wait": (["0"], {}),
            "prefill.add": ([request(1, self.prefill)], {}),
            "prefill.refuse": ([request(2, self.prefill), "no"], {}),
            "prefill.pop_bootstrapped": ([0], {}),
            "prefill.send_chunk": (
                [self.computing, 99],
                {"last": True, "aux": b"text", "ready": None, "state_slot": -1},
            ),
            "prefill.save_state": ([self.computing, 99], {}),
            "prefill.pop_failed": ([], {"after": 7}),
            "prefill.abort": (["nobody"], {}),
            "prefill.fail": (["nobody", "no error"], {}),
            "prefill.flush": ([7], {}),
            "prefill.wait": (["0"], {}),
            **{f"rank.{name}": call for name, call in rank.items()},
        }

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    groups = Groups()
    try:
        yield groups
        groups.finish()
    finally:
        groups.close()


_WITHOUT_ARGUMENTS = {
    "audit", "close", "fileno", "is_like", "lost_peers", "pop_sent", "stats", "take_rank_events",
}  # fmt: skip


def test_every_call_that_a_group_or_a_rank_has_of_its_own_is_tried(groups: Groups) -> None:
    own = {
        f"{side}.{name}"
        for side, kind in (("decode", DecodeGroup), ("prefill", PrefillGroup), ("rank", DecodeRank))
        for name, call in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
        and name not in _WITHOUT_ARGUMENTS
        # What a group has of its node is tried with that.
        and (side == "rank" or call.__qualname__.startswith(f"{kind.__name__}."))
    }
    assert own <= groups.calls().keys()


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(data=st.data())
def test_whatever_is_handed_over(groups: Groups, data: st.DataObject) -> None:
    every = groups.calls()
    name = data.draw(st.sampled_from(sorted(every)))
    args, named = list(every[name][0]), dict(every[name][1])
    odd = [
        groups.running, groups.computing, [groups.running] * 2, groups.ended[0], Broken(),
        request(1, groups.prefill), request(2, groups.prefill), groups.decode, b"",
        request(9, groups.prefill, decode=""),
    ]  # fmt: skip
    _with_junk(data, args, named, odd)
    side, _, call = name.partition(".")
    if call in ("wait", "flush", "pop_failed") and isinstance(
        [*args, *named.values()][0], Real | str | None
    ):
        return  # it is taken
    thing = groups.decode.others[0] if side == "rank" else getattr(groups, side)
    before = groups.picture()
    try:
        getattr(thing, call)(*args, **named)
    except (CallerError, CapacityError, OwnError):
        assert groups.picture() == before, (name, shown((args, named)))
    except Exception as error:
        raise AssertionError(f"{name}: {shown((args, named))} raised {error!r}") from error
    else:
        groups.decode.audit()


# --- a request of another node --------------------------------------------------------------------


def test_a_request_of_another_worker_is_refused_by_name(groups: Groups) -> None:
    others = Groups()
    try:
        running, computing = others.running, others.computing
        decode, prefill = groups.decode, groups.prefill
        before = groups.picture(), others.picture()
        for call in (
            lambda: decode.append_many([groups.running, running], [7, 7]),
            lambda: decode.reserve_many([running], 1),
            lambda: decode.finish(running),
            lambda: decode.pages_of(running),
            lambda: prefill.send_chunk(computing, 21, last=True),
        ):
            with pytest.raises(RequestError, match=r"'r[12]' is another node's"):
                call()
        assert (groups.picture(), others.picture()) == before
        # Also one that has ended there: of its own a node takes it, and does nothing.
        others.decode.abort("r1")
        others.prefill.abort("r2")
        until(lambda: not others.decode.num_rooms, step=others.step)  # as decode has heard of it
        before = groups.picture(), others.picture()
        for call in (
            lambda: decode.append_many([running], [7]),
            lambda: decode.reserve_many([running], 1),
            lambda: prefill.send_chunk(computing, 21),
        ):
            with pytest.raises(RequestError, match=r"'r[12]' is another node's"):
                call()
        assert (groups.picture(), others.picture()) == before
        others.decode.append_many([running], [7])
        assert others.prefill.send_chunk(computing, 21) == 0
    finally:
        others.close()
