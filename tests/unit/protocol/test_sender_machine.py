"""Prefill's room machine: the laws of `Laws` hold after every event, for one reader and for two,
with pages of equal and of unequal sizes. The one that matters most: no reader is told *drained*
while a write is in flight, or after one has ended in an error that proves nothing.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import count, product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.errors import (
    AbortedError,
    PromptMismatchError,
    RequestError,
    TransferError,
    TransferTimeoutError,
)
from prefixkv.paging import pages_for, unit_pages
from prefixkv.protocol.commands import GroupChunk, SendChunk
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
    KEY,
    PROMPT,
    TIMING,
    check_all_steps_are_taken,
    check_deadline,
    check_step,
    check_table,
)

READERS = A, B = PeerId("decode-0", 5), PeerId("decode-0/1", 5)
RANK = 2  # of ours


class Room(NamedTuple):
    """A request of `fill_len` tokens, `prefix_len` of which decode has; page sizes in tokens."""

    fill_len: int = 18
    prefix_len: int = 4
    ours: int = 4
    theirs: int = 4
    num_readers: int = 1

    @property
    def unit_tokens(self) -> int:
        return min(self.ours, self.theirs)

    @property
    def fold(self) -> int:
        return self.theirs // self.unit_tokens

    @property
    def num_units(self) -> int:
        return pages_for(self.fill_len - self.prefix_len, self.unit_tokens)

    @property
    def num_pages(self) -> int:
        return pages_for(self.fill_len, self.ours)

    def machine(self, key: RoomKey = KEY) -> SenderMachine:
        return SenderMachine(key, RANK, self.ours, count(1).__next__, TIMING, 0.0)

    def added(self) -> Added:
        return Added(self.fill_len, PROMPT)

    def promised(self, reader: int = 0, *, ticket: int = 0, **changes: Any) -> Promised:
        """The units of pages 200, 199, ... of decode's; each reader's a hundred further on."""
        first = 200 + 100 * reader
        pages = np.arange(first, first - pages_for(self.num_units, self.fold), -1, np.int32)
        word = Promise(*KEY.numbers, self.fill_len, self.prefix_len, b"", ticket, PROMPT)
        fields = {
            "peer": READERS[reader], "word": word, "pages": pages, "num_units": self.num_units,
            "reader": reader, "readers": tuple(range(self.num_readers)),
            "unit_tokens": self.unit_tokens, "fold": self.fold,
        }  # fmt: skip
        return Promised(**{**fields, **changes})

    def chunk(
        self, start: int, stop: int, last: bool = False, clip: bool = False, slot: int = -1
    ) -> SendChunk:
        """Pages `start` to `stop` of the request; page i is our page 3 * i + 1."""
        src = 3 * np.arange(start, stop, dtype=np.int32) + 1
        groups = () if slot < 0 else (GroupChunk(0, np.array([slot], np.int32)),)
        return SendChunk(KEY, start, src, last, b"first" if last else b"", None, clip, groups)

    def abort(self, reader: int = 0, why: str = "enough") -> AbortSaid:
        readers = tuple(range(self.num_readers))
        return AbortSaid(READERS[reader], Abort(*KEY.numbers, why), reader, readers)

    def src_units(self) -> list[int]:
        """Ours, of all tokens that decode has not: worked out token by token."""
        fold = self.ours // self.unit_tokens
        return [
            (3 * (token // self.ours) + 1) * fold + token % self.ours // self.unit_tokens
            for token in range(self.prefix_len, self.fill_len, self.unit_tokens)
        ]

    def dst_units(self, reader: int = 0) -> list[int]:
        return list(unit_pages(self.promised(reader).pages, self.fold, 0, self.num_units).tolist())


ONE, TWO = Room(), Room(fill_len=16, prefix_len=0, num_readers=2)


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

    def __init__(self, room: Room = ONE, script: Sequence[Any] = ()) -> None:
        self.room, self.machine = room, room.machine()
        self.now_s = 0.0
        self.ended: RoomEnded | None = None
        self.source_free = False
        self.in_flight: set[int] = set()
        self.unproven: set[int] = set()  # jobs that failed after their post
        self.settle = False  # there was one
        self.asked: set[PeerId] = set()  # readers that have sent an abort
        self.read: dict[PeerId, list[int]] = defaultdict(list)  # units, in the order of the posts
        self.written: dict[PeerId, list[int]] = defaultdict(list)
        self.num_others = 0  # pages of groups
        for event in script:
            self.on(event)

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
        if isinstance(event, AbortSaid):
            self.asked.add(event.peer)
        actions = self.machine.on(event, self.now_s)
        for action in actions:
            self._see(action)
        self._check(before)
        return actions

    def _see(self, action: Any) -> None:
        if isinstance(action, PostWrite):
            assert self.ended is None, "a write after the end"
            self.in_flight.add(action.job_id)
            if action.group < 0:
                self._see_pages(action)
            else:
                self.num_others += len(action.dst_pages)
        elif isinstance(action, CancelWrite):
            assert action.job_id in self.in_flight
        elif isinstance(action, RoomEnded):
            assert self.ended is None, "a room ends once"
            self.ended = action
            if action.poll is KVPoll.SUCCESS:
                written = [self.written[peer] for peer in READERS[: self.room.num_readers]]
                assert all(len(one) == self.room.num_units for one in written)
                assert not self.in_flight
                assert not self.unproven
        elif isinstance(action, SourceFree):
            assert not self.source_free, "said once"
            assert self.ended is not None
            assert not self.in_flight, "a write still reads our pages"
            self.source_free = True
        elif isinstance(action, SendToReader):
            self._hear(action.peer, action.body)

    def _see_pages(self, post: PostWrite) -> None:
        """In order, each once, none but the promised, and each from where its tokens are."""
        read, written = self.read[post.peer], self.written[post.peer]
        assert post.first_unit == len(written)
        assert len(post.src_pages) == len(post.dst_pages) > 0
        read += post.src_pages.tolist()
        written += post.dst_pages.tolist()
        reader = READERS.index(post.peer)
        assert written == self.room.dst_units(reader)[: len(written)]
        assert read == self.room.src_units()[: len(read)]

    def _hear(self, peer: PeerId, body: Any) -> None:
        safe = self.ended is not None and not self.in_flight and not self.unproven
        if isinstance(body, Drained):
            assert safe, "Drained without proof"
            assert peer in self.asked
            assert body.settle == self.settle, (
                "what kernels hold must be read when an agent was destroyed, only then"
            )
        elif isinstance(body, Outcome):
            assert self.ended is not None, "an outcome before the end"
            assert body.ok == (self.ended.poll is KVPoll.SUCCESS)
            assert body.drained == (safe and not self.settle), (
                "the outcome says drained without proof, or hides it"
            )
            assert body.rank == RANK
            num_pages = pages_for(self.room.num_units, self.room.fold) + self.num_others
            assert not body.ok or (body.num_pages == num_pages and body.aux == b"first")

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


def of(actions: list[Any], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def said(actions: list[Any], kind: type = object) -> list[tuple[PeerId, Any]]:
    """(to whom, body) of what is sent of this kind."""
    sends = of(actions, SendToReader)
    return [(one.peer, one.body) for one in sends if isinstance(one.body, kind)]


def names(actions: list[Any]) -> list[str]:
    return [type(action).__name__ for action in actions]


# --- one reader -----------------------------------------------------------------------------------

ADDED, PROMISED = ONE.added(), ONE.promised()
BEGUN = [ADDED, PROMISED]
POSTED = [*BEGUN, ONE.chunk(1, 3)]
ALL_POSTED = [*POSTED, ONE.chunk(3, 5, last=True)]
SUCCESS = [*ALL_POSTED, JobEnded(2), JobEnded(1)]
THREE = [*BEGUN, *(ONE.chunk(at, at + 1) for at in (1, 2, 3))]
FULL = Room(fill_len=16, prefix_len=16)
ABORT_SAID, FAIL = ONE.abort(), Fail(AbortedError("enough"))
BROKEN = TransferError("broken")
UNPROVEN = JobEnded(1, BROKEN, drained=False)
SCRIPTS: dict[str, list[Any]] = {
    "nothing known": [],
    "added": [ADDED],
    "parked": [PROMISED],
    "waiting": BEGUN,
    "posted": POSTED,
    "posted and done": [*POSTED, JobEnded(1)],
    "all posted": ALL_POSTED,
    "all but one done": [*ALL_POSTED, JobEnded(2)],
    "success": SUCCESS,
    "success, acknowledged": [*SUCCESS, OutcomeAcked()],
    "failed, write in flight": [*POSTED, FAIL],
    "failed, acknowledged, write in flight": [*POSTED, FAIL, OutcomeAcked()],
    "failed by a write that proves nothing": [*POSTED, UNPROVEN],
    "failed by a write that proves nothing, its agent destroyed": [
        *POSTED, UNPROVEN, JobDrained(1),
    ],
    "failed by a write refused at post": [*POSTED, JobEnded(1, BROKEN)],
    "aborted by decode, write in flight": [*POSTED, ABORT_SAID],
    "aborted before the promise": [ABORT_SAID],
    "peer lost, write in flight": [*POSTED, Fail(BROKEN, tell=False)],
    "parked too long": [PROMISED, RoomTick()],
    "chunk kept": [ADDED, ONE.chunk(0, 2, clip=True)],
    "all chunks kept": [ADDED, ONE.chunk(0, 3, clip=True), ONE.chunk(3, 5, True, True)],
    "a later chunk kept": [ADDED, ONE.chunk(3, 5, True, True)],
    "posted from what was kept": [ADDED, ONE.chunk(0, 3, clip=True), PROMISED],
    "all posted but not the last": [*BEGUN, ONE.chunk(1, 5), JobEnded(1)],
}  # fmt: skip
EVENTS: list[tuple[Any, float]] = [
    *((event, 0) for event in (
        ADDED, Added(17, PROMPT), PROMISED, ONE.chunk(1, 3), ONE.chunk(1, 5, last=True),
        ONE.chunk(3, 5, last=True), ONE.chunk(3, 4, last=True), ONE.chunk(5, 5, last=True),
        ONE.chunk(2, 3), ONE.chunk(1, 10), JobEnded(1), JobEnded(2), JobEnded(99),
        JobEnded(1, BROKEN), UNPROVEN, JobEnded(2, BROKEN, drained=False), JobDrained(1),
        JobDrained(2), LifeBegan(A, 3.0), ABORT_SAID, FAIL, Fail(BROKEN, tell=False),
        OutcomeAcked(), RoomTick(), ONE.chunk(0, 2, clip=True), ONE.chunk(0, 5, True, True),
        ONE.chunk(2, 5, True, True),
    )),
    (RoomTick(), TIMING.resend_s), (RoomTick(), 100.0),
]  # fmt: skip


def finish(laws: Laws) -> None:
    """All writes end, decode aborts, time passes, agents with writes that proved nothing are
    destroyed: all is over."""
    for job_id in sorted(laws.in_flight):
        laws.on(JobEnded(job_id))
    laws.on(RoomTick(), 1000.0)
    if not laws.machine.readers:  # no decode worker has ever named the room, nor has one since
        laws.on(RoomTick(), 1000.0)
        assert laws.machine.over
        return
    aborts = [laws.room.abort(reader) for reader in range(laws.room.num_readers)] * 2
    drained = [one for abort in aborts for one in said(laws.on(abort), Drained)]
    assert len(drained) == (0 if laws.unproven else len(aborts)), "each is answered, once it can be"
    for job_id in sorted(laws.unproven):
        drained += said(laws.on(JobDrained(job_id)))
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
    added, early = FULL.added(), FULL.chunk(0, 4, clip=True)
    full_hits = [
        [added], [added, FULL.promised()], [added, early], [added, FULL.chunk(0, 4, True, True)],
    ]  # fmt: skip
    taken = set()
    events = [*EVENTS, (FULL.promised(), 0)]
    for script, (event, after_s) in product([*SCRIPTS.values(), *full_hits], events):
        machine = ONE.machine()
        for earlier in script:
            machine.on(earlier, 0.0)
        before, fault = machine.poll, is_fault(machine, event)
        check_step(machine, event, after_s, fault=fault)
        step = SenderMachine.TABLE[before].get(type(event))
        if step is not None and step.method is not None and not fault:
            taken.add((before, type(event), machine.poll))
    check_all_steps_are_taken(SenderMachine.TABLE, taken)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_any_two_events_in_any_state_keep_the_laws(script: list[Any]) -> None:
    for first, second in product(EVENTS, EVENTS):
        laws = Laws(ONE, script)
        laws.on(*first)
        laws.on(*second)
        finish(laws)


ENDS = st.sampled_from([(None, True), (BROKEN, True), (BROKEN, False)])
ANY_EVENT = st.one_of(
    st.sampled_from(EVENTS),
    st.builds(lambda job_id, how: (JobEnded(job_id, *how), 0), st.integers(1, 5), ENDS),
    st.builds(
        lambda first, num, last, clip: (ONE.chunk(first, first + num, last, clip), 0),
        st.integers(0, 5), st.integers(0, 4), st.booleans(), st.booleans(),
    ),
    st.builds(lambda job_id: (JobDrained(job_id), 0), st.integers(1, 5)),
    st.builds(lambda pause_s: (RoomTick(), pause_s), st.floats(0, 5)),
)  # fmt: skip


@given(st.booleans(), st.lists(ANY_EVENT, max_size=30))
def test_any_sequence_keeps_the_laws(promised_first: bool, events: list[tuple[Any, float]]) -> None:
    laws = Laws(ONE, BEGUN if promised_first else [ADDED])
    for event in events:
        laws.on(*event)
    finish(laws)


@given(st.permutations([1, 2, 3]), st.integers(0, 3), st.data())
def test_no_acknowledgement_before_the_last_write_has_ended(
    order: list[int], done: int, data: st.DataObject
) -> None:
    """Three writes; decode aborts when `done` of them are done, and hears Drained with the last
    end, not before."""
    laws = Laws(ONE, THREE)
    unproven = data.draw(st.sampled_from([0, *order]))

    def end(job_id: int) -> list[Any]:
        return laws.on(JobEnded(job_id, *((BROKEN, False) if job_id == unproven else ())))

    for job_id in order[:done]:
        end(job_id)
    actions = laws.on(ABORT_SAID)
    for job_id in order[done:]:
        assert not said(actions, Drained)
        laws.on(RoomTick(), 50.0)
        actions = end(job_id)
    assert said(actions) == [(A, Drained(*KEY.numbers, RANK))] * (not unproven)
    if unproven:
        settled = [(A, Drained(*KEY.numbers, RANK, settle=True))]
        assert said(laws.on(JobDrained(unproven))) == settled
        assert laws.on(JobDrained(unproven)) == []


def test_an_agent_that_is_destroyed_proves_nothing_of_a_write_of_another() -> None:
    failed = [JobEnded(job_id, BROKEN, drained=False) for job_id in (1, 2)]
    laws = Laws(ONE, [*THREE, *failed, JobEnded(3), ABORT_SAID])
    assert said(laws.on(JobDrained(1))) == []
    assert said(laws.on(JobDrained(2))) == [(A, Drained(*KEY.numbers, RANK, settle=True))]


def test_a_full_hit_sends_no_page_and_still_says_its_outcome() -> None:
    laws = Laws(FULL, [FULL.added(), FULL.promised()])
    outcome = SendToReader(A, Outcome(*KEY.numbers, RANK, True, 0, 0, b"first", "", True))
    ended = [RoomEnded(KEY, KVPoll.SUCCESS), outcome, SourceFree(KEY)]
    assert laws.on(FULL.chunk(4, 4, last=True)) == ended


LARGE = Room(fill_len=58, prefix_len=20, ours=16, theirs=4)


@pytest.mark.parametrize(
    ("room", "script", "error", "text"),
    [
        (ONE, [Added(17, PROMPT), PROMISED], PromptMismatchError, "18 tokens, the .* here has 17"),
        (ONE, [*ALL_POSTED, ONE.chunk(5, 5)], RequestError, "after the last"),
        (ONE, [*POSTED, ONE.chunk(1, 3)], TransferError, "units 0 to 2 .* unit 2 of 4 is next"),
        (ONE, [*POSTED, ONE.chunk(4, 5)], TransferError, "units 3 to 4 .* unit 2 of 4 is next"),
        (ONE, [*POSTED, ONE.chunk(3, 6)], TransferError, "units 2 to 5"),
        (ONE, [*POSTED, ONE.chunk(3, 4, last=True)], TransferError, "3 of 4 units"),
        (ONE, [*POSTED, ONE.abort(why="why")], AbortedError, "why"),
        (LARGE, [LARGE.chunk(1, 5)], TransferError, "units"),
        (LARGE, [LARGE.chunk(0, 2)], TransferError, "units"),
        (LARGE, [LARGE.chunk(1, 3, last=True)], TransferError, "units"),
    ],
)
def test_what_cannot_be_fails_the_room_and_says_why(
    room: Room, script: list[Any], error: type, text: str
) -> None:
    laws = Laws(room, script if room is ONE else [room.added(), room.promised(), *script])
    assert laws.ended is not None
    with pytest.raises(error, match=text):
        raise laws.ended.error or AssertionError


def test_a_failing_room_cancels_all_that_is_in_flight_and_frees_its_source_with_the_last_end() -> (
    None
):
    laws = Laws(ONE, THREE)
    actions = laws.on(JobEnded(2, BROKEN))
    assert [action.job_id for action in of(actions, CancelWrite)] == [1, 3]
    assert laws.on(JobEnded(3, BROKEN)) == []
    assert laws.on(JobEnded(1)) == [SourceFree(KEY)]


@pytest.mark.parametrize(
    ("script", "deadline_s", "why"),
    [
        ("added", TIMING.bootstrap_timeout_s, ""),
        (
            "parked", TIMING.parked_timeout_s,
            "decode worker 'decode-0' has promised pages, the request never came, or names another "
            "decode worker (Request.decode)",
        ),
        (
            "waiting", TIMING.waiting_timeout_s,
            "decode worker 'decode-0': the deadline passed in WAITING_FOR_INPUT",
        ),
        ("posted", TIMING.transfer_timeout_s, ""),
        ("all but one done", TIMING.transfer_timeout_s, ""),
    ],
)  # fmt: skip
def test_each_waiting_state_has_its_deadline(script: str, deadline_s: float, why: str) -> None:
    laws = Laws(ONE, SCRIPTS[script])
    check_deadline(laws, RoomTick(), deadline_s)
    assert why in ("", str(laws.machine.error))


def test_a_timeout_names_the_decode_worker_that_the_request_names() -> None:
    machine = ONE.machine(RoomKey(7, 0, "d3"))
    machine.on(ADDED, 0.0)
    machine.on(RoomTick(), TIMING.bootstrap_timeout_s)
    assert str(machine.error).startswith("decode worker 'd3' (Request.decode) has promised no page")


@pytest.mark.parametrize("script", ["success", "failed by a write refused at post"])
def test_the_outcome_is_said_again_until_acknowledged_or_for_long_enough(script: str) -> None:
    laws, times = Laws(ONE, SCRIPTS[script]), []
    for _ in range(20):  # a machine that says it once asks to be woken in the past, for ever
        if (wake_s := laws.machine.wake_s) == float("inf"):
            break
        if laws.on(RoomTick(), wake_s - laws.now_s):
            times.append(laws.now_s)
    assert times == [0.5, 1.5, 3.5, 7.5]
    assert laws.now_s == TIMING.ack_timeout_s
    assert laws.machine.over


@pytest.mark.parametrize("proved", [True, False])
def test_an_outcome_said_again_is_up_to_date_about_drained(proved: bool) -> None:
    """But for a write that proved nothing before its agent was destroyed: Drained asks for that."""
    laws = Laws(ONE, SCRIPTS["failed, write in flight"])
    [(_, outcome)] = said(laws.on(RoomTick(), TIMING.resend_s))
    assert not outcome.drained
    laws.on(JobEnded(1) if proved else UNPROVEN)
    if not proved:
        assert laws.on(JobDrained(1)) == []
    [(_, outcome)] = said(laws.on(RoomTick(), 2 * TIMING.resend_s))
    assert outcome.drained is proved
    assert said(laws.on(ABORT_SAID)) == [(A, Drained(*KEY.numbers, RANK, settle=not proved))]


# --- several readers ------------------------------------------------------------------------------


def test_a_reader_that_never_promises_is_not_waited_for_for_ever() -> None:
    laws = Laws(TWO, [TWO.added(), TWO.promised(0)])
    laws.on(RoomTick(), TIMING.bootstrap_timeout_s)
    assert laws.ended is not None
    assert isinstance(laws.ended.error, TransferTimeoutError)
    laws.on(RoomTick(), TIMING.parked_timeout_s)
    assert laws.machine.over


def test_each_reader_gets_every_chunk_and_the_outcome_until_it_has_acknowledged_it() -> None:
    laws = Laws(TWO, [TWO.added(), TWO.promised(0), TWO.promised(1)])
    posts = [*laws.on(TWO.chunk(0, 2)), *laws.on(TWO.chunk(2, 4, last=True))]
    assert [(post.peer, post.chunk) for post in posts] == [(A, 0), (B, 0), (A, 1), (B, 1)]
    actions = [action for post in posts for action in laws.on(JobEnded(post.job_id))]
    assert [to for to, _ in said(actions, Outcome)] == [A, B]
    laws.on(OutcomeAcked(1))
    laws.on(OutcomeAcked(5))
    assert [to for to, _ in said(laws.on(RoomTick(), TIMING.resend_s), Outcome)] == [A]
    assert not laws.machine.over
    laws.on(OutcomeAcked(0))
    assert laws.machine.over


def test_a_promise_after_the_failure_is_told_at_once() -> None:
    laws = Laws(TWO, [TWO.added(), TWO.promised(0), FAIL, OutcomeAcked(0)])
    assert not laws.machine.over, "the other's promise is on its way"
    assert [to for to, _ in said(laws.on(TWO.promised(1)), Outcome)] == [B]
    laws.on(OutcomeAcked(1))
    assert laws.machine.over


def slot(number: int, **changes: Any) -> dict[str, Any]:
    return {"takes_state": True, "groups": (np.array([number], np.int32),), **changes}


@pytest.mark.parametrize(
    "other",
    [Room(16, 4), Room(17, 0), {"ticket": 2}, {"num_units": 3}, slot(8), {"groups": ()}],
    ids=str,
)
def test_promises_that_are_not_alike_are_known_for_that(other: Any) -> None:
    machine = Laws(TWO, [TWO.promised(0, **slot(7))]).machine
    for reader in (0, 1):
        assert machine.same_promise(TWO.promised(reader, **slot(7)))
    if isinstance(other, dict):
        other = {**slot(7), **other}
    changed = TWO.promised(1, **other) if isinstance(other, dict) else other.promised(1)
    assert not machine.same_promise(changed)


# --- extra state ----------------------------------------------------------------------------------


def test_state_goes_with_the_last_chunk_to_the_readers_that_take_it_and_is_waited_for() -> None:
    room = FULL._replace(num_readers=2)
    laws = Laws(
        room,
        [room.added(), room.promised(0, **slot(7)), room.promised(1, **slot(7, takes_state=False))],
    )
    [post] = laws.on(room.chunk(4, 4, last=True, slot=3))
    assert (post.peer, post.group) == (A, 0)
    assert (post.src_pages.tolist(), post.dst_pages.tolist()) == ([3], [7])
    assert laws.machine.poll is KVPoll.TRANSFERRING
    laws.on(JobEnded(post.job_id))
    assert laws.machine.poll is KVPoll.SUCCESS


@pytest.mark.parametrize(("promised", "handed"), [(slot(7), -1), ({}, 3)])
def test_state_on_one_side_only_fails_the_room(promised: dict[str, Any], handed: int) -> None:
    laws = Laws(FULL, [FULL.added(), FULL.promised(**promised)])
    actions = laws.on(FULL.chunk(4, 4, last=True, slot=handed))
    assert "handed over" in str(laws.machine.error)
    assert not of(actions, PostWrite)


# --- chunks that come before the promise, or with pages that decode has ---------------------------


@st.composite
def rooms(draw: st.DrawFn) -> Room:
    ours, theirs = draw(st.sampled_from([(4, 4), (1, 1), (16, 4), (4, 16), (2, 8), (8, 2)]))
    fill_len = draw(st.integers(1, 70))
    prefix_len = draw(st.integers(0, fill_len // theirs)) * theirs
    return Room(fill_len, prefix_len, ours, theirs, draw(st.integers(1, 2)))


def splits(room: Room, data: st.DataObject, empty_last: bool) -> list[SendChunk]:
    """The whole prompt in chunks; some may have no page."""
    cuts = data.draw(st.lists(st.integers(0, room.num_pages), max_size=6))
    ends = [*sorted(cuts), room.num_pages] + [room.num_pages] * empty_last
    lasts = [*[False] * (len(ends) - 1), True]
    pairs = zip([0, *ends[:-1]], ends, lasts, strict=True)
    return [room.chunk(start, stop, last, clip=True) for start, stop, last in pairs]


@given(rooms(), st.data())
def test_any_split_before_and_after_the_promise_posts_what_is_promised_in_order_and_once(
    room: Room, data: st.DataObject
) -> None:
    chunks = splits(room, data, data.draw(st.booleans()))
    promised_at = sorted(data.draw(st.integers(0, len(chunks))) for _ in range(room.num_readers))
    laws = Laws(room, [room.added()])
    for i in range(len(chunks) + 1):
        for reader, at in enumerate(promised_at):
            if at == i:
                actions = laws.on(room.promised(reader))
                is_last = reader == room.num_readers - 1
                assert names(actions[:1]) == ["Bootstrapped" if is_last else "SendToReader"]
        if i < len(chunks):
            actions = laws.on(chunks[i])
            assert actions == [] or i >= promised_at[-1], "something came before the promise"
    for job_id in sorted(laws.in_flight):
        actions = laws.on(JobEnded(job_id))
    assert laws.machine.poll is KVPoll.SUCCESS
    assert names(actions[-1:]) == ["SourceFree"]


@given(rooms(), st.data())
def test_a_chunk_that_is_left_out_or_comes_twice_fails_the_room_however_it_is_kept(
    room: Room, data: st.DataObject
) -> None:
    room = room._replace(num_readers=1)
    chunks = splits(room, data, empty_last=True)
    behind = [
        i
        for i, chunk in enumerate(chunks)
        if len(chunk.src_pages)
        and (chunk.first_page + len(chunk.src_pages)) * room.ours > room.prefix_len
        and room.num_units
    ]
    if not behind:
        return
    wrong = data.draw(st.sampled_from(behind))
    chunks[wrong : wrong + 1] = [chunks[wrong]] * data.draw(st.sampled_from([0, 2]))
    at = data.draw(st.integers(0, len(chunks)))
    laws = Laws(room, [room.added()])
    actions = [
        action
        for event in [*chunks[:at], room.promised(), *chunks[at:]]
        for action in laws.on(event)
    ]
    assert laws.ended is not None
    assert isinstance(laws.ended.error, TransferError)
    assert len(of(actions, CancelWrite)) == len(of(actions, PostWrite))


KEPT = Room(prefix_len=8)


@pytest.mark.parametrize(
    ("start", "stop", "text"),
    [(0, 3, "units -2 to 1"), (1, 2, "units -1 to 0"), (3, 5, "units 1 to 3 .* unit 0 of 3")],
)
@pytest.mark.parametrize("clip", [False, True])
def test_without_clip_pages_that_decode_has_fail_the_room_and_a_gap_does_so_always(
    start: int, stop: int, text: str, clip: bool
) -> None:
    laws = Laws(KEPT, [KEPT.added(), KEPT.promised(), KEPT.chunk(start, stop, clip=clip)])
    if clip and start <= 2:
        assert laws.machine.poll is KVPoll.TRANSFERRING
    else:
        with pytest.raises(TransferError, match=text):
            raise laws.machine.error or AssertionError("it has not failed")


@pytest.mark.parametrize(
    ("event", "after_s", "error"),
    [
        (FAIL, 0.0, AbortedError),
        (KEPT.abort(), 0.0, AbortedError),
        (RoomTick(), TIMING.bootstrap_timeout_s, TransferTimeoutError),
        (KEPT._replace(fill_len=17).promised(), 0.0, PromptMismatchError),
    ],
    ids=["aborted", "aborted by decode", "no promise came", "another length"],
)
def test_what_is_kept_is_dropped_when_the_room_fails(
    event: SenderEvent, after_s: float, error: type[Exception]
) -> None:
    laws = Laws(KEPT, [KEPT.added(), KEPT.chunk(0, 5, True, True)])
    actions = laws.on(event, after_s)
    assert isinstance(laws.machine.error, error)
    assert names(actions[-1:]) == ["SourceFree"], "nothing reads what was handed over"
    assert not of(laws.on(KEPT.promised()), PostWrite | Bootstrapped)
    assert not laws.machine._early_chunks


def test_a_promise_is_acknowledged_before_decode_repeats_it() -> None:
    for begins in (True, False):
        laws = Laws(KEPT, [KEPT.added()] if begins else [])
        assert names(laws.on(KEPT.promised())) == ["Bootstrapped" if begins else "SendToReader"]
        acks = said(laws.on(RoomTick(), TIMING.resend_s / 2), PromiseAck)
        assert [to for to, _ in acks] == [A] * begins
        assert said(laws.on(RoomTick(), TIMING.resend_s)) == []
        assert len(said(laws.on(KEPT.promised()), PromiseAck)) == 1, "it is repeated all the same"


def test_the_acknowledgement_wakes_the_room_and_a_repeat_takes_its_place() -> None:
    laws = Laws(TWO, [TWO.added(), TWO.promised(0)])
    assert laws.machine.wake_s > TIMING.resend_s, "an incomplete room has acknowledged at once"
    assert names(laws.on(TWO.promised(1))) == ["Bootstrapped"]
    assert laws.machine.wake_s == laws.now_s + TIMING.resend_s / 2
    laws.on(TWO.promised(1))
    assert laws.on(RoomTick(), TIMING.resend_s / 2) == []


def test_a_chunk_after_the_last_one_fails_the_room_when_the_promise_comes() -> None:
    laws = Laws(KEPT, [KEPT.added(), *[KEPT.chunk(0, 5, True, True)] * 2])
    kinds = names(laws.on(KEPT.promised()))
    assert kinds == ["Bootstrapped", "PostWrite", "RoomEnded", "CancelWrite", "SendToReader"]
    assert "after the last" in str(laws.machine.error)


@pytest.mark.parametrize("clip", [False, True])
def test_a_chunk_of_an_earlier_use_of_the_number_is_not_kept_for_the_next(clip: bool) -> None:
    """Decode has ended that use and promised the next, before the engine has heard of either."""
    laws = Laws(KEPT, [KEPT.promised()])
    assert laws.on(KEPT.chunk(0, 5, True, clip)) == []
    assert names(laws.on(KEPT.added())) == ["Bootstrapped"]
    assert laws.machine.poll is KVPoll.WAITING_FOR_INPUT
