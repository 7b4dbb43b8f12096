"""Decode's room machine: the laws of `Laws` hold after every event, whatever comes, from any number
of ranks. A room that owes prefill a word is over once: by an answer, by our word, or by time."""

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.errors import AbortedError, TransferError
from prefixkv.protocol.events import RoomDrained, RoomEnded, RoomOverdue
from prefixkv.protocol.ids import KVPoll
from prefixkv.protocol.messages import Abort, Drained, Outcome, OutcomeAck, PromiseAck
from prefixkv.protocol.receiver_machine import (
    ChunkLanded,
    Fail,
    FencedOff,
    PeerReady,
    ReceiverEvent,
    ReceiverMachine,
    RoomTick,
    SendToRank,
    UnitsRelayed,
)
from tests.unit.protocol.rooms import (
    KEY,
    TIMING,
    check_all_steps_are_taken,
    check_deadline,
    check_step,
    check_table,
    promise,
    refusal,
)

NUM_PAGES = 2
ABORT = Fail(AbortedError("enough"))


def outcome(
    rank: int = 0,
    ok: bool = True,
    num_pages: int = NUM_PAGES,
    drained: bool = True,
    num_units: int = 0,
    num_chunks: int = 1,
) -> Outcome:
    said = num_chunks, num_pages, b"aux %d" % rank, "" if ok else "broke", drained
    return Outcome(*KEY.numbers, rank, ok, *said, num_units=num_units)


def is_fault(machine: ReceiverMachine, event: Any) -> bool:
    """What only a fault of ours brings about: a promised room is promised again."""
    return isinstance(event, PeerReady) and machine.poll not in (
        KVPoll.BOOTSTRAPPING,
        KVPoll.FAILED,
    )


class Laws:
    """A machine, and what may be said about it from outside."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.machine = ReceiverMachine(promise(), TIMING, self.now_s)
        self.ended: RoomEnded | None = None
        self.drained = self.overdue = False
        self.num_ranks = 0
        self.proven: set[int] = set()  # ranks that have proved that their writes are over
        self.succeeded: set[int] = set()
        self.aborted: set[int] = set()  # ranks that were told to stop

    def on(self, event: Any, after_s: float = 0.0) -> list[Any]:
        self.now_s += after_s
        if is_fault(self.machine, event):
            return check_step(self.machine, event, self.now_s)
        was_open = self.ended is None
        before = self.machine.poll
        if isinstance(event, PeerReady) and before is KVPoll.BOOTSTRAPPING:
            self.num_ranks = len(event.ranks)
        if isinstance(event, Outcome) and self.num_ranks:
            if event.drained:
                self.proven.add(event.rank)
            if event.ok and event.num_pages == NUM_PAGES:
                self.succeeded.add(event.rank)
        if isinstance(event, Drained) and not was_open:
            self.proven.add(event.rank)
        if isinstance(event, FencedOff) and self.num_ranks:
            self.proven.add(event.rank)
        actions = self.machine.on(event, self.now_s)
        for action in actions:
            self._see(action, was_open)
        self._check(before)
        return actions

    def _see(self, action: Any, was_open: bool) -> None:
        if isinstance(action, RoomEnded):
            assert self.ended is None, "a room ends once"
            assert was_open
            self.ended = action
            assert action.poll.ended
            assert (action.error is None) == (action.poll is KVPoll.SUCCESS)
            if action.poll is KVPoll.SUCCESS:
                assert self.succeeded >= set(range(self.num_ranks)), (
                    "success only when all ranks have said so"
                )
        elif isinstance(action, RoomDrained):
            assert not self.drained, "drained is said once"
            assert self.ended is not None
            assert self.ended.poll is KVPoll.FAILED
            self.drained = True
            assert self._proof, "drained without proof"
        elif isinstance(action, RoomOverdue):
            assert not self.overdue
            assert not self.drained
            self.overdue = True
        elif isinstance(action.body, Abort):
            assert self.ended is not None, "an abort before the end"
            self.aborted.add(action.rank)

    @property
    def _proof(self) -> bool:
        return self.proven >= set(range(self.num_ranks))

    def _check(self, before: KVPoll) -> None:
        machine = self.machine
        assert machine.poll >= before, "a room never goes back"
        assert not (before.ended and machine.poll is not before), "a terminal state stands"
        assert machine.poll.ended == (self.ended is not None)
        if machine.poll is KVPoll.FAILED:
            assert machine.drained == self.drained, "what is drained is said"
            assert machine.over == (self.drained and not machine.is_only_owed), "and is over"
            assert not (machine.is_only_owed and self.num_ranks), "a rank that had pages is told"
            assert self.drained or not self._proof, "all proof is there"
            assert machine.over or machine.wake_s < float("inf"), "an abort would not be said again"
        elif machine.poll is KVPoll.SUCCESS:
            assert machine.over
        else:
            assert machine.wake_s < float("inf"), "a wait without a deadline"
            assert machine.drained == (self._proof if self.num_ranks else True)


SCRIPTS: dict[str, list[Any]] = {
    "bootstrapping": [],
    "promised": [PeerReady((0,))],
    "acked": [PeerReady((0,)), PromiseAck(*KEY.numbers, 0)],
    "transferring": [PeerReady((0,)), ChunkLanded(0, 0, 0)],
    "written, not notified": [PeerReady((0,)), outcome(num_units=2)],
    "written, notified in part": [
        PeerReady((0,)),
        ChunkLanded(0, 0, 0, 1, 1),
        outcome(num_units=3, num_chunks=2),
    ],
    "success": [PeerReady((0,)), outcome()],
    "failed before promised": [ABORT],
    "failed": [PeerReady((0,)), ABORT],
    "failed silently": [PeerReady((0,)), Fail(AbortedError("gone"), tell=False)],
    "failed and drained": [PeerReady((0,)), ABORT, Drained(*KEY.numbers, 0)],
    "failed by prefill, writes under way": [PeerReady((0,)), outcome(ok=False, drained=False)],
    "two ranks": [PeerReady((0, 1))],
    "two ranks, one done": [PeerReady((0, 1)), outcome(1)],
    "two ranks, one failed": [PeerReady((0, 1)), outcome(1, ok=False)],
}
EVENTS: list[tuple[Any, float]] = [
    (PeerReady((0,)), 0), *((PromiseAck(*KEY.numbers, rank), 0) for rank in (0, 9)),
    (ChunkLanded(0, 0, 0), 0),
    (ChunkLanded(9, 0, 0), 0), (ChunkLanded(0, 1, 0, 1, 1), 0), (ChunkLanded(0, 1, 0, 1, 2), 0),
    (UnitsRelayed(0, 1), 0), (UnitsRelayed(0, 2), 0), (UnitsRelayed(0, 9), 0),
    (UnitsRelayed(9, 1), 0),
    (outcome(num_units=2), 0), (outcome(), 0), (outcome(1), 0), (outcome(9), 0),
    (outcome(num_pages=1), 0),
    (outcome(ok=False), 0), (outcome(ok=False, drained=False), 0), (Drained(*KEY.numbers, 0), 0),
    (Drained(*KEY.numbers, 1), 0), (Drained(*KEY.numbers, 9), 0), (ABORT, 0),
    (Fail(AbortedError("gone"), tell=False), 0), (FencedOff(0), 0), (FencedOff(9), 0),
    (RoomTick(), 0), (RoomTick(), TIMING.resend_s), (RoomTick(), 100.0),
]  # fmt: skip


def run(script: list[Any]) -> Laws:
    laws = Laws()
    for event in script:
        laws.on(event)
    return laws


def test_the_table_names_every_event_in_every_state_but_our_own_faults() -> None:
    promised = (KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING, KVPoll.SUCCESS)
    check_table(ReceiverMachine.TABLE, ReceiverEvent, {state: {PeerReady} for state in promised})


def test_every_event_in_every_state_does_as_the_table_says_and_no_step_is_listed_in_vain() -> None:
    taken = set()
    for script, (event, after_s) in product(SCRIPTS.values(), EVENTS):
        machine = ReceiverMachine(promise(), TIMING, 0.0)
        for earlier in script:
            machine.on(earlier, 0.0)
        before = machine.poll
        check_step(machine, event, after_s)
        if step := ReceiverMachine.TABLE[before].get(type(event)):
            taken |= {(before, type(event), machine.poll)} if step.method else set()
    check_all_steps_are_taken(ReceiverMachine.TABLE, taken)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_any_two_events_in_any_state_keep_the_laws(script: list[Any]) -> None:
    for first, second in product(EVENTS, EVENTS):
        laws = run(script)
        laws.on(*first)
        laws.on(*second)


@given(
    st.integers(1, 4),
    st.lists(
        st.one_of(
            st.sampled_from(EVENTS),
            st.builds(
                lambda rank, ok: (outcome(rank, ok, drained=ok), 0),
                st.integers(0, 4),
                st.booleans(),
            ),
            st.builds(lambda rank: (Drained(*KEY.numbers, rank), 0), st.integers(0, 4)),
            st.builds(lambda pause_s: (RoomTick(), pause_s), st.floats(0, 5)),
        ),
        max_size=30,
    ),
)
def test_any_sequence_keeps_the_laws_and_all_proof_ends_it(
    num_ranks: int, events: list[tuple[Any, float]]
) -> None:
    laws = Laws()
    laws.on(PeerReady(tuple(range(num_ranks))))
    for event in events:
        laws.on(*event)
    laws.on(RoomTick(), 1000.0)
    laws.on(RoomTick(), 1000.0)
    for rank in range(num_ranks):
        laws.on(Drained(*KEY.numbers, rank))
    assert laws.machine.over


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_success_waits_for_every_rank_and_aux_is_the_first_ranks(num_ranks: int) -> None:
    laws = Laws()
    assert [say.rank for say in laws.on(PeerReady(tuple(range(num_ranks))))] == list(
        range(num_ranks)
    )
    for rank in reversed(range(1, num_ranks)):
        assert laws.on(outcome(rank)) == [SendToRank(rank, OutcomeAck(*KEY.numbers, rank))]
        assert laws.on(outcome(rank)) == [SendToRank(rank, OutcomeAck(*KEY.numbers, rank))], (
            "said twice, it is answered twice"
        )
    assert laws.on(outcome(0)) == [
        SendToRank(0, OutcomeAck(*KEY.numbers, 0)),
        RoomEnded(KEY, KVPoll.SUCCESS, aux=b"aux 0"),
    ]


def test_one_failing_rank_ends_the_room_and_each_other_rank_has_to_drain() -> None:
    laws = run([PeerReady((0, 1, 2)), outcome(0)])
    actions = laws.on(outcome(1, ok=False))
    assert isinstance(laws.ended.error, TransferError)
    assert [(say.rank, type(say.body)) for say in actions if isinstance(say, SendToRank)] == [
        (1, OutcomeAck),
        (2, Abort),
    ]
    assert not laws.drained
    laws.on(Drained(*KEY.numbers, 2))
    assert laws.drained


def test_success_waits_for_the_notifications_of_all_that_was_written() -> None:
    laws = run([PeerReady((0, 1)), outcome(1)])
    assert laws.on(outcome(num_units=4, num_chunks=2)) == [
        SendToRank(0, OutcomeAck(*KEY.numbers, 0))
    ]
    for stray in (ChunkLanded(1, 0, 0), ChunkLanded(0, 0, 0, 2, 3), ChunkLanded(0, 0, 0, 2, 3)):
        assert laws.on(stray) == []
    assert laws.on(ChunkLanded(0, 0, 1, 2, 3)) == []
    for part in (0, 1):
        assert laws.on(ChunkLanded(0, 0, part, 2, 3)) == [], "said again, it counts once"
    assert laws.on(ChunkLanded(0, 1, 0, 1, 1)) == [RoomEnded(KEY, KVPoll.SUCCESS, aux=b"aux 0")]


def test_a_part_that_contradicts_those_before_counts_for_nothing() -> None:
    laws = run([PeerReady((0,)), outcome(num_units=3), ChunkLanded(0, 0, 0, 2, 3)])
    for part in (ChunkLanded(0, 0, 1, 2, 1), ChunkLanded(0, 0, 1, 3, 3)):
        assert laws.on(part) == []
    assert laws.on(ChunkLanded(0, 0, 1, 2, 3)) == [RoomEnded(KEY, KVPoll.SUCCESS, aux=b"aux 0")]


@pytest.mark.parametrize("event", [ChunkLanded(0, 0, 0, 1, 3), UnitsRelayed(0, 5), RoomTick()])
def test_notifications_that_do_not_add_up_fail_the_room_by_name(event: Any) -> None:
    laws = run([PeerReady((0,)), outcome(num_units=4)])
    laws.on(event, TIMING.transfer_timeout_s if isinstance(event, RoomTick) else 0.0)
    assert laws.machine.poll is KVPoll.FAILED
    assert laws.drained
    landed = {ChunkLanded: 3, UnitsRelayed: 5, RoomTick: 0}[type(event)]
    assert str(laws.ended.error) == (
        "prefill rank 0 says that 4 unit pages are written, the notifications that came are of "
        f"{landed}"
    )


def test_a_room_that_lacks_a_notification_ends_though_its_ranks_are_heard() -> None:
    machine = ReceiverMachine(promise(), TIMING, 0.0)
    machine.on(PeerReady((0,)), 0.0)
    machine.on(outcome(num_units=4), 1.0)
    machine.on(RoomTick(heard_s=1e9), 1.0 + TIMING.transfer_timeout_s)
    assert machine.poll is KVPoll.FAILED


def test_what_a_rank_that_does_not_exist_says_means_nothing() -> None:
    for stray in (
        outcome(1),
        outcome(1, ok=False),
        Drained(*KEY.numbers, 1),
        PromiseAck(*KEY.numbers, 1),
        ChunkLanded(1, 0, 0),
    ):
        laws = run([PeerReady((0,)), stray])
        assert laws.machine.poll is KVPoll.WAITING_FOR_INPUT, stray


@pytest.mark.parametrize(
    ("script", "deadline_s"),
    [
        ("bootstrapping", TIMING.bootstrap_timeout_s),
        ("promised", TIMING.waiting_timeout_s),
        ("acked", TIMING.waiting_timeout_s),
        ("transferring", TIMING.transfer_timeout_s),
    ],
)
def test_every_waiting_state_has_its_deadline(script: str, deadline_s: float) -> None:
    laws = run(SCRIPTS[script])
    check_deadline(laws, RoomTick(), deadline_s)
    assert laws.drained == (script == "bootstrapping"), (
        "time drains nothing that a peer was told of"
    )


def test_a_timeout_names_the_address_and_the_state() -> None:
    machine = ReceiverMachine(promise(), TIMING, 0.0, "tcp://p:1")
    machine.on(RoomTick(), TIMING.bootstrap_timeout_s)
    assert str(machine.error) == "prefill at 'tcp://p:1': the deadline passed in BOOTSTRAPPING"


def says_at(laws: Laws, seconds: float) -> list[float]:
    """When something is said within `seconds`, waking whenever the machine asks to be woken."""
    times, start_s, end_s = [], laws.now_s, laws.now_s + seconds
    for _ in range(10_000):
        if laws.machine.wake_s > end_s:
            break
        actions = laws.on(RoomTick(), max(0.0, laws.machine.wake_s - laws.now_s))
        if any(isinstance(action, SendToRank) for action in actions):
            times.append(laws.now_s - start_s)
    else:
        raise AssertionError(f"it asks to be woken at {laws.machine.wake_s}, again and again")
    laws.now_s = end_s
    return times


def test_a_promise_is_said_again_with_growing_pauses_until_acknowledged() -> None:
    laws = run([PeerReady((0,))])
    assert says_at(laws, 12.0) == [0.5, 1.5, 3.5, 7.5, 11.5]
    laws.on(PromiseAck(*KEY.numbers, 0))
    assert says_at(laws, 7.0) == []


def test_an_abort_is_said_again_for_ever_and_only_to_ranks_that_owe_proof() -> None:
    laws = run([PeerReady((0, 1)), ABORT, Drained(*KEY.numbers, 0)])
    assert says_at(laws, 1000.0)[:4] == [0.5, 1.5, 3.5, 7.5]
    assert laws.overdue
    last = laws.on(RoomTick(), 10.0)
    assert [(say.rank, type(say.body)) for say in last] == [(1, Abort)]
    laws.on(Drained(*KEY.numbers, 1))
    assert laws.machine.wake_s == float("inf")


# --- a room that owes prefill a word --------------------------------------------------------------

MEANS_NOTHING = [PromiseAck(*KEY.numbers, 0), ChunkLanded(0, 0, 0), outcome()]
OWED = [
    *MEANS_NOTHING, *(Drained(*KEY.numbers, rank) for rank in (0, 1, 9)),
    FencedOff(0), FencedOff(1),
    Fail(AbortedError("gone")), RoomTick(),
]  # fmt: skip


def owed(is_refusal: bool) -> ReceiverMachine:
    """A room that owes prefill a word: refused, or aborted before any rank knew of it."""
    if is_refusal:
        return refusal()
    machine = ReceiverMachine(promise(), TIMING, 0.0)
    ended = machine.on(Fail(AbortedError("why")), 0.0)
    assert [type(action) for action in ended] == [RoomEnded, RoomDrained]
    return machine


@given(st.booleans(), st.lists(st.tuples(st.sampled_from(OWED), st.floats(0, 2)), max_size=20))
def test_any_sequence_ends_it_once_and_time_ends_it_at_last(
    is_refusal: bool, events: list[tuple[Any, float]]
) -> None:
    machine, now_s, unanswered = owed(is_refusal), 0.0, {0, 1}
    said = machine.on(PeerReady((0, 1)), now_s)
    abort = Abort(*KEY.numbers, "why", machine.ticket)
    assert said == [SendToRank(rank, abort) for rank in (0, 1)]
    ends = 0
    for event, after_s in [*events, (RoomTick(), 1000.0)]:
        now_s += after_s
        was_over = machine.over
        actions = machine.on(event, now_s)
        ends += machine.over and not was_over
        if event in MEANS_NOTHING:
            assert [a for a in actions if not isinstance(a.body, OutcomeAck)] == []
            continue
        if was_over:
            assert actions == []
        if isinstance(event, Drained | FencedOff):
            unanswered.discard(event.rank)
        words = [action for action in actions if isinstance(action, SendToRank)]
        assert {word.rank for word in words} in (set(), unanswered), "an answered rank is told"
        assert [a for a in actions if isinstance(a, RoomDrained)] == [RoomDrained(KEY)] * (
            is_refusal and machine.over and not was_over
        )
        assert machine.over or (unanswered and machine.wake_s <= TIMING.bootstrap_timeout_s)
    assert ends == 1
    assert machine.wake_s == float("inf")


@pytest.mark.parametrize("over", [False, True])
def test_its_ranks_are_made_known_once(over: bool) -> None:
    machine = refusal()
    machine.on(PeerReady((0,)), 0.0)
    if over:
        machine.on(Drained(*KEY.numbers, 0), 0.0)
    assert machine.on(PeerReady((0,)), 0.0) == []
    assert machine.over is over
