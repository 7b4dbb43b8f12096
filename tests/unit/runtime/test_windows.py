"""A model with window layers and a draft over real nodes: every answer is the model's, decode's
hits count full pages alone, prefill goes on from its checkpoints, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from prefixkv import DecodeConfig, KVPool, PoolGroup, PrefillConfig, prompt_digest
from prefixkv.errors import PageStateError, RequestError
from prefixkv.transfer import DecodeTransfers, KVPoll, PrefillTransfers
from tests.support.gates import Gate
from tests.support.mesh_workers import WindowPair
from tests.support.node_pair import tokens_of
from tests.support.patience import until
from tests.unit.runtime.conftest import QUICK
from tests.unit.runtime.test_node_ranks import grouped

QUICKLY: dict[str, Any] = {
    "decode_config": DecodeConfig(reserve_tokens=0, control=QUICK),
    "prefill_config": PrefillConfig(checkpoints=4, control=QUICK),
}


@pytest.mark.parametrize("window", [2, 5, 10, 30])
@pytest.mark.parametrize("checkpoints", [0, 4])
def test_turns_of_a_conversation(window: int, checkpoints: int) -> None:
    with WindowPair(checkpoints=checkpoints, window=window, decode=(64, 16)) as pair:
        said, lengths = list(range(30)), []
        for turn in range(4):
            before = len(said)
            lengths.append(before)
            said = pair.talk(f"r{turn}", said) + [turn] * 5
            if turn:
                # Decode has all of the last turn but its last token, which has no KV.
                assert pair.d.prefix_lens[f"r{turn}"] == [(before - 5 - 1) // 4 * 4]
        computed = [num - pair.p.starts[f"r{turn}"] for turn, num in enumerate(lengths)]
        if checkpoints:
            assert max(computed[1:]) <= 11 + 3, computed
        else:
            assert computed == [30, 41, 52, 63]
        pair.check_at_rest()


def test_only_what_decode_lacks_of_full_pages_is_sent_and_the_window_always() -> None:
    with WindowPair(window=6, **QUICKLY) as pair:
        said = pair.talk("a", list(range(41)), 2)
        before = pair.prefill.bytes_sent
        pair.talk("b", [*said[:40], 1], 1)
        full, draft = 2 * 8 * 4, 2 * 8 * 4 * 3
        # Token 41 sees 36 to 41: two pages, of which the last one is new in the other groups too.
        assert pair.prefill.bytes_sent - before == full + draft + 2 * (2 * 8 * 4 * 2)
        pair.check_at_rest()


def test_a_chunk_waits_on_every_rank_until_it_is_computed() -> None:
    with WindowPair(tp_sizes=(2, 1), heads=(2, 2, 2), **QUICKLY) as pair:
        pair.p.hold = True
        pair.submit("a", tokens_of(1, 7), 1)
        pair.until(lambda: bool(pair.p.computing))
        req = pair.p.computing.pop("a")
        pair.p.fill(req, 0, 7)
        sides = pair.prefill.transfers, pair.prefill.others[0].transfers
        given: list[Any] = []
        submit = sides[1].thread.submit
        sides[1].thread.submit = lambda command: (given.append(command), submit(command))
        ready = Gate()
        assert pair.prefill.send_chunk(req, 7, True, pair.p.aux(req), ready) == 2 * 2
        with pytest.raises(RequestError):
            pair.prefill.save_state(req, 4)
        assert [command.ready for command in given] == [ready]
        assert [side.bytes_sent for side in sides] == [0, 0]
        ready.answer = True
        pair.run("a")
        assert sides[0].bytes_sent == sides[1].bytes_sent > 0
        pair.check_at_rest()


def randomly(pools: list[KVPool], seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    for pool in pools:
        for one in (pool, *(group.pool for group in pool.groups)):
            every = range(one.layout.num_pages)
            data = one.read_pages(every)
            one.write_pages(
                every, torch.randint(0, 256, data.shape, generator=chance, dtype=torch.uint8)
            )


class EngineWithItsOwnPages:
    """The transfer side alone. Of 27 tokens decode has 16; the window of 10 begins in page 4."""

    def __init__(self, make: Callable[[], KVPool] = grouped) -> None:
        self.src, self.dst = make(), make()
        randomly([self.src, self.dst], 7)
        self.prefill = PrefillTransfers(self.src, PrefillConfig(control=QUICK))
        self.decode = DecodeTransfers(self.dst, DecodeConfig(control=QUICK))
        self.digest = prompt_digest(range(27))

    def add(self, room: int = 1) -> None:
        self.prefill.add(room, 0, 27, "decode-0", self.digest)

    def open(self, windows: Any = ((3, 0, 7),), room: int = 1) -> None:
        where = self.prefill.endpoint, self.digest
        self.decode.open(room, 0, 27, 16, [6, 1, 2], *where, windows=windows)

    def send(self, end: int, windows: Any, last: bool = False) -> None:
        pages = [5, 4, 3, 2, 1, 0, 7]
        self.prefill.send_chunk(1, end, pages, decode="decode-0", last=last, windows=windows)

    def end(self) -> Any:
        """What decode hears of its room."""
        said: list[Any] = []
        until(lambda: bool(said), step=lambda: said.extend(self.decode.take_events()))
        return said[0]

    def __enter__(self) -> EngineWithItsOwnPages:
        self.add()
        return self

    def __exit__(self, *_error: object) -> None:
        self.decode.close()
        self.prefill.close()


@pytest.mark.parametrize(("is_early", "is_late"), [(False, False), (True, False), (False, True)])
def test_an_engine_that_owns_its_pages_names_them_by_group(is_early: bool, is_late: bool) -> None:
    """Late: it names a window's pages with the last chunk alone."""
    with EngineWithItsOwnPages() as engine:
        pools = engine.dst, engine.dst.group("sliding")
        before = [pool.read_pages(range(pool.layout.num_pages)) for pool in pools]
        if not is_early:
            engine.open()
        engine.send(9, None if is_late else [(0, [8, 9, 10])])
        # Completes page 4, which is id 1 here.
        engine.send(21, None if is_late else [(2, [10, 11, 1, 2])])
        engine.send(27, [(4, [1, 2, 3]) if is_late else (5, [2, 3])], last=True)
        if is_early:
            engine.open()
        assert engine.end().poll is KVPoll.SUCCESS
        before[0][[6, 1, 2]] = engine.src.read_pages([1, 0, 7])
        before[1][[3, 0, 7]] = engine.src.group("sliding").read_pages([1, 2, 3])
        for pool, want in zip(pools, before, strict=True):
            assert torch.equal(pool.read_pages(range(pool.layout.num_pages)), want)


def in_one_memory(window: int = 10) -> KVPool:
    """As vLLM has them: layer i of each group lies in the same tensor, a page is of one group."""
    full = KVPool.create(16, 4, 2, 1, 8)
    views = [full.k(0)], [full.v(0)]  # of the second group: one layer less
    return full.with_groups(PoolGroup("sliding", KVPool.from_tensors(*views), window))


def test_groups_may_lie_in_one_memory_for_an_engine_that_owns_its_pages() -> None:
    with EngineWithItsOwnPages(in_one_memory) as engine:
        before = engine.dst.read_pages(range(16))
        engine.open()
        engine.send(27, [(4, [10, 11, 12])], last=True)
        assert engine.end().poll is KVPoll.SUCCESS
        before[[6, 1, 2]] = engine.src.read_pages([1, 0, 7])
        # K and V of its one layer.
        before[[3, 0, 7], :2] = engine.src.read_pages([10, 11, 12])[:, :2]
        assert torch.equal(engine.dst.read_pages(range(16)), before)
        # A page that is promised in two groups would be written twice.
        engine.add(2)
        engine.open([[3, 1, 7]], room=2)
        assert "in two groups of one memory" in str(engine.end().error)


def test_wrong_window_pages_are_refused_and_change_nothing() -> None:
    with EngineWithItsOwnPages() as engine:
        for windows, why in [
            ((), "pages of 0 window groups of 1"),
            (((3, 0),), "2 pages where group 'sliding' needs 3"),
            (((3, 0, 12),), "12"),
        ]:
            with pytest.raises((RequestError, PageStateError), match=why):
                engine.open(windows)
        engine.open()
        for end, sent, why in [
            (9, (), "pages of 0 window groups of 1"),
            (21, [(5, [2, 3])], "pages 5 to 7, this chunk sends 4 to 5"),
            (24, [(0, [8, 9, 10, 11, 1])], "pages 0 to 5, this chunk sends 4 to 6"),
            (21, [(4, [12])], "12"),
        ]:
            with pytest.raises((RequestError, PageStateError), match=why):
                engine.send(end, sent)
        engine.send(21, [(4, [1])])
        with pytest.raises(RequestError, match="no pages of window groups, and none follows"):
            engine.send(27, None, last=True)
        engine.send(27, [(5, [2, 3])], last=True)
        assert engine.end().poll is KVPoll.SUCCESS
