"""`prefixkv.transfer`: control and transport over real NIXL, for an engine that owns its pages and
its cache. Here the test is the engine: it says which pages, and looks at every byte."""

import select
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from prefixkv import DecodeConfig, PrefillConfig, StatePool, StateTensor
from prefixkv.control import inbox
from prefixkv.errors import (
    AbortedError,
    AuxTooLargeError,
    CallerError,
    PageStateError,
    PeerLostError,
    RequestError,
)
from prefixkv.paging import PageIds
from prefixkv.protocol import messages
from prefixkv.runtime import decode_transfers
from prefixkv.runtime.rank_spec import RankSpec
from prefixkv.runtime.transfers import secret_number
from prefixkv.transfer import (
    Bootstrapped,
    DecodeTransfers,
    KVPoll,
    PrefillTransfers,
    RoomDrained,
    RoomEnded,
    RoomKey,
    SourceFree,
    prompt_digest,
)
from tests.support.node_pair import make_pool
from tests.support.patience import until
from tests.unit.runtime.conftest import QUICK, node_threads

DECODE = "decode-0"
PROMPT = prompt_digest(range(30), "lora")
PAGE_SIZE = 4
NUM_TOKENS = 30  # 8 pages, the last one partly
SRC = [40, 7, 8, 9, 33, 2, 3, 21]
DST = [5, 6, 50, 51, 1, 12, 13, 60]


class Pair:
    """Both sides, and all that they have said."""

    def __init__(self, prefill_page_size: int = PAGE_SIZE) -> None:
        self.src = make_pool(page_size=prefill_page_size)
        self.dst = make_pool(page_size=PAGE_SIZE)
        self.prefill = PrefillTransfers(self.src, PrefillConfig(control=QUICK))
        self.decode = DecodeTransfers(self.dst, DecodeConfig(control=QUICK))
        self.said: list[Any] = []  # by either side
        random = np.random.default_rng(7)
        for pool in (self.src, self.dst):
            everything = np.arange(pool.layout.num_pages)
            data = pool.read_pages(everything)
            data[:] = _bytes(random, data)
            pool.write_pages(everything, data)
        self.before = self.dst.read_pages(np.arange(self.dst.layout.num_pages))

    generation = 0

    def open(self, prefix_pages: int = 0, room: int = 7, generation: int = 0) -> None:
        where = self.prefill.endpoint
        self.decode.open(
            room,
            generation,
            NUM_TOKENS,
            prefix_pages * PAGE_SIZE,
            DST[prefix_pages:],
            where,
            PROMPT,
        )

    def add(self, room: int = 7, generation: int = 0) -> None:
        self.prefill.add(room, generation, NUM_TOKENS, DECODE, PROMPT)
        self.generation = generation  # that was added last

    def send(self, *ends: int, room: int = 7) -> None:
        for end in ends:
            last = end == NUM_TOKENS
            aux = b"first" if last else b""
            how = {"generation": self.generation, "last": last, "aux": aux}
            self.prefill.send_chunk(room, end, SRC, decode=DECODE, **how)

    def send_chunk(self, end: int, pages: PageIds, **more: Any) -> None:
        self.prefill.send_chunk(7, end, pages, decode=DECODE, **more)

    def step(self) -> None:
        self.said += self.prefill.take_events()
        self.said += self.decode.take_events()

    def until(self, done: Callable[[], bool]) -> None:
        until(done, step=self.step)

    def heard(self, kind: type, room: int = 7) -> list[Any]:
        return [event for event in self.said if isinstance(event, kind) and event.key.room == room]

    def ends(self, room: int = 7) -> list[RoomEnded]:
        return self.heard(RoomEnded, room)

    def check_arrived(self, prefix_pages: int = 0) -> None:
        """What decode wanted is what prefill had, and nothing else was touched."""
        wanted = self.src.read_pages(SRC).flatten(2)[prefix_pages:]
        got = self.dst.read_pages(DST).flatten(2)[prefix_pages:]
        token_bytes = wanted.shape[2] // PAGE_SIZE
        whole, rest = NUM_TOKENS // PAGE_SIZE - prefix_pages, NUM_TOKENS % PAGE_SIZE
        assert (got[:whole] == wanted[:whole]).all()
        assert (
            got[whole:, :, : rest * token_bytes] == wanted[whole:, :, : rest * token_bytes]
        ).all()
        others = np.setdiff1d(np.arange(self.dst.layout.num_pages), DST[prefix_pages:])
        assert (self.dst.read_pages(others) == self.before[others]).all()


def _bytes(random: np.random.Generator, like: Any) -> Any:
    import torch

    return torch.from_numpy(random.integers(0, 256, tuple(like.shape), np.uint8))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    try:
        yield made
    finally:
        made.decode.close()
        made.prefill.close()
    assert not node_threads()


@pytest.mark.slow
@pytest.mark.usefixtures("_wire")
@pytest.mark.parametrize("prefix_pages", [0, 3, 7])
@pytest.mark.parametrize("early", [(), (5,), (11, 20), (5, 30), (30,)])
def test_the_path_of_one_room(pair: Pair, prefix_pages: int, early: tuple[int, ...]) -> None:
    """A chunk that is handed over before the promise goes out when that comes: without the pages
    that decode has, though prefill did not know of them yet."""
    pair.add()
    pair.send(*early)
    until(lambda: not pair.prefill.thread.inbox.pending)
    assert pair.prefill.take_events() == []
    pair.open(prefix_pages)
    pair.until(lambda: bool(pair.heard(Bootstrapped)))
    assert pair.heard(Bootstrapped) == [
        Bootstrapped(RoomKey(7, 0, DECODE), pair.decode.peer_id, prefix_pages * PAGE_SIZE)
    ]
    if NUM_TOKENS not in early:
        pair.send(*((25,) if early else (5, 11, 12, 29)), NUM_TOKENS)
    pair.until(lambda: len(pair.ends()) == 2 and bool(pair.heard(SourceFree)))
    assert [end.poll for end in pair.ends()] == [KVPoll.SUCCESS] * 2
    assert {end.aux for end in pair.ends()} == {b"", b"first"}
    pair.check_arrived(prefix_pages)
    page_bytes = pair.dst.layout.page_bytes
    assert 7 - prefix_pages <= pair.prefill.bytes_sent / page_bytes <= 8 - prefix_pages
    pair.until(lambda: not pair.decode.num_rooms and not pair.prefill.num_rooms)


@pytest.mark.usefixtures("_wire")
@pytest.mark.parametrize("decode_first", [False, True])
def test_a_prompt_that_is_computed_before_a_decode_worker_is_known(
    pair: Pair, decode_first: bool
) -> None:
    """Prefill draws the room; whoever shows the prompt and the secret opens it."""
    if decode_first:
        pair.open(3)
        until(lambda: not pair.decode.thread.inbox.pending)
    pair.prefill.offer(7, 0, NUM_TOKENS, PROMPT, timeout_s=60.0)
    if not decode_first:
        pair.open(3)
    pair.until(lambda: bool(pair.heard(Bootstrapped)))
    assert pair.heard(Bootstrapped)[0].key == RoomKey(7, 0, DECODE)
    pair.send(NUM_TOKENS)
    pair.until(lambda: len(pair.ends()) == 2 and bool(pair.heard(SourceFree)))
    assert [end.poll for end in pair.ends()] == [KVPoll.SUCCESS] * 2
    pair.check_arrived(3)
    pair.until(lambda: not pair.decode.num_rooms and not pair.prefill.num_rooms)


def test_an_offer_that_is_not_wanted_is_not_proved_or_comes_too_late(pair: Pair) -> None:
    """Each end is told by name, on both sides, and no byte is sent."""
    offer = prompt_digest(range(NUM_TOKENS), ("lora", b"a secret of 128 bits"))
    pair.prefill.offer(7, 0, NUM_TOKENS, offer, timeout_s=60.0)
    pair.open()  # with the number, and without the secret
    pair.until(lambda: bool(pair.ends()))
    assert "the promise does not" in str(pair.ends()[0].error)
    assert pair.prefill.num_rooms == 1, "it stands for who has the secret"
    with pytest.raises(RequestError, match="is not over yet"):
        pair.prefill.offer(7, 0, NUM_TOKENS, offer, timeout_s=60.0)
    pair.prefill.withdraw(7, 0, "the blocks are needed")
    pair.until(lambda: len(pair.ends()) == 2)
    assert pair.ends()[1].key == RoomKey(7, 0)
    pair.prefill.offer(8, 0, NUM_TOKENS, PROMPT, timeout_s=0.01)
    pair.until(lambda: bool(pair.ends(8)) and bool(pair.heard(SourceFree, 8)))
    assert "in time" in str(pair.ends(8)[0].error)
    pair.prefill.offer(9, 0, NUM_TOKENS, PROMPT, timeout_s=60.0)
    pair.decode.refuse(9, 0, pair.prefill.endpoint, "the request was cancelled")
    pair.until(lambda: any(end.key.decode == "" for end in pair.ends(9)))
    assert any("cancelled" in str(end.error) for end in pair.ends(9))
    assert pair.prefill.bytes_sent == 0
    with pytest.raises(RequestError, match="timeout_s"):
        pair.prefill.offer(9, 0, NUM_TOKENS, PROMPT, timeout_s=0.0)
    pair.until(lambda: not pair.decode.num_rooms and not pair.prefill.num_rooms)


def test_arrays_of_page_ids_stay_the_callers(pair: Pair) -> None:
    """An engine's row of its page table changes as soon as the call has returned."""
    src, dst = np.array(SRC, np.int32), np.array(DST, np.int32)
    pair.add()
    pair.send_chunk(NUM_TOKENS, src, last=True)
    src[:] = 0
    pair.decode.open(7, 0, NUM_TOKENS, 0, dst, pair.prefill.endpoint, PROMPT)
    dst[:] = 0
    pair.until(lambda: len(pair.ends()) == 2)
    pair.check_arrived()


def test_the_pages_of_a_promise_are_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_transfers, "MAX_PAGES", 7)
    with pytest.raises(RequestError, match="8 pages, a promise names at most 7"):
        pair.open()
    pair.open(prefix_pages=1)
    until(lambda: pair.decode.num_rooms == 1)


def test_an_aborted_room_gives_its_pages_back_with_proof_and_its_number_is_used_again(
    pair: Pair,
) -> None:
    pair.open()
    pair.add()
    pair.send(12)
    pair.until(lambda: bool(pair.heard(Bootstrapped)))
    pair.decode.abort(7, 0, "enough of it")
    until(lambda: len(pair.prefill.thread.events) == 2)
    pair.send(16)  # the engine has not heard yet: no-op
    pair.until(lambda: bool(pair.heard(RoomDrained)) and bool(pair.heard(SourceFree)))
    assert [end.poll for end in pair.ends()] == [KVPoll.FAILED] * 2
    assert all(isinstance(end.error, AbortedError) for end in pair.ends())
    assert all("enough of it" in str(end.error) for end in pair.ends())
    with pytest.raises(RequestError, match="is over"):
        pair.send(20)
    pair.said.clear()
    pair.open(3, generation=1)
    pair.add(generation=1)
    pair.send(16, NUM_TOKENS)
    pair.until(lambda: len(pair.ends()) == 2)
    assert [(end.key.generation, end.poll) for end in pair.ends()] == [(1, KVPoll.SUCCESS)] * 2
    wanted, got = pair.src.read_pages(SRC[3:7]), pair.dst.read_pages(DST[3:7])
    assert (got == wanted).all()


def test_prefill_refuses_what_decode_has_promised_already(pair: Pair) -> None:
    pair.open()
    until(lambda: pair.prefill.stats()["rooms"] == 1)
    pair.prefill.refuse(7, 0, "the prompt is too long", decode=DECODE)
    pair.until(lambda: bool(pair.heard(RoomDrained)) and bool(pair.heard(SourceFree)))
    assert len(pair.ends()) == 2
    assert all("the prompt is too long" in str(end.error) for end in pair.ends())


def test_a_room_is_begun_once_until_it_is_over(pair: Pair) -> None:
    """On decode until it has succeeded or is drained, on prefill until its source is free: else a
    word on the one would be taken for the other's."""
    pair.open()
    pair.add()
    for call in (
        pair.open,
        lambda: pair.decode.refuse(7, 0, pair.prefill.endpoint),
        pair.add,
        lambda: pair.prefill.refuse(7, 0, decode=DECODE),
    ):
        with pytest.raises(RequestError, match="room 7 generation 0"):
            call()
    pair.prefill.abort(8, 0, decode=DECODE)  # not added: no-op
    pair.until(lambda: bool(pair.heard(Bootstrapped)))
    pair.send(NUM_TOKENS)
    pair.until(lambda: len(pair.ends()) == 2 and bool(pair.heard(SourceFree)))
    assert [end.poll for end in pair.ends()] == [KVPoll.SUCCESS] * 2
    pair.check_arrived()
    pair.said.clear()
    pair.open()
    pair.add()
    pair.send(NUM_TOKENS)
    pair.until(lambda: len(pair.ends()) == 2)
    assert [end.poll for end in pair.ends()] == [KVPoll.SUCCESS] * 2


def test_a_slot_has_one_room_at_a_time() -> None:
    spec = RankSpec(make_pool(), state=StatePool.create([StateTensor("state", 0, 1, (4,))], 2))
    where = "tcp://127.0.0.1:1", PROMPT
    with DecodeTransfers(spec, DecodeConfig(control=QUICK)) as decode:
        decode.open(1, 0, PAGE_SIZE, 0, [0], *where, state_slot=1)
        with pytest.raises(RequestError, match="slot 1 is another room's"):
            decode.open(2, 0, PAGE_SIZE, 0, [1], *where, state_slot=1)
        decode.open(2, 0, PAGE_SIZE, 0, [1], *where, state_slot=0)


def test_a_chunk_may_name_its_generation(pair: Pair) -> None:
    """A step that was under way for an attempt that failed does not go out as the next one's."""
    pair.add()
    pair.prefill.abort(7, 0, decode=DECODE)
    pair.add(generation=1)
    pair.prefill.send_chunk(7, 12, SRC, decode=DECODE, generation=0)
    pair.prefill.send_chunk(7, 8, SRC, decode=DECODE, generation=1)
    pair.open(generation=1)
    pair.send(NUM_TOKENS)
    pair.until(lambda: len([end for end in pair.ends() if end.key.generation]) == 2)
    assert [end.poll for end in pair.ends() if end.key.generation] == [KVPoll.SUCCESS] * 2
    pair.check_arrived()


@pytest.mark.parametrize("dead", ["prefill", "decode"])
def test_a_fence_ends_what_a_dead_process_had(pair: Pair, dead: str) -> None:
    pair.open()
    pair.add()
    pair.send(12)
    pair.until(lambda: bool(pair.heard(Bootstrapped)))
    if dead == "prefill":
        pair.decode.fence(*pair.prefill.peer_id)
        pair.until(lambda: bool(pair.heard(RoomDrained)))
    else:
        pair.prefill.fence(*pair.decode.peer_id)
        pair.until(lambda: bool(pair.heard(SourceFree)))
        assert pair.decode.peer_id not in pair.prefill.peers()
    assert isinstance(pair.ends()[0].error, PeerLostError)


def test_what_is_refused_changes_nothing(pair: Pair) -> None:
    where = pair.prefill.endpoint
    for prefix_len, pages in ((3, DST), (0, DST[1:]), (0, [*DST, 1]), (32, []), (-4, DST)):
        with pytest.raises(RequestError):
            pair.decode.open(7, 0, NUM_TOKENS, prefix_len, pages, where, PROMPT)
    with pytest.raises(PageStateError):
        pair.decode.open(7, 0, NUM_TOKENS, 0, [0.5] * 8, where, PROMPT)  # type: ignore[list-item]
    with pytest.raises(RequestError, match="room 7 of 'decode-0' was not added"):
        pair.send(8)
    pair.add()
    with pytest.raises(RequestError, match="not over yet"):
        pair.add()
    with pytest.raises(
        RequestError, match="4 pages, 20 tokens need 5: pages begin with the first token's, also"
    ):
        pair.send_chunk(20, SRC[:4])
    for end, pages, more, error in (
        (31, SRC, {}, RequestError),
        (20, SRC, {"last": True}, RequestError),
        (30, SRC, {"last": True, "aux": bytes(1 << 20)}, AuxTooLargeError),
        (20, SRC, {"aux": b"early"}, RequestError),
        (30, SRC, {"last": True, "state_slot": 0}, RequestError),
        (20, [64, *SRC[1:]], {}, PageStateError),
    ):
        with pytest.raises(error):
            pair.send_chunk(end, pages, **more)
    for pages, more, error in (
        ([-1, *DST[1:]], {}, PageStateError),
        (DST, {"state_slot": 0}, RequestError),
    ):
        with pytest.raises(error):
            pair.decode.open(9, 0, NUM_TOKENS, 0, pages, where, PROMPT, **more)
    pair.send(20)
    with pytest.raises(RequestError):
        pair.send(19)
    pair.open()
    pair.send(NUM_TOKENS)
    with pytest.raises(RequestError, match="after the last"):
        pair.send(NUM_TOKENS)
    pair.until(lambda: len(pair.ends()) == 2)
    assert [end.poll for end in pair.ends()] == [KVPoll.SUCCESS] * 2
    pair.check_arrived()


def test_each_argument_of_each_call_is_looked_at_before_anything_is_changed(pair: Pair) -> None:
    pair.add()
    where, here, windows = pair.prefill.endpoint, {"decode": DECODE}, {"windows": ()}
    more = {"aux": b"", "ready": None, "state_slot": -1, "generation": 0, **here, **windows}
    calls: list[tuple[Callable[..., Any], list[Any], dict[str, Any]]] = [
        (pair.decode.open, [9, 0, NUM_TOKENS, 0, DST, where, PROMPT, -1, 7], windows),
        (pair.decode.refuse, [9, 0, where, "why", 7, PROMPT], {}),
        (pair.prefill.add, [9, 0, NUM_TOKENS, DECODE, PROMPT], {}),
        (pair.prefill.send_chunk, [7, 9, SRC], more),
        (pair.prefill.refuse, [9, 0, "why"], here),
        (pair.prefill.offer, [9, 0, NUM_TOKENS, PROMPT, 1.0], {}),
        (pair.prefill.withdraw, [9, 0, "why"], {}),
        (pair.prefill.abort, [7, 0, "why"], here),
        (pair.decode.abort, [9, 0, "why"], {}),
        *((call, args, {}) for side in (pair.decode, pair.prefill) for call, args in (
            (side.fence, ["nobody", 7]), (side.move_weights, ["new"]), (side.wait, [0.0]))),
    ]  # fmt: skip
    told: list[Any] = []
    for side in (pair.decode, pair.prefill):
        side.thread.submit = told.append  # type: ignore[method-assign]
    before = set(pair.decode._rooms), set(pair.prefill._rooms)
    for call, args, named in calls:
        for place in (*range(len(args)), *named):
            args_of, named_of = dict(enumerate(args)), dict(named)
            (args_of if isinstance(place, int) else named_of)[place] = object()  # type: ignore[index]
            with pytest.raises(CallerError):
                call(*args_of.values(), **named_of)
            assert (set(pair.decode._rooms), set(pair.prefill._rooms)) == before
    assert not told
    for side in (pair.decode, pair.prefill):
        del side.thread.submit


def test_an_engine_waits_with_its_own_poller(pair: Pair) -> None:
    poller = select.poll()
    poller.register(pair.decode.fileno(), select.POLLIN)
    assert not poller.poll(0)
    pair.open()
    pair.add()
    pair.send(NUM_TOKENS)
    assert poller.poll(60_000)
    assert pair.decode.wait(0)
    (end,) = pair.decode.take_events()
    assert end == RoomEnded(RoomKey(7, 0), KVPoll.SUCCESS, None, b"first")


def test_a_prefill_worker_of_another_wire_version_fails_the_room_by_number(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, also where its messages are not ours; prefill has counted our frame."""
    encode = messages.encode

    version = messages.PROTOCOL_VERSION + 1

    def later(sender: Any, seq: int, body: Any) -> bytes:
        if sender == pair.prefill.peer_id:
            return messages._encoder.encode([version, *sender, seq, {"a": "message of later"}])
        return encode(sender, seq, body)

    monkeypatch.setattr(inbox, "encode", later)
    pair.open()
    pair.until(lambda: bool(pair.heard(RoomDrained)))
    (end,) = pair.ends()
    assert "protocol version" in str(end.error)
    assert f"ours {messages.PROTOCOL_VERSION}, theirs {version}" in str(end.error)
    assert pair.decode.stats()["handshakes_refused"] == 1


# --- the same tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("decode", ["", None, 7])
def test_the_decode_worker_has_to_be_named(pair: Pair, decode: Any) -> None:
    for call in (
        lambda: pair.prefill.add(7, 0, NUM_TOKENS, decode, PROMPT),
        lambda: pair.prefill.refuse(7, 0, decode=decode),
        lambda: pair.prefill.abort(7, 0, decode=decode),
    ):
        with pytest.raises(RequestError, match="the decode worker's name is needed"):
            call()


def test_lives_and_tickets_are_drawn_at_random() -> None:
    drawn = {secret_number() for _ in range(1000)}
    assert len(drawn) == 1000
    assert all(0 < number < 2**63 for number in drawn)
    assert max(drawn) - min(drawn) > 2**60
