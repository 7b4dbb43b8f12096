"""What the tests of the room machines share: one room, its times, and what holds of any machine's
table and diagram.

The folder protects the two machines of a room, what travels, and timers. Who may speak for a room,
and what is remembered of one, is the control objects': ../control.
"""

import pickle
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from prefixkv.config import ControlConfig
from prefixkv.digest import prompt_digest
from prefixkv.errors import AbortedError, InternalError, TransferTimeoutError
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.machine import Table
from prefixkv.protocol.messages import Promise
from prefixkv.protocol.receiver_machine import ReceiverMachine

PAGE_SIZE = 4
KEY = RoomKey(7, 0)
SENT = RoomKey(7, 0, "decode-0")  # the same, as prefill knows it
PROMPT = prompt_digest(range(10))
DECODE, PREFILL = PeerId("decode-0", 5), PeerId("prefill-0", 5)
TIMING = ControlConfig(
    heartbeat_s=1.0, suspect_after_s=3.0, forget_after_s=50.0, resend_s=0.5,
    bootstrap_timeout_s=10.0, waiting_timeout_s=20.0, transfer_timeout_s=15.0, ack_timeout_s=8.0,
    drain_timeout_s=6.0, parked_timeout_s=5.0, max_parked_per_peer=3, max_peers=2,
    fence_settle_s=0.0,
)  # fmt: skip


def ids(pages: Iterable[int]) -> bytes:
    return np.array(list(pages), dtype="<i4").tobytes()


def promise(room: int = 7, generation: int = 0, *, fill_len: int = 10, prefix_len: int = 4,
            pages: Sequence[int] = (3, 9)) -> Promise:  # fmt: skip
    """By default a prompt of 10 tokens, 4 of them cached: pages 3 and 9 are promised."""
    return Promise(room, generation, fill_len, prefix_len, ids(pages), digest=PROMPT)


def refusal() -> ReceiverMachine:
    """The room as one that decode refuses."""
    nothing = Promise(*KEY.numbers, 0, 0, b"", 9)
    return ReceiverMachine(nothing, TIMING, 0.0, refused=AbortedError("why"))


def check_deadline(laws: Any, tick: Any, deadline_s: float) -> None:
    """The machine of `laws` fails at its deadline, not before, and wants to be woken by then."""
    laws.on(tick, deadline_s - 0.01)
    assert not laws.machine.poll.ended
    assert laws.machine.wake_s <= deadline_s
    laws.on(tick, 0.01)
    assert isinstance(laws.ended.error, TransferTimeoutError)


# --- tables ---------------------------------------------------------------------------------------


def check_table(table: Table, events: Any, faults: dict[KVPoll, set[type]]) -> None:
    """Every state has a row, which names all of the machine's events but `faults`; a method takes
    the events that it stands for; a room never goes back."""
    assert list(table) == list(KVPoll)
    for state, row in table.items():
        assert set(get_args(events)) - set(row) == faults.get(state, set()), state
        assert set(row) <= set(get_args(events))
        for event, step in row.items():
            if step.method is None:
                assert not step.next_states
                continue
            taken = next(iter(get_type_hints(step.method).values()))
            assert event in (get_args(taken) or (taken,)), (state, event)
            assert step.next_states
            assert min(step.next_states) >= state
            assert not state.ended or step.next_states == {state}


def check_step(machine: Any, event: Any, now_s: float, *, fault: bool = False) -> list[Any]:
    """`machine` handles, ignores or refuses the event just as its table says; returns the actions.

    `fault`: its method refuses it, as the table cannot.
    """
    before, as_it_was = machine.poll, _fingerprint(machine)
    step = machine.TABLE[before].get(type(event))
    if step is None or fault:
        with pytest.raises(
            InternalError, match=f"{type(event).__name__} must not come in {before.name}"
        ):
            machine.on(event, now_s)
        assert _fingerprint(machine) == as_it_was, "a refused event has changed something"
        return []
    actions: list[Any] = machine.on(event, now_s)
    if step.method is None:
        assert actions == []
        assert _fingerprint(machine) == as_it_was, "an ignored event has changed something"
    else:
        assert machine.poll in step.next_states
    return actions


def _fingerprint(machine: Any) -> bytes:
    state = {name: value for name, value in vars(machine).items() if name != "_next_job_id"}
    return pickle.dumps(state)


def check_all_steps_are_taken(table: Table, taken: set[tuple[KVPoll, type, KVPoll]]) -> None:
    """`taken` are all (state, event, next state) of the table: it lists none that cannot be."""
    listed = {
        (state, event, after)
        for state, row in table.items()
        for event, step in row.items()
        for after in step.next_states
    }
    assert taken == listed, f"not taken: {listed - taken}; not listed: {taken - listed}"


# --- diagrams -------------------------------------------------------------------------------------


def drawn(machine: str) -> dict[KVPoll, dict[str, set[KVPoll]]]:
    """The next states by state and event that the page of messages shows of a machine; none: the
    event is ignored."""
    page = (Path(__file__).parents[3] / "docs/reference/messages.md").read_text()
    (diagram,) = re.findall(
        rf"^`{machine}`:\n\n```mermaid\n(.*?)\n```$", page, re.DOTALL | re.MULTILINE
    )
    read: dict[KVPoll, dict[str, set[KVPoll]]] = {state: {} for state in KVPoll}
    for state, after, events in re.findall(r"^ +(\w+) --> (\w+) : (.*)$", diagram, re.MULTILINE):
        for event in events.split(", "):
            read[KVPoll[state]].setdefault(event, set()).add(KVPoll[after])
    for state, events in re.findall(r"note right of (\w+) : ignores (.*)$", diagram, re.MULTILINE):
        for event in events.split(", "):
            assert event not in read[KVPoll[state]]
            read[KVPoll[state]][event] = set()
    return read
