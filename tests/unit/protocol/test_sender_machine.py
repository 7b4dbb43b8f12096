"""Prefill's room machine: the laws of `Laws` hold after every event. The one that matters most: no
reader is told *drained* while a write is in flight, or after one has ended in an error that proves
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.errors import (
    AbortedError,
    InternalError,
    PromptMismatchError,
    RequestError,
    TransferError,
)
from prefixkv.protocol.commands import SendChunk
from prefixkv.protocol.events import Bootstrapped, RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Abort, Drained, Outcome, Promise, PromiseAck
from prefixkv.protocol.sender_machine import (
    AbortSaid,
    Added,
    CancelWrite,
    Fail,
    JobDrained,
    JobEnded,
    LifeBegan,
    OutcomeAcked,
    PostWrite,
    Promised,
    RoomTick,
    SenderEvent,
    SenderMachine,
    SendToReader,
)
from tests.unit.protocol.rooms import (
    DECODE,
    KEY,
    PAGE_SIZE,
    PROMPT,
    TIMING,
    check_all_steps_are_taken,
    check_deadline,
    check_step,
    check_table,
)

PAGES = (3, 9, 5, 6)  # decode's, for tokens 4 to 18 of 18


def promised(fill_len: int = 18, prefix_len: int = 4, pages: Sequence[int] = PAGES) -> Promised:
    return Promised(
        peer=DECODE, word=Promise(*KEY.numbers, fill_len, prefix_len, b"", digest=PROMPT),
        num_units=len(pages), pages=np.array(pages, dtype=np.int32),
    )  # fmt: skip


def chunk(first_page: int, num_pages: int, last: bool = False, clip: bool = False) -> SendChunk:
    """Pages `first_page`.. of the request; page i is our page 20 + i."""
    return SendChunk(
        key=KEY,
        first_page=first_page,
        src_pages=np.arange(20 + first_page, 20 + first_page + num_pages, dtype=np.int32),
        last=last,
        aux=b"first" if last else b"",
        ready=None,
        clip=clip,
    )


def is_fault(machine: SenderMachine, event: Any) -> bool:
    """What only a fault of ours brings about, and the machine therefore refuses."""
    match event:
        case Added():
            return machine.added and machine.poll is not KVPoll.FAILED
        case SendChunk():
            return machine.added and machine.poll is KVPoll.BOOTSTRAPPING and not event.clip
        case JobEnded() | JobDrained():
            return machine.poll not in (KVPoll.TRANSFERRING, KVPoll.FAILED)
    return False


class Laws:
    """A machine, and what may be said about it from outside."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.machine = SenderMachine(KEY, 2, PAGE_SIZE, count(1).__next__, TIMING, self.now_s)
        self.ended: RoomEnded | None = None
        self.source_free = False
        self.in_flight: set[int] = set()
        self.unproven: set[int] = set()  # jobs that failed after their post
        self.settle = False  # there was one
        self.asked = False  # decode has sent an abort
        self.written: list[int] = []  # decode's pages in the order of the posts

    def on(self, event: Any, after_s: float = 0.0) -> list[Any]:
        self.now_s += after_s
        if is_fault(self.machine, event):
            return check_step(self.machine, event, self.now_s, fault=True)
        before = self.machine.poll
        if isinstance(event, JobEnded) and event.job_id in self.in_flight:
            self.in_flight.remove(event.job_id)
            if event.error is not None and not event.drained:
                self.unproven.add(event.job_id)
                self.settle = True
        if isinstance(event, JobDrained):
            self.unproven.discard(event.job_id)
        self.asked |= isinstance(event, AbortSaid)
        actions = self.machine.on(event, self.now_s)
        for action in actions:
            self._see(action)
        self._check(before)
        return actions

    def _see(self, action: Any) -> None:
        if isinstance(action, PostWrite):
            assert self.ended is None, "a write after the end"
            self.in_flight.add(action.job_id)
            self.written += action.dst_pages.tolist()
            assert self.written == list(PAGES[: len(self.written)]), (
                "pages in order, each once, none but the promised"
            )
            assert action.src_pages.tolist() == [
                21 + PAGES.index(page) for page in action.dst_pages.tolist()
            ]
        elif isinstance(action, CancelWrite):
            assert action.job_id in self.in_flight
        elif isinstance(action, RoomEnded):
            assert self.ended is None, "a room ends once"
            self.ended = action
            if action.poll is KVPoll.SUCCESS:
                assert self.written == list(PAGES)
                assert not self.in_flight
                assert not self.unproven
        elif isinstance(action, SourceFree):
            assert not self.source_free, "said once"
            assert self.ended is not None
            assert not self.in_flight, "a write still reads our pages"
            self.source_free = True
        elif isinstance(action, SendToReader):
            self._hear(action.body)

    def _hear(self, body: Any) -> None:
        safe = self.ended is not None and not self.in_flight and not self.unproven
        if isinstance(body, Drained):
            assert safe, "Drained without proof"
            assert self.asked
            assert body.settle == self.settle, (
                "what kernels hold must be read when an agent was destroyed, only then"
            )
        elif isinstance(body, Outcome):
            assert self.ended is not None, "an outcome before the end"
            assert body.ok == (self.ended.poll is KVPoll.SUCCESS)
            assert body.drained == (safe and not self.settle), (
                "the outcome says drained without proof, or hides it"
            )
            assert body.rank == 2
            assert not body.ok or (body.num_pages == len(PAGES) and body.aux == b"first")

    def _check(self, before: KVPoll) -> None:
        machine = self.machine
        assert machine.poll >= before, "a room never goes back"
        assert not (before.ended and machine.poll is not before), "a terminal state stands"
        assert machine.poll.ended == (self.ended is not None)
        assert machine.in_flight == self.in_flight
        assert self.source_free == (self.ended is not None and not self.in_flight)
        if not machine.poll.ended:
            assert machine.wake_s < float("inf"), "a wait without a deadline"
        if machine.over:
            assert self.source_free
            assert not self.unproven


POSTED = [Added(18, PROMPT), promised(), chunk(1, 2)]
FULL_HIT = promised(fill_len=16, prefix_len=16, pages=())
ABORT_SAID = AbortSaid(DECODE, Abort(*KEY.numbers, "enough"))
BROKEN = TransferError("broken")
SCRIPTS: dict[str, list[Any]] = {
    "nothing known": [],
    "added": [Added(18, PROMPT)],
    "parked": [promised()],
    "waiting": [Added(18, PROMPT), promised()],
    "posted": POSTED,
    "posted and done": [*POSTED, JobEnded(1)],
    "all posted": [*POSTED, chunk(3, 2, last=True)],
    "all but one done": [*POSTED, chunk(3, 2, last=True), JobEnded(2)],
    "success": [*POSTED, chunk(3, 2, last=True), JobEnded(2), JobEnded(1)],
    "success, acknowledged": [
        *POSTED,
        chunk(3, 2, last=True),
        JobEnded(2),
        JobEnded(1),
        OutcomeAcked(),
    ],
    "failed, write in flight": [*POSTED, Fail(AbortedError("enough"))],
    "failed, acknowledged, write in flight": [
        *POSTED,
        Fail(AbortedError("enough")),
        OutcomeAcked(),
    ],
    "failed by a write that proves nothing": [*POSTED, JobEnded(1, BROKEN, drained=False)],
    "failed by a write that proves nothing, its agent destroyed": [
        *POSTED,
        JobEnded(1, BROKEN, drained=False),
        JobDrained(1),
    ],
    "failed by a write refused at post": [*POSTED, JobEnded(1, BROKEN)],
    "aborted by decode, write in flight": [*POSTED, ABORT_SAID],
    "aborted before the promise": [ABORT_SAID],
    "peer lost, write in flight": [*POSTED, Fail(BROKEN, tell=False)],
    "parked too long": [promised(), RoomTick()],
    "chunk kept": [Added(18, PROMPT), chunk(0, 2, clip=True)],
    "all chunks kept": [
        Added(18, PROMPT),
        chunk(0, 3, clip=True),
        chunk(3, 2, last=True, clip=True),
    ],
    "a later chunk kept": [Added(18, PROMPT), chunk(3, 2, last=True, clip=True)],
    "posted from what was kept": [Added(18, PROMPT), chunk(0, 3, clip=True), promised()],
    "all posted but not the last": [Added(18, PROMPT), promised(), chunk(1, 4), JobEnded(1)],
}
EVENTS: list[tuple[Any, float]] = [
    (Added(18, PROMPT), 0), (Added(17, PROMPT), 0), (promised(), 0), (chunk(1, 2), 0),
    (chunk(1, 4, last=True), 0),
    (chunk(3, 2, last=True), 0), (chunk(3, 1, last=True), 0), (chunk(5, 0, last=True), 0),
    (chunk(2, 1), 0), (chunk(1, 9), 0), (JobEnded(1), 0), (JobEnded(2), 0), (JobEnded(99), 0),
    (JobEnded(1, BROKEN), 0), (JobEnded(1, BROKEN, drained=False), 0),
    (JobEnded(2, BROKEN, drained=False), 0), (JobDrained(1), 0), (JobDrained(2), 0),
    (LifeBegan(DECODE, 3.0), 0),
    (ABORT_SAID, 0), (Fail(AbortedError("enough")), 0),
    (Fail(BROKEN, tell=False), 0), (OutcomeAcked(), 0), (RoomTick(), 0),
    (RoomTick(), TIMING.resend_s), (RoomTick(), 100.0), (chunk(0, 2, clip=True), 0),
    (chunk(0, 5, last=True, clip=True), 0), (chunk(2, 3, last=True, clip=True), 0),
]  # fmt: skip


def run(script: list[Any]) -> Laws:
    laws = Laws()
    for event in script:
        laws.on(event)
    return laws


def finish(laws: Laws) -> None:
    """All writes end, decode aborts, time passes, agents with writes that proved nothing are
    destroyed: all is over."""
    for job_id in sorted(laws.in_flight):
        laws.on(JobEnded(job_id))
    laws.on(RoomTick(), 1000.0)
    if (
        not laws.machine.readers
    ):  # no decode worker has ever named the room: the endpoint answers for it
        laws.on(RoomTick(), 1000.0)  # nor has one since it failed
        assert laws.machine.over
        return
    said = laws.on(ABORT_SAID) + laws.on(ABORT_SAID)
    drained = [
        say for say in said if isinstance(say, SendToReader) and isinstance(say.body, Drained)
    ]
    assert len(drained) == (0 if laws.unproven else 2), "each abort is answered, once it can be"
    for job_id in sorted(laws.unproven):
        drained += [say for say in laws.on(JobDrained(job_id)) if isinstance(say, SendToReader)]
    assert drained, "an abort that had to wait is answered when the last agent is destroyed"
    assert laws.machine.over
    assert laws.source_free


def test_the_table_names_every_event_in_every_state_but_our_own_faults() -> None:
    faults = {
        KVPoll.BOOTSTRAPPING: {JobEnded, JobDrained},
        KVPoll.WAITING_FOR_INPUT: {Added, JobEnded, JobDrained},
        KVPoll.TRANSFERRING: {Added},
        KVPoll.SUCCESS: {Added, JobEnded, JobDrained},
    }
    check_table(SenderMachine.TABLE, SenderEvent, faults)


def test_every_event_in_every_state_does_as_the_table_says_and_no_step_is_listed_in_vain() -> None:
    full_hits = [
        [Added(16, PROMPT)],
        [Added(16, PROMPT), FULL_HIT],
        [Added(16, PROMPT), chunk(0, 4, clip=True)],
        [Added(16, PROMPT), chunk(0, 4, last=True, clip=True)],
    ]
    taken = set()
    for script, (event, after_s) in product(
        [*SCRIPTS.values(), *full_hits], [*EVENTS, (FULL_HIT, 0)]
    ):
        machine = SenderMachine(KEY, 2, PAGE_SIZE, count(1).__next__, TIMING, 0.0)
        for earlier in script:
            machine.on(earlier, 0.0)
        before, fault = machine.poll, is_fault(machine, event)
        check_step(machine, event, after_s, fault=fault)
        step = SenderMachine.TABLE[before].get(type(event))
        if step is not None and step.method is not None and not fault:
            taken.add((before, type(event), machine.poll))
    check_all_steps_are_taken(SenderMachine.TABLE, taken)


@pytest.mark.parametrize(
    ("script", "event"),
    [
        ("added", Added(18, PROMPT)),
        ("waiting", Added(18, PROMPT)),
        ("success", Added(18, PROMPT)),
        ("nothing known", JobEnded(1)),
        ("waiting", JobEnded(1)),
        ("success", JobEnded(1)),
        ("added", chunk(1, 2)),
        ("chunk kept", chunk(2, 2)),
    ],
)
def test_a_fault_of_ours_raises_and_names_state_and_event(script: str, event: Any) -> None:
    machine = run(SCRIPTS[script]).machine
    with pytest.raises(
        InternalError, match=f"{type(event).__name__} must not come in {machine.poll.name}"
    ):
        machine.on(event, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_any_two_events_in_any_state_keep_the_laws(script: list[Any]) -> None:
    for first, second in product(EVENTS, EVENTS):
        laws = run(script)
        laws.on(*first)
        laws.on(*second)
        finish(laws)


@given(
    st.booleans(),
    st.lists(
        st.one_of(
            st.sampled_from(EVENTS),
            st.builds(
                lambda job_id, how: (JobEnded(job_id, *how), 0),
                st.integers(1, 5),
                st.sampled_from([(None, True), (BROKEN, True), (BROKEN, False)]),
            ),
            st.builds(
                lambda first, num, last, clip: (chunk(first, num, last, clip), 0),
                st.integers(0, 5), st.integers(0, 4), st.booleans(), st.booleans(),
            ),
            st.builds(lambda job_id: (JobDrained(job_id), 0), st.integers(1, 5)),
            st.just((LifeBegan(DECODE, 3.0), 0)),
            st.builds(lambda pause_s: (RoomTick(), pause_s), st.floats(0, 5)),
        ),
        max_size=30,
    ),
)  # fmt: skip
def test_any_sequence_keeps_the_laws(promised_first: bool, events: list[tuple[Any, float]]) -> None:
    laws = Laws()
    for event in [(Added(18, PROMPT), 0), *([(promised(), 0)] if promised_first else []), *events]:
        laws.on(*event)
    finish(laws)


@given(st.permutations([1, 2, 3]), st.integers(0, 3), st.data())
def test_no_acknowledgement_before_the_last_write_has_ended(
    order: list[int], done: int, data: st.DataObject
) -> None:
    """Three writes; decode aborts when `done` of them are done, and hears Drained with the last
    end, not before."""
    laws = run([Added(18, PROMPT), promised(), chunk(1, 1), chunk(2, 1), chunk(3, 1)])
    unproven = data.draw(st.sampled_from([0, *order]))
    for job_id in order[:done]:
        laws.on(JobEnded(job_id, *((BROKEN, False) if job_id == unproven else ())))
    said = laws.on(ABORT_SAID)
    for job_id in order[done:]:
        assert not any(
            isinstance(say.body, Drained) for say in said if isinstance(say, SendToReader)
        )
        laws.on(RoomTick(), 50.0)
        said = laws.on(JobEnded(job_id, *((BROKEN, False) if job_id == unproven else ())))
    assert [SendToReader(DECODE, Drained(*KEY.numbers, 2))] * (not unproven) == [
        say for say in said if isinstance(say, SendToReader)
    ]
    if unproven:
        assert laws.on(JobDrained(unproven)) == [
            SendToReader(DECODE, Drained(*KEY.numbers, 2, settle=True))
        ]
        assert laws.on(JobDrained(unproven)) == []


@pytest.mark.parametrize("added_first", [True, False])
def test_the_path_of_one_room(added_first: bool) -> None:
    laws = Laws()
    ack = SendToReader(DECODE, PromiseAck(*KEY.numbers, 2))
    known = Bootstrapped(KEY, DECODE, 4)
    if added_first:
        assert laws.on(Added(18, PROMPT)) == []
        assert laws.on(promised()) == [ack, known]
    else:
        assert laws.on(promised()) == [ack]
        assert laws.on(Added(18, PROMPT)) == [known]
    assert laws.on(promised()) == [ack], "said again, it is answered again"
    [post] = laws.on(chunk(1, 3))
    assert (post.job_id, post.chunk, post.dst_pages.tolist()) == (1, 0, [3, 9, 5])
    assert laws.on(chunk(4, 0)) == [], "nothing to send"
    assert laws.on(JobEnded(1)) == []
    [post] = laws.on(chunk(4, 1, last=True))
    assert (post.job_id, post.chunk, post.dst_pages.tolist()) == (2, 1, [6])
    said = Outcome(*KEY.numbers, 2, True, 2, 4, b"first", "", True, num_units=4)
    outcome = SendToReader(DECODE, said)
    assert laws.on(JobEnded(2)) == [RoomEnded(KEY, KVPoll.SUCCESS), outcome, SourceFree(KEY)]
    assert laws.on(promised()) == [outcome]
    assert not laws.machine.over
    laws.on(OutcomeAcked())
    assert laws.machine.over


def test_a_promise_of_a_rank_that_is_no_reader_means_nothing_after_success() -> None:
    laws = run(SCRIPTS["success"])
    stranger = msgspec.structs.replace(promised(), reader=5, peer=PeerId("decode-0/5", 5))
    assert laws.on(stranger) == []
    assert laws.on(promised()) != []


def test_the_answer_of_a_rank_that_is_no_reader_answers_for_none() -> None:
    laws = run([*SCRIPTS["success"], OutcomeAcked(5)])
    assert not laws.machine.over
    [said] = laws.on(RoomTick(), TIMING.resend_s)
    assert isinstance(said.body, Outcome)


def test_a_full_hit_sends_no_page_and_still_says_its_outcome() -> None:
    laws = run([Added(16, PROMPT), FULL_HIT])
    actions = laws.machine.on(chunk(4, 0, last=True), 0.0)
    outcome = SendToReader(DECODE, Outcome(*KEY.numbers, 2, True, 0, 0, b"first", "", True))
    assert actions == [RoomEnded(KEY, KVPoll.SUCCESS), outcome, SourceFree(KEY)]


@pytest.mark.parametrize(
    ("script", "error", "text"),
    [
        (
            [Added(17, PROMPT), promised()],
            PromptMismatchError,
            "18 tokens, the request here has 17",
        ),
        ([*POSTED, chunk(3, 2, last=True), chunk(5, 0)], RequestError, "after the last"),
        ([*POSTED, chunk(1, 2)], TransferError, "units 0 to 2 .* unit 2 of 4 is next"),
        ([*POSTED, chunk(4, 1)], TransferError, "units 3 to 4 .* unit 2 of 4 is next"),
        ([*POSTED, chunk(3, 3)], TransferError, "units 2 to 5"),
        ([*POSTED, chunk(3, 1, last=True)], TransferError, "3 of 4 units"),
        ([*POSTED, AbortSaid(DECODE, Abort(*KEY.numbers, "why"))], AbortedError, "why"),
    ],
)
def test_what_cannot_be_fails_the_room_and_says_why(
    script: list[Any], error: type, text: str
) -> None:
    laws = run(script)
    assert laws.machine.poll is KVPoll.FAILED
    with pytest.raises(error, match=text):
        raise laws.ended.error


def test_a_failing_room_cancels_all_that_is_in_flight_and_frees_its_source_with_the_last_end() -> (
    None
):
    laws = run([Added(18, PROMPT), promised(), chunk(1, 1), chunk(2, 1), chunk(3, 1)])
    actions = laws.on(JobEnded(2, BROKEN))
    assert [action.job_id for action in actions if isinstance(action, CancelWrite)] == [1, 3]
    assert laws.on(JobEnded(3, BROKEN)) == []
    assert laws.on(JobEnded(1)) == [SourceFree(KEY)]


@pytest.mark.parametrize(
    ("script", "deadline_s"),
    [
        ("added", TIMING.bootstrap_timeout_s),
        ("parked", TIMING.parked_timeout_s),
        ("waiting", TIMING.waiting_timeout_s),
        ("posted", TIMING.transfer_timeout_s),
        ("all but one done", TIMING.transfer_timeout_s),
    ],
)
def test_every_waiting_state_has_its_deadline(script: str, deadline_s: float) -> None:
    laws = run(SCRIPTS[script])
    check_deadline(laws, RoomTick(), deadline_s)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "parked",
            f"decode worker '{DECODE.name}' has promised pages, the request never came, or names "
            "another decode worker (Request.decode)",
        ),
        ("waiting", f"decode worker '{DECODE.name}': the deadline passed in WAITING_FOR_INPUT"),
    ],
)
def test_a_timeout_names_the_decode_worker(script: str, said: str) -> None:
    laws = run(SCRIPTS[script])
    laws.on(RoomTick(), laws.machine.wake_s - laws.now_s)
    assert str(laws.machine.error) == said


def test_a_timeout_names_the_decode_worker_that_the_request_names() -> None:
    key = RoomKey(7, 0, "d3")
    machine = SenderMachine(key, 2, PAGE_SIZE, count(1).__next__, TIMING, 0.0)
    machine.on(Added(18, PROMPT), 0.0)
    machine.on(RoomTick(), TIMING.bootstrap_timeout_s)
    assert str(machine.error).startswith(
        "decode worker 'd3' (Request.decode) has promised no pages"
    )


@pytest.mark.parametrize("script", ["success", "failed by a write refused at post"])
def test_the_outcome_is_said_again_until_acknowledged_or_for_long_enough(script: str) -> None:
    laws = run(SCRIPTS[script])
    times = []
    for _ in range(20):  # a machine that says it once asks to be woken in the past, for ever
        if (wake_s := laws.machine.wake_s) == float("inf"):
            break
        if laws.on(RoomTick(), wake_s - laws.now_s):
            times.append(laws.now_s)
    assert times == [0.5, 1.5, 3.5, 7.5]
    assert laws.now_s == TIMING.ack_timeout_s
    assert laws.machine.over


def test_an_outcome_said_again_is_up_to_date_about_drained() -> None:
    laws = run(SCRIPTS["failed, write in flight"])
    [said] = laws.on(RoomTick(), TIMING.resend_s)
    assert not said.body.drained
    laws.on(JobEnded(1))
    [said] = laws.on(RoomTick(), 2 * TIMING.resend_s)
    assert said.body.drained


def test_an_outcome_does_not_drain_what_has_to_settle() -> None:
    """A write that proved nothing before its agent was destroyed: Drained asks for that."""
    laws = run(SCRIPTS["failed, write in flight"])
    laws.on(JobEnded(1, BROKEN, False))
    assert laws.on(JobDrained(1)) == []
    [said] = laws.on(RoomTick(), TIMING.resend_s)
    assert not said.body.drained
    [said] = laws.on(ABORT_SAID)
    assert said.body == Drained(*KEY.numbers, 2, settle=True)
