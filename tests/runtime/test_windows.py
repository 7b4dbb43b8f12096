"""A model with window layers and a draft over real nodes: every answer is the model's, decode's
hits count full pages alone, prefill goes on from its checkpoints, and nothing is left behind."""

from __future__ import annotations

import random
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch

from prefixkv.config import (
    ComputeConfig,
    ConfigError,
    DecodeConfig,
    HostConfig,
    PrefillConfig,
    TransportConfig,
)
from prefixkv.control.effects import FrameReceived
from prefixkv.errors import AbortedError, RequestError
from prefixkv.memory.kv_pool import KVPool, PoolGroup
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_layout import StateTensor
from prefixkv.memory.state_pool import StatePool
from prefixkv.ranks.replica import RankLog
from prefixkv.request import Request
from prefixkv.runtime.nodes import DecodeNode, PrefillNode
from tests.models.patience import until
from tests.models.window_engine import Model, WindowPair
from tests.runtime.conftest import QUICK

QUICKLY: dict[str, Any] = {
    "decode_config": DecodeConfig(reserve_tokens=0, control=QUICK),
    "prefill_config": PrefillConfig(checkpoints=4, control=QUICK),
}


@pytest.mark.parametrize("window", [2, 5, 10, 30])
@pytest.mark.parametrize("checkpoints", [0, 4])
def test_turns_of_a_conversation(window: int, checkpoints: int) -> None:
    with WindowPair(checkpoints=checkpoints, window=window, decode=(64, 16)) as pair:
        said = list(range(30))
        for turn in range(4):
            before = len(said)
            said = pair.serve(f"r{turn}", said) + [turn] * 5
            if turn:
                # Decode has all of the last turn but its last token, which has no KV.
                assert pair.hits[f"r{turn}"] == (before - 5 - 1) // 4 * 4
        computed = [pair.computed[f"r{turn}"] for turn in range(4)]
        if checkpoints:
            assert max(computed[1:]) <= 11 + 3, computed
        else:
            assert computed == [30, 41, 52, 63]
        pair.at_rest()


@pytest.mark.parametrize("backend", ["nixl", "shm"])
@pytest.mark.parametrize("seed", range(2))
def test_chats_with_small_pools_aborts_and_retractions(seed: int, backend: Any) -> None:
    """Chats that share a beginning, come back and branch, in pools that evict all the time."""
    chance = random.Random(seed)
    transport = TransportConfig(backend=backend)
    with WindowPair(
        decode=(26, 13), prefill=(30, 18), window=chance.choice([5, 9]),
        shared=backend == "shm",
        decode_config=DecodeConfig(reserve_tokens=0, transport=transport),
        prefill_config=PrefillConfig(checkpoints=3, transport=transport),
    ) as pair:  # fmt: skip
        chats = [[7] * 9 + [chat] for chat in range(3)]
        aborted: set[str] = set()
        for number in range(24):
            chat = chance.randrange(3)
            rid = f"r{number}"
            pair.submit(rid, chats[chat][: chance.choice([12, 1000])], chance.randint(2, 9))
            for _ in range(chance.randint(0, 30)):
                pair.step()
            if chance.random() < 0.2 and rid not in pair.done:
                aborted.add(rid)
                side = chance.choice([pair.decode, pair.prefill])
                if not side.abort(rid):
                    aborted.discard(rid)
            if chance.random() < 0.7:
                until(lambda rid=rid: rid in pair.done or rid in pair.failed, step=pair.step)
                if rid in pair.done:
                    said = pair.prompts[rid] + pair.tokens[rid]
                    chats[chat] = said[:40] if len(said) > 40 else said
            for node in (pair.decode, pair.prefill):
                node.audit()
        pair.at_rest()
        assert len(pair.done) > 12
        assert {rid for rid in pair.failed if rid.partition(".")[0] not in aborted} == set()
        for rid in pair.done:
            pair.check(rid)
        points = pair.prefill.scheduler.pages.checkpoints
        assert points is not None
        assert points.evicted
        assert min(pair.computed.values()) < 12


def test_one_that_was_retracted_comes_back_with_its_window() -> None:
    with WindowPair(decode=(13, 16), **QUICKLY) as pair:
        for rid, length in (("a", 9), ("b", 17), ("c", 8)):
            pair.submit(rid, list(range(length)), 16)
        until(lambda: len(pair.done) == 3 or pair.failed, step=pair.step)
        assert not pair.failed
        for rid in "abc":
            pair.check(rid)
        assert pair.decode.stats()["retracted"] > 0
        pair.at_rest()


def test_only_what_decode_lacks_of_full_pages_is_sent_and_the_window_always() -> None:
    with WindowPair(window=6, **QUICKLY) as pair:
        said = pair.serve("a", list(range(41)), 2)
        before = pair.prefill.bytes_sent
        pair.serve("b", [*said[:40], 1], 1)
        full, draft = 2 * 8 * 4, 2 * 8 * 4 * 3
        # Token 41 sees 36 to 41: two pages, of which the last one is new in the other groups too.
        assert pair.prefill.bytes_sent - before == full + draft + 2 * (2 * 8 * 4 * 2)
        pair.at_rest()


def test_an_abort_in_flight_keeps_the_pages_of_every_group_until_prefill_is_drained() -> None:
    with WindowPair(decode=(64, 4), **QUICKLY) as pair:
        pair.hold = True
        pair.submit("gone", list(range(30)))
        until(lambda: bool(pair.computing), step=pair.step)
        control, go_on = pair.prefill.transfers.control, threading.Event()
        on = control.on

        def deaf(what: object, now_s: float) -> object:
            if isinstance(what, FrameReceived):
                go_on.wait()
            return on(what, now_s)  # type: ignore[arg-type]

        control.on = deaf  # type: ignore[method-assign, assignment]
        try:
            pair.decode.abort("gone")
            pair.submit("next", list(range(20, 50)), 3)
            (group,) = pair.decode.scheduler.pages.windows
            for _ in range(20):
                pair.step()
                assert (group.allocator.held_pages, group.allocator.free_pages) == (4, 0)
            assert isinstance(pair.failed["gone"], AbortedError)
            assert pair.decode.stats()["window_pages_held"] == 4
        finally:
            go_on.set()
        pair.hold = False
        until(lambda: "next" in pair.done, step=pair.step)
        pair.check("next")
        pair.at_rest()


def test_a_flush_forgets_what_windows_kept() -> None:
    with WindowPair(**QUICKLY) as pair:
        said = pair.serve("a", list(range(30)))
        assert pair.prefill.stats()["window_pages_cached"] > 0
        pair.prefill.flush()
        pair.decode.flush()
        assert pair.prefill.stats()["window_pages_cached"] == 0
        pair.serve("b", said)
        assert pair.computed["b"] == len(said)
        pair.at_rest()


def grouped(window: int = 10, heads: int = 2, name: str = "sliding", **sizes: Any) -> KVPool:
    of = {"num_pages": 8, "page_size": 4, "num_layers": 1, "num_kv_heads": 1, "head_dim": 8}
    full = KVPool.create(**(of | sizes))
    last = KVPool.create(**(of | sizes | {"num_kv_heads": heads, "num_pages": 12}))
    return full.with_groups(PoolGroup(name, last, window, 4))


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        ({"window": 9}, r"groups\[0\]\.window"),
        ({"heads": 4}, r"groups\[0\]\.num_kv_heads"),
        ({"name": "other"}, r"groups\[0\]\.name"),
        ({"window": 0, "num_pages": 12}, r"groups\[0\]\.window"),
        ({"page_size": 8}, "page_size"),
        (None, r"groups\[0\]"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_workers_of_other_groups_refuse_each_other_by_name(
    theirs: dict[str, Any] | None, field: str, turned: bool
) -> None:
    other = grouped(**theirs) if theirs is not None else KVPool.create(8, 4, 1, 1, 8)
    pools = (other, grouped()) if turned else (grouped(), other)
    with (
        PrefillNode(pools[0], PrefillConfig(control=QUICK)) as prefill,
        DecodeNode(pools[1], DecodeConfig(reserve_tokens=0, control=QUICK)) as decode,
    ):
        request = Request("r", [1, 2, 3], 2, room=1, prefill=prefill.endpoint, decode="decode-0")
        prefill.add(request)
        req = decode.add(request)

        def step() -> None:
            prefill.pop_bootstrapped()
            decode.pop_preallocated()
            decode.pop_failed()

        until(lambda: req.state.ended, step=step)
        assert req.error is not None
        assert re.search(field, str(req.error)), req.error


STATE = StateTensor("s", 0, 1, (1,))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: DecodeNode(grouped(), DecodeConfig(compute=ComputeConfig())), "compute: not with"),
        (
            lambda: DecodeNode(grouped(), DecodeConfig(host_memory=HostConfig(num_bytes=1 << 20))),
            "host_memory: not with",
        ),
        (lambda: DecodeNode(grouped(), ranks=RankLog()), "ranks: not with"),
        (lambda: PrefillNode(grouped(), mesh=Mesh(1, 2, 2)), "is of one rank, not 2"),
        (lambda: PrefillNode(grouped(), usable_prefix=lambda req, num: num), "usable_prefix: "),
        (lambda: DecodeNode(grouped(60)), "'sliding' has 12 pages; one request may need 17"),
        (
            lambda: PrefillNode(grouped(30), PrefillConfig(checkpoints=2)),
            "'sliding' has 12 pages; one request may need 17",
        ),
        (
            lambda: PrefillNode(
                grouped(), PrefillConfig(checkpoints=2), state=StatePool.create((STATE,), 2)
            ),
            "the extra state has 2 slots",
        ),
    ],
)
def test_what_groups_do_not_go_with_is_refused_by_name(make: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make()


def test_checkpoints_of_windows_need_no_extra_state() -> None:
    with PrefillNode(grouped(), PrefillConfig(checkpoints=2)) as node:
        assert node.scheduler.num_slots == 0


def test_a_group_that_there_is_not_has_no_pages() -> None:
    with WindowPair(**QUICKLY) as pair:
        req = pair.submit("a", [1, 2, 3])
        assert req.window_pages("sliding").ids.size == 0
        with pytest.raises(KeyError):
            req.window_pages("draft")
        with pytest.raises(RequestError):
            pair.prefill.save_state(None, 4)  # type: ignore[arg-type]


def test_each_group_gets_its_own_bytes_in_the_right_place() -> None:
    """Random bytes, and no model: page by page, in every group, and nowhere else."""
    with WindowPair(window=10, **QUICKLY) as pair:
        pair.hold = True
        models = pair.p_model, pair.d_model
        chance = torch.Generator().manual_seed(5)
        for model in models:
            for pool in (model.full, model.last, model.draft):
                every = range(pool.layout.num_pages)
                old = pool.read_pages(every)
                pool.write_pages(
                    every, torch.randint(0, 256, old.shape, generator=chance, dtype=torch.uint8)
                )
        before = [
            pool.read_pages(range(pool.layout.num_pages))
            for pool in (pair.d_model.full, pair.d_model.last, pair.d_model.draft)
        ]
        pair.submit("r", list(range(27)))
        until(lambda: bool(pair.computing), step=pair.step)
        (req,) = pair.computing
        first, ids = req.window_pages("sliding")
        mine: dict[int, int] = {}
        for end in (8, 16, 24, 27):
            first, ids = req.window_pages("sliding")
            mine |= {first + at: page for at, page in enumerate(ids.tolist())}
            pair.prefill.send_chunk(req, end, last=end == 27)
        arrived: list[Any] = []
        until(lambda: bool(arrived), step=lambda: arrived.extend(pair.decode.pop_transferred()))
        (got,) = arrived
        first, ids = got.window_pages("sliding")
        assert first == 4
        want_full, want_last, want_draft = before
        # Rows of pages, tokens of the last one that are beyond the prompt included.
        want_full[got.pages.tolist()] = pair.p_model.full.read_pages(req.pages)
        want_draft[got.pages.tolist()] = pair.p_model.draft.read_pages(req.pages)
        sent = [mine[number] for number in range(4, 7)]
        want_last[ids[:3].tolist()] = pair.p_model.last.read_pages(np.array(sent, np.int32))
        pools = (pair.d_model.full, want_full), (pair.d_model.last, want_last)
        for pool, want in (*pools, (pair.d_model.draft, want_draft)):
            assert torch.equal(pool.read_pages(range(pool.layout.num_pages)), want)


def test_the_engine_s_tensors_are_as_the_model_has_them() -> None:
    model = Model(8, 6)
    assert [group.window for group in model.pool.groups] == [10, 0]
