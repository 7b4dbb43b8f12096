"""Extra state on prefill: computing goes on from a checkpoint, at its depth and at no other; which
slot is handed over when, when it is the engine's again, and what a hit is worth."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from prefixkv.cache.checkpoints import Checkpoints
from prefixkv.config import PageOptions
from prefixkv.errors import RequestError
from prefixkv.pages.groups import GroupSpec
from prefixkv.pages.manager import PageManager
from prefixkv.prefill.request import PrefillRequest, PrefillState
from prefixkv.protocol.commands import SendChunk
from prefixkv.protocol.events import Bootstrapped, RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId
from prefixkv.request import Request
from tests.support.schedulers import prefill_scheduler
from tests.unit.prefill.test_prefill_scheduler import Desk

PAGE_SIZE = 4
OWN = 4  # slots of the engine


class Worker:
    """A prefill scheduler, and an engine whose state is all tokens so far: wrong ones show."""

    def __init__(
        self, num_pages: int = 64, num_checkpoints: int = 8, rows: int = 8, tokens: int = 1,
        windows: Sequence[GroupSpec] = (), has_state: bool = True, **settings: Any,
    ) -> None:  # fmt: skip
        self.pages = PageManager(
            num_pages,
            PAGE_SIZE,
            rows,
            options=PageOptions(policy="lru", num_saved=num_checkpoints, windows=windows),
        )
        self.has_state = has_state
        self.scheduler = prefill_scheduler(
            self.pages, num_slots=OWN if has_state else 0, checkpoint_tokens=tokens, **settings
        )
        # By window group and page: what each slot was written with.
        self.last: list[dict[int, dict[int, tuple[int, ...]]]] = [{} for _ in windows]
        self.sent: dict[str, list[list[int]]] = {}  # tokens of the window pages, by group
        self.points = self.pages.saves
        self.slots: list[tuple[int, ...] | None] = [None] * (OWN + num_checkpoints)
        self.kv: dict[int, tuple[int, ...]] = {}  # by page: the tokens up to its end
        self.state: dict[str, tuple[int, ...]] = {}
        self.resumed: dict[str, int] = {}
        self.rooms = 0

    def add(self, rid: str, tokens: list[int], **fields: Any) -> PrefillRequest:
        self.rooms += 1
        request = Request(rid, tokens, room=self.rooms, decode="d", **fields)
        req = self.scheduler.add(request)
        self.scheduler.take_commands()
        self.scheduler.hear(Bootstrapped(req.room_key, PeerId("d", 1), 0), self.scheduler.now_s)
        return req

    def begin(self) -> list[PrefillRequest]:
        found = self.scheduler.pop_bootstrapped()
        for req in found:
            known = tuple(req.tokens[: req.prefix_len].tolist())
            self.resumed[req.rid] = req.prefix_len
            assert (req.checkpoint_slot >= 0) == (req.prefix_len > 0 and self.has_state), req
            self.sent[req.rid] = [[] for _ in self.last]
            self.see(req, req.prefix_len)
            if known:
                if self.has_state:
                    assert self.slots[req.checkpoint_slot] == known, "H12: another depth's state"
                for at, page in enumerate(req.pages[: len(known) // PAGE_SIZE].tolist()):
                    assert self.kv[page] == known[: (at + 1) * PAGE_SIZE], "law 8"
            self.state[req.rid] = known
        self.check()
        return found

    def see(self, req: PrefillRequest, done: int) -> None:
        """Look at what a token behind these would see in the window groups."""
        for group, memory in zip(self.pages.windows, self.last, strict=True):
            first, ids = req.window_pages(group.name)
            for at in range(max(0, done + 1 - group.window), done):
                page = int(ids[at // PAGE_SIZE - first])
                written = memory.get(page, {}).get(at % PAGE_SIZE)
                assert written == tuple(req.tokens[: at + 1].tolist()), "law 8: in a window"

    def compute(self, req: PrefillRequest, most: int = 1000, saves: bool = True) -> bool:
        """One chunk, up to the next stop. True once it was the last one."""
        done = len(self.state[req.rid])
        end = min(done + most, req.num_tokens, *(at for at in req.stops if at > done))
        tokens = tuple(req.tokens[:end].tolist())
        for at in range(done // PAGE_SIZE, end // PAGE_SIZE):
            self.kv[int(req.pages[at])] = tokens[: (at + 1) * PAGE_SIZE]
        self.see(req, done)
        for group, memory in zip(self.pages.windows, self.last, strict=True):
            first, ids = req.window_pages(group.name)
            for at in range(done, end):
                slots = memory.setdefault(int(ids[at // PAGE_SIZE - first]), {})
                slots[at % PAGE_SIZE] = tokens[: at + 1]
        self.state[req.rid] = tokens
        if end in req.stops and saves and self.has_state:
            slot = self.scheduler.save_state(req, end)
            if slot >= 0:
                assert slot >= OWN
                self.slots[slot] = tokens
        is_last = end == req.num_tokens
        more: Any = {"last": True, "state_slot": 0 if self.has_state else -1} if is_last else {}
        self.scheduler.send_chunk(req, end, **more)
        self.take_sent(req, is_last)
        self.check()
        return is_last

    def take_sent(self, req: PrefillRequest, is_last: bool) -> None:
        """What was handed over of the window groups is computed, in order, and in the end all."""
        tokens = req.tokens.tolist()
        for command in self.scheduler.take_commands():
            if not isinstance(command, SendChunk):
                continue
            windows = command.groups[: len(self.pages.windows)]
            for number, chunk in enumerate(windows):
                group, there = self.pages.windows[number], self.sent[req.rid][number]
                assert chunk.first == len(there) or not len(chunk.src_pages)
                for page in chunk.src_pages.tolist():
                    at = group.first_page(len(tokens)) + len(there)
                    end = min(len(tokens), (at + 1) * PAGE_SIZE)
                    written = [self.last[number][page].get(slot % PAGE_SIZE)
                               for slot in range(at * PAGE_SIZE, end)]  # fmt: skip
                    assert written == [
                        tuple(tokens[: slot + 1]) for slot in range(at * PAGE_SIZE, end)
                    ]
                    there.append(page)
        for group, there in zip(self.pages.windows, self.sent[req.rid], strict=True):
            wanted = -(-len(tokens) // PAGE_SIZE) - group.first_page(len(tokens))
            assert len(there) == wanted or not is_last, "decode has promised these"

    def end(self, req: PrefillRequest, is_good: bool = True) -> None:
        if req.state is PrefillState.SENDING:
            poll = KVPoll.SUCCESS if is_good else KVPoll.FAILED
            error = None if is_good else RequestError("broken")
            self.scheduler.hear(RoomEnded(req.room_key, poll, error), self.scheduler.now_s)
        self.scheduler.hear(SourceFree(req.room_key), self.scheduler.now_s)
        self.scheduler.pop_sent()
        self.scheduler.pop_failed()
        self.check()

    def serve(self, rid: str, tokens: list[int], most: int = 1000) -> None:
        """All of it. `resumed` has how much was computed before."""
        req = self.add(rid, tokens)
        assert self.begin() == [req]
        self.finish(req, most=most)

    def finish(self, *reqs: PrefillRequest, most: int = 1000) -> None:
        for req in reqs:
            while not self.compute(req, most):
                pass
        for req in reqs:
            self.end(req)

    def check(self) -> None:
        self.scheduler.check_invariants()

    def at_rest(self) -> None:
        self.scheduler.pop_bootstrapped()
        self.check()
        assert isinstance(self.points, Checkpoints)
        assert (self.points.num_locks, self.points.taken) == (0, [])
        assert not self.scheduler.requests
        for group in self.pages.windows:
            assert not group.pins.any()
            assert not group.allocator.owned_pages


def turns(chat: int, num: int) -> list[int]:
    """The first tokens of a chat; all chats begin alike."""
    return [7] * 6 + [1000 * chat + at for at in range(num)]


def test_the_last_token_is_always_computed() -> None:
    worker = Worker()
    worker.serve("a", turns(1, 10))
    worker.serve("again", turns(1, 10))
    assert worker.resumed["again"] == 0, "its only state is behind its last token"
    worker.serve("longer", turns(1, 11))
    assert worker.resumed["longer"] == 16


def test_where_paths_part_a_state_is_saved() -> None:
    worker = Worker()
    common = [5] * 8
    worker.serve("a", [*common, *range(100, 110)])
    worker.serve("b", [*common, *range(200, 210)])
    worker.serve("c", [*common, *range(300, 310)])
    assert [worker.resumed[rid] for rid in "abc"] == [0, 0, 8]


def test_pages_without_a_state_are_not_gone_on_from() -> None:
    worker = Worker(num_checkpoints=1)
    worker.serve("a", turns(1, 10))
    worker.serve("b", [9] * 16)
    worker.serve("a2", turns(1, 20))
    assert worker.resumed["a2"] == 0, "the one slot is another's, though the pages are here"
    assert worker.pages.cache.match_prefix(turns(1, 20)).prefix_len > 16


def test_what_a_session_has_left_behind_goes_first() -> None:
    worker = Worker(num_checkpoints=3)
    worker.serve("a", turns(1, 10))
    worker.serve("b", turns(2, 10))
    # The common beginning was saved by b, then a's next turn supersedes its former state.
    worker.serve("a2", turns(1, 20))
    worker.serve("b2", turns(2, 20))
    assert [worker.resumed[rid] for rid in ("a2", "b2")] == [16, 16]
    worker.serve("a3", turns(1, 30))
    assert worker.resumed["a3"] == 24


def test_depths_are_multiples_of_what_the_engine_can() -> None:
    worker = Worker(tokens=6)  # and of a page: twelve
    worker.serve("a", turns(1, 24))
    worker.serve("a2", turns(1, 40))
    assert worker.resumed["a2"] == 24


def test_a_flush_forgets_them_and_frees_a_slot_only_when_it_is_read_no_more() -> None:
    worker = Worker(num_checkpoints=2)
    worker.serve("a", turns(1, 10))
    req = worker.add("a2", turns(1, 20))
    worker.begin()
    assert req.checkpoint_slot >= 0
    worker.scheduler.flush()
    worker.check()
    other = worker.add("b", turns(2, 10))
    worker.begin()
    while not worker.compute(other):
        pass
    # The engine has not copied it yet: the slot is as it was.
    assert worker.slots[req.checkpoint_slot] == tuple(req.tokens[:16].tolist())
    worker.finish(req)
    worker.end(other)
    worker.serve("a3", turns(1, 30))
    assert worker.resumed["a3"] == 0, "what was computed with old weights is not gone on from"
    worker.at_rest()


def test_one_that_waits_for_another_s_prefix_has_it_saved_where_they_part() -> None:
    worker = Worker()
    common = [5] * 12
    first = worker.add("a", [*common, *range(100, 120)])
    second = worker.add("b", [*common, *range(200, 210)])
    assert worker.begin() == [first]
    assert first.stops == [12, 32]
    worker.compute(first)
    assert worker.begin() == [second]
    assert worker.resumed["b"] == 12
    worker.finish(second, first)
    worker.at_rest()


def test_a_wait_ends_where_a_state_can_be_saved() -> None:
    worker = Worker(tokens=8)
    common = [5] * 12
    first = worker.add("a", [*common, *range(100, 120)])
    second = worker.add("b", [*common, *range(200, 210)])
    assert worker.begin() == [first]
    assert first.stops == [8, 32]
    worker.compute(first)
    assert worker.begin() == [second], "at 8, and not at 12"
    assert worker.resumed["b"] == 8


def test_a_state_is_found_once_its_page_is() -> None:
    worker = Worker()
    req = worker.add("a", turns(1, 10))
    worker.begin()
    worker.compute(req, most=4)
    # The state behind 16 tokens is there, and its chunk is not handed over yet.
    worker.slots[worker.scheduler.save_state(req, 16)] = tuple(req.tokens.tolist())
    worker.check()
    other = worker.add("b", [*turns(1, 10), 1, 2])
    assert worker.begin() == [], "it waits, though the other stands where no state is"
    assert other.prefix_len == 0
    assert worker.compute(req, saves=False)
    worker.end(req)
    assert worker.begin() == [other]
    assert worker.resumed["b"] == 16


def test_a_stop_that_was_passed_is_over() -> None:
    worker = Worker()
    common = [5] * 12
    first = worker.add("a", [*common, *range(100, 120)])
    worker.add("b", [*common, *range(200, 210)])
    worker.begin()
    assert first.stops == [12, 32]
    worker.state["a"] = ()
    worker.scheduler.send_chunk(first, 16)
    with pytest.raises(RequestError, match="saves no state at 12"):
        worker.scheduler.save_state(first, 12)


def test_a_wrong_place_is_refused_and_changes_nothing() -> None:
    worker = Worker()
    req = worker.add("a", turns(1, 10))
    with pytest.raises(RequestError, match="saves no state"):
        worker.scheduler.save_state(req, 16)
    worker.begin()
    for end in (12, 17):
        with pytest.raises(RequestError, match=f"saves no state at {end}"):
            worker.scheduler.save_state(req, end)
    assert req.stops == [16]
    worker.scheduler.abort("a")
    assert worker.scheduler.save_state(req, 16) == -1
    worker.end(req)
    worker.at_rest()


def storm(chance: random.Random, most: int = 1000, **settings: Any) -> int:
    """Chats that branch and come back, few slots, few pages, aborts, failures and flushes. Returns
    how many requests went on from a checkpoint."""
    worker = Worker(
        num_pages=chance.choice([14, 24, 60]), num_checkpoints=chance.choice([1, 3, 9]),
        rows=4, tokens=chance.choice([1, 1, 8]), follow_s=chance.choice([0.0, 1.0]), **settings,
    )  # fmt: skip
    chats: list[list[int]] = [[5] * 6]
    live: list[PrefillRequest] = []
    resumed = 0
    for step in range(500):
        worker.scheduler.now_s += 0.01
        what = chance.random()
        if what < 0.25 and len(worker.scheduler.requests) < 6:
            tokens = chance.choice(chats)[: chance.choice([6, 14, 1000])]
            tokens = tokens + [chance.randint(0, 1) for _ in range(chance.randint(1, 12))]
            if len(tokens) < 44:
                chats = [*chats[-8:], tokens]
                worker.add(f"r{step}", tokens, cacheable=chance.random() < 0.9)
        elif what < 0.5:
            begun = worker.begin()
            live += begun
            resumed += sum(req.prefix_len > 0 for req in begun)
        elif what < 0.52:
            worker.scheduler.flush()
        elif what < 0.56 and worker.scheduler.requests:
            rid = chance.choice(list(worker.scheduler.requests))
            req = worker.scheduler.requests[rid]
            if req.state is not PrefillState.SENDING:
                worker.scheduler.abort(rid)
                live = [one for one in live if one is not req]
                worker.end(req)
        elif live:
            req = chance.choice(live)
            if worker.compute(req, chance.randint(1, 9), saves=chance.random() < 0.9):
                live.remove(req)
                worker.end(req, is_good=chance.random() < 0.9)
        worker.check()
    for _ in range(50):
        worker.scheduler.now_s += 2.0
        live += worker.begin()
        while live:
            if worker.compute(live[0], most):
                worker.end(live.pop(0))
    worker.at_rest()
    return resumed


STEP = 9  # tokens that a chunk has at most, where there are window groups


def windows_of(chance: random.Random, *sizes: int) -> list[GroupSpec]:
    """Groups with little more than what one request needs."""
    most = [3 + (window + STEP) // PAGE_SIZE + window // PAGE_SIZE for window in sizes]
    return [
        GroupSpec(f"w{window}", window, num + chance.randint(0, 9), STEP)
        for window, num in zip(sizes, most, strict=True)
    ]


@pytest.mark.parametrize(
    ("has_state", "sizes"), [(True, ()), (True, (6, 9)), (False, (6, 9))], ids=str
)
def test_the_next_turn_goes_on_from_the_end_of_the_last_one(
    has_state: bool, sizes: tuple[int, ...]
) -> None:
    """With the pages of its windows."""
    worker = Worker(windows=windows_of(random.Random(1), *sizes), has_state=has_state)
    for num in (10, 21, 40, 41):
        worker.serve(f"a{num}", turns(1, num), STEP)
    # Prompts have six tokens more; a page has four.
    assert [worker.resumed[rid] for rid in ("a10", "a21", "a40", "a41")] == [0, 16, 24, 44]
    worker.at_rest()


def test_without_checkpoints_a_model_with_windows_computes_all() -> None:
    worker = Worker(num_checkpoints=0, windows=windows_of(random.Random(2), 6), has_state=False)
    for num in (10, 21):
        worker.serve(f"a{num}", turns(1, num), STEP)
    assert worker.resumed == {"a10": 0, "a21": 0}


def test_a_chunk_longer_than_a_step_is_refused_and_changes_nothing() -> None:
    worker = Worker(windows=windows_of(random.Random(3), 6), has_state=False)
    req = worker.add("a", turns(1, 24))
    worker.begin()
    before = req.window_pages("w6").ids.tolist()
    with pytest.raises(RequestError, match="a chunk of 10 tokens, step_tokens of its"):
        worker.scheduler.send_chunk(req, 10)
    assert (req.window_pages("w6").ids.tolist(), req.plan and req.plan.computed) == (before, 0)
    worker.scheduler.abort("a")
    worker.end(req)
    worker.at_rest()


def test_a_checkpoint_is_whole_in_all_groups_or_is_not() -> None:
    """One group has no page for those that the checkpoint would keep of the other request."""
    tight = GroupSpec("tight", 6, 2 * 5 + 2, STEP)
    worker = Worker(windows=[GroupSpec("wide", 6, 60, STEP), tight], has_state=False, rows=2)
    reqs = [worker.add(rid, [at] * 40) for at, rid in enumerate("ab")]
    assert worker.begin() == reqs
    for req in reqs:
        while len(worker.state[req.rid]) < 36:
            worker.compute(req, most=STEP)
    kept = [group.allocator.cached_pages for group in worker.pages.windows]
    assert kept[0] == kept[1]
    worker.finish(*reqs, most=STEP)
    worker.at_rest()


@pytest.mark.parametrize("sizes", [(6,), (1,), (9, 5), (13, 6, 2)])
@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_no_window_of_another_path_or_depth_is_ever_gone_on_from(
    seed: int, has_state: bool, sizes: tuple[int, ...]
) -> None:
    chance = random.Random(seed)
    settings = {"windows": windows_of(chance, *sizes), "has_state": has_state}
    assert storm(chance, most=STEP, **settings) > 0


@pytest.mark.parametrize("seed", range(12))
def test_no_state_of_another_path_or_depth_is_ever_gone_on_from(seed: int) -> None:
    assert storm(random.Random(seed)) > 2


def state_desk(
    usable: Callable[[PrefillRequest, int], int] | None = None, num_slots: int = 2
) -> Desk:
    desk = Desk()
    desk.scheduler = prefill_scheduler(desk.pages, num_slots=num_slots, usable_prefix=usable)
    return desk


def handed_over(desk: Desk, slot: int = 1) -> PrefillRequest:
    req = desk.computing("a")
    desk.send(req, req.num_tokens, last=True, state_slot=slot)
    (chunk,) = desk.scheduler.take_commands()
    assert isinstance(chunk, SendChunk)
    assert [(one.first, one.src_pages.tolist()) for one in chunk.groups] == [(0, [slot])]
    return req


@pytest.mark.parametrize(
    ("end", "last", "slot"), [(4, False, 0), (10, True, -1), (10, True, 2), (10, True, -2)]
)
def test_a_slot_that_is_none_changes_nothing(end: int, last: bool, slot: int) -> None:
    desk = state_desk()
    req = desk.computing("a")
    with pytest.raises(RequestError, match=f"state.slot.* {slot}\\b"):
        desk.send(req, end, last=last, state_slot=slot)
    assert not desk.scheduler.take_commands()
    desk.send(req, 10, last=True, state_slot=0)


def test_without_extra_state_no_slot_is_taken() -> None:
    desk = Desk()
    req = desk.computing("a")
    with pytest.raises(RequestError, match="where none is needed"):
        desk.send(req, 10, last=True, state_slot=0)


@pytest.mark.parametrize("is_free_first", [False, True])
def test_a_request_with_its_state_handed_over_fails_once_no_write_reads_it(
    is_free_first: bool,
) -> None:
    desk = state_desk()
    req = handed_over(desk)
    if is_free_first:
        desk.source_free(req)
        desk.end(req, ok=False)
    else:
        desk.end(req, ok=False)
        assert desk.pop_failed() == []
        assert not desk.scheduler.has_results
        desk.source_free(req)
        desk.source_free(req)
    assert (desk.pop_failed(), desk.pop_failed()) == ([req], [])
    assert desk.scheduler.idle


def test_a_request_that_has_kept_its_state_fails_at_once() -> None:
    desk = state_desk()
    req = desk.computing("a")
    desk.end(req, ok=False)
    assert desk.pop_failed() == [req]


@pytest.mark.parametrize(
    ("answer", "expected"), [(None, 0), (0, 0), (-3, 0), (3, 0), (7, 4), (8, 8), (100, 8)]
)  # fmt: skip
def test_a_hit_is_worth_what_the_engine_can_go_on_from(answer: int | None, expected: int) -> None:
    asked: list[int] = []

    def usable(req: PrefillRequest, prefix_len: int) -> int:
        asked.append(prefix_len)
        return answer or 0

    desk = state_desk(None if answer is None else usable)
    desk.done(handed_over(desk))
    req = desk.computing("a")
    assert req.prefix_len == expected
    assert asked == ([] if answer is None else [8])
    desk.send(req, req.num_tokens, last=True, state_slot=0)
    desk.done(req)
    assert desk.states() == {"FREE": 14, "CACHED": 2}
