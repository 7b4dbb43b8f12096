"""Chunks that come before the promise, or with pages that decode has: they are kept, and clipped,
so that each promised unit is posted once and in order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.errors import (
    AbortedError,
    PromptMismatchError,
    TransferError,
    TransferTimeoutError,
)
from prefixkv.paging import Pages, pages_for, unit_pages
from prefixkv.protocol.commands import SendChunk
from prefixkv.protocol.events import Bootstrapped, RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId
from prefixkv.protocol.messages import Abort, Promise
from prefixkv.protocol.sender_machine import (
    AbortSaid,
    Added,
    CancelWrite,
    Fail,
    JobEnded,
    PostWrite,
    Promised,
    RoomTick,
    SenderEvent,
    SenderMachine,
    SendToReader,
)
from tests.unit.protocol.rooms import KEY, TIMING
from tests.unit.protocol.rooms import PROMPT as DIGEST

DECODE = (PeerId("d/0", 5), PeerId("d/1", 5))


class Prompt(NamedTuple):
    """A request of `fill_len` tokens, `prefix_len` of which decode has; page sizes in tokens."""

    fill_len: int
    prefix_len: int
    ours: int
    theirs: int
    num_readers: int = 1

    @property
    def unit_tokens(self) -> int:
        return min(self.ours, self.theirs)

    @property
    def num_units(self) -> int:
        return pages_for(self.fill_len - self.prefix_len, self.unit_tokens)

    @property
    def num_pages(self) -> int:
        return pages_for(self.fill_len, self.ours)

    def machine(self) -> SenderMachine:
        machine = SenderMachine(KEY, 0, self.ours, count(1).__next__, TIMING, 0.0)
        machine.on(Added(self.fill_len, DIGEST), 0.0)
        return machine

    def promised(self, reader: int) -> Promised:
        """The units of pages 200, 199, ... of decode's; each reader's a hundred further on."""
        fold = self.theirs // self.unit_tokens
        first_page = 200 + 100 * reader
        pages = np.arange(first_page, first_page - pages_for(self.num_units, fold), -1, np.int32)
        return Promised(
            peer=DECODE[reader],
            word=Promise(*KEY.numbers, self.fill_len, self.prefix_len, b"", 1, DIGEST),
            pages=pages, num_units=self.num_units, reader=reader,
            readers=tuple(range(self.num_readers)), unit_tokens=self.unit_tokens, fold=fold,
        )  # fmt: skip

    def chunk(self, start: int, stop: int, *, last: bool = False, clip: bool = True) -> SendChunk:
        """Pages `start` to `stop` of the request; page i is our page 3 * i + 1."""
        src_pages = 3 * np.arange(start, stop, dtype=np.int32) + 1
        return SendChunk(
            key=KEY,
            first_page=start,
            src_pages=src_pages,
            last=last,
            aux=b"",
            ready=None,
            clip=clip,
        )

    def src_units(self) -> list[int]:
        """Ours, of all tokens that decode has not: worked out token by token."""
        fold = self.ours // self.unit_tokens
        tokens = range(self.prefix_len, self.fill_len, self.unit_tokens)
        return [
            (3 * (token // self.ours) + 1) * fold + token % self.ours // self.unit_tokens
            for token in tokens
        ]


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    ours, theirs = draw(st.sampled_from([(4, 4), (1, 1), (16, 4), (4, 16), (2, 8), (8, 2)]))
    fill_len = draw(st.integers(1, 70))
    prefix_len = draw(st.integers(0, fill_len // theirs)) * theirs
    return Prompt(fill_len, prefix_len, ours, theirs, draw(st.integers(1, 2)))


def splits(prompt: Prompt, cuts: Sequence[int], empty_last: bool) -> list[SendChunk]:
    """The whole prompt in chunks that end at `cuts`; some may have no page."""
    ends = [*sorted(cuts), prompt.num_pages] + [prompt.num_pages] * empty_last
    starts = [0, *ends[:-1]]
    return [
        prompt.chunk(start, stop, last=i == len(ends) - 1)
        for i, (start, stop) in enumerate(zip(starts, ends, strict=True))
    ]


class Heard:
    """What a machine has posted, by reader."""

    def __init__(self, machine: SenderMachine) -> None:
        self.machine = machine
        self.actions: list[Any] = []

    def on(self, event: SenderEvent) -> list[Any]:
        actions = self.machine.on(event, 0.0)
        self.actions += actions
        return actions

    def posts(self, peer: PeerId) -> list[PostWrite]:
        return [
            action
            for action in self.actions
            if isinstance(action, PostWrite) and action.peer == peer
        ]

    def ended(self) -> RoomEnded | None:
        return next((action for action in self.actions if isinstance(action, RoomEnded)), None)


def joined(pages: Sequence[Pages]) -> list[int]:
    return [page for part in pages for page in part.tolist()]


@given(prompts(), st.data())
def test_any_split_before_and_after_the_promise_posts_what_is_promised_in_order_and_once(
    prompt: Prompt, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, prompt.num_pages), max_size=6))
    chunks = splits(prompt, cuts, data.draw(st.booleans()))
    promised_at = sorted(data.draw(st.integers(0, len(chunks))) for _ in range(prompt.num_readers))
    heard = Heard(prompt.machine())
    for i in range(len(chunks) + 1):
        for reader, at in enumerate(promised_at):
            if at == i:
                actions = heard.on(prompt.promised(reader))
                is_last = reader == prompt.num_readers - 1
                assert isinstance(actions[0], SendToReader)
                assert [type(action) for action in actions[1:2]] == [Bootstrapped] * is_last
        if i < len(chunks):
            actions = heard.on(chunks[i])
            assert actions == [] or i >= promised_at[-1], "something came before the promise"
    for reader in range(prompt.num_readers):
        posts = heard.posts(DECODE[reader])
        promised = prompt.promised(reader)
        units = unit_pages(promised.pages, promised.fold, 0, prompt.num_units)
        assert joined([post.dst_pages for post in posts]) == units.tolist()
        assert joined([post.src_pages for post in posts]) == prompt.src_units()
        at = 0
        for post in posts:
            assert post.first_unit == at
            assert len(post.src_pages) > 0
            at += len(post.src_pages)
    for job_id in sorted(heard.machine.in_flight):
        heard.on(JobEnded(job_id))
    assert heard.machine.poll is KVPoll.SUCCESS
    assert isinstance(heard.actions[-1], SourceFree)


@given(prompts(), st.data())
def test_a_chunk_that_is_left_out_or_comes_twice_fails_the_room_however_it_is_kept(
    prompt: Prompt, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, prompt.num_pages), max_size=6))
    chunks = splits(prompt, cuts, empty_last=True)
    fold = prompt.ours // prompt.unit_tokens
    behind = [
        i
        for i, chunk in enumerate(chunks)
        if len(chunk.src_pages)
        and (chunk.first_page + len(chunk.src_pages)) * fold * prompt.unit_tokens
        > prompt.prefix_len
        and prompt.num_units
    ]
    if not behind:
        return
    wrong = data.draw(st.sampled_from(behind))
    chunks[wrong : wrong + 1] = [chunks[wrong]] * data.draw(st.sampled_from([0, 2]))
    promised_at = data.draw(st.integers(0, len(chunks)))
    one = prompt._replace(num_readers=1)
    heard = Heard(one.machine())
    for chunk in chunks[:promised_at]:
        heard.on(chunk)
    heard.on(one.promised(0))
    for chunk in chunks[promised_at:]:
        heard.on(chunk)
    ended = heard.ended()
    assert ended is not None
    assert isinstance(ended.error, TransferError)
    posts = heard.posts(DECODE[0])
    num_posted = sum(len(post.src_pages) for post in posts)
    assert joined([post.src_pages for post in posts]) == one.src_units()[:num_posted]
    cancelled = [action for action in heard.actions if isinstance(action, CancelWrite)]
    assert len(cancelled) == len(posts)


PROMPT = Prompt(fill_len=18, prefix_len=8, ours=4, theirs=4)


@pytest.mark.parametrize(
    ("start", "stop", "text"),
    [(0, 3, "units -2 to 1"), (1, 2, "units -1 to 0"), (3, 5, "units 1 to 3 .* unit 0 of 3")],
)
@pytest.mark.parametrize("clip", [False, True])
def test_without_clip_pages_that_decode_has_fail_the_room_and_a_gap_does_so_always(
    start: int, stop: int, text: str, clip: bool
) -> None:
    machine = PROMPT.machine()
    machine.on(PROMPT.promised(0), 0.0)
    machine.on(PROMPT.chunk(start, stop, clip=clip), 0.0)
    if clip and start <= 2:
        assert machine.poll is KVPoll.TRANSFERRING
    else:
        with pytest.raises(TransferError, match=text):
            raise machine.error or AssertionError("it has not failed")


@pytest.mark.parametrize(
    ("event", "after_s", "error"),
    [
        (Fail(AbortedError("enough")), 0.0, AbortedError),
        (AbortSaid(DECODE[0], Abort(*KEY.numbers, "no")), 0.0, AbortedError),
        (RoomTick(), TIMING.bootstrap_timeout_s, TransferTimeoutError),
        (Prompt(17, 8, 4, 4).promised(0), 0.0, PromptMismatchError),
    ],
    ids=["aborted", "aborted by decode", "no promise came", "another length"],
)
def test_what_is_kept_is_dropped_when_the_room_fails(
    event: SenderEvent, after_s: float, error: type[Exception]
) -> None:
    machine = PROMPT.machine()
    machine.on(PROMPT.chunk(0, 5, last=True), 0.0)
    actions = machine.on(event, after_s)
    assert isinstance(machine.error, error)
    assert isinstance(actions[-1], SourceFree), "nothing reads the pages that were handed over"
    later = machine.on(PROMPT.promised(0), after_s)
    assert not any(isinstance(action, PostWrite | Bootstrapped) for action in later)
    assert not machine._early_chunks


def test_a_chunk_after_the_last_one_fails_the_room_when_the_promise_comes() -> None:
    heard = Heard(PROMPT.machine())
    for _ in range(2):
        heard.on(PROMPT.chunk(0, 5, last=True))
    kinds = [type(action) for action in heard.on(PROMPT.promised(0))]
    assert kinds[1:] == [Bootstrapped, PostWrite, RoomEnded, CancelWrite, SendToReader]
    assert "after the last" in str(heard.machine.error)


@pytest.mark.parametrize("clip", [False, True])
def test_a_chunk_of_an_earlier_use_of_the_number_is_not_kept_for_the_next(clip: bool) -> None:
    """Decode has ended that use and promised the next, before the engine has heard of either."""
    machine = SenderMachine(KEY, 0, 4, count(1).__next__, TIMING, 0.0)
    machine.on(PROMPT.promised(0), 0.0)
    assert machine.on(PROMPT.chunk(0, 5, last=True, clip=clip), 0.0) == []
    kinds = [type(action) for action in machine.on(Added(18, DIGEST), 0.0)]
    assert kinds == [Bootstrapped]
    assert machine.poll is KVPoll.WAITING_FOR_INPUT
