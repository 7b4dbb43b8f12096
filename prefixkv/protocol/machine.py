"""Parts that the room machines share: two events, a table of steps, and the table as a diagram.

A row of the table names every event that may come in its state: with the method that takes it and
the states that may follow, or IGNORED with the reason. Another event, or another next state, is a
fault of this process, never of a peer: `run` raises InternalError.

`python -m prefixkv.protocol.machine` prints the diagrams of both machines, in mermaid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from prefixkv.errors import InternalError
from prefixkv.protocol.ids import KVPoll, RoomKey


class Fail(msgspec.Struct, frozen=True):
    """End the room from this side: aborted or refused here, or the peer's rank `gone` has left.
    `tell` is False where no rank of the peer listens."""

    error: Exception
    tell: bool = True
    gone: int | None = None


class RoomTick(msgspec.Struct, frozen=True):
    """Time has passed. Every rank of the peer that takes part had been heard by `heard_s`."""

    heard_s: float = -math.inf


class Step(NamedTuple):
    """One entry of a table: `method(machine, event, now_s)` takes the event and returns actions.
    Then the machine is in one of `next_states`."""

    method: Callable[..., list[Any]] | None
    next_states: Set[KVPoll]


IGNORED: Final = Step(None, frozenset())

Row = Mapping[type, Step]
Table = Mapping[KVPoll, Row]


class _Machine(Protocol):
    """The part of a room machine that `run` needs."""

    @property
    def key(self) -> RoomKey: ...
    @property
    def poll(self) -> KVPoll: ...


def run(machine: _Machine, table: Table, event: object, now_s: float) -> list[Any]:
    """Run a machine by one event, as its `table` says; return the actions, in order. Raises
    InternalError for an event that the state's row does not name (nothing has changed), and for a
    step into a state that its row does not list."""
    before = machine.poll
    step = table[before].get(type(event))
    if step is None:
        raise fault(machine, event)
    method, next_states = step
    if method is None:
        return []
    actions = method(machine, event, now_s)
    # Checked in production too: a wrong step would free pages that a peer still writes, or hold
    # them without end.
    if machine.poll not in next_states:
        raise InternalError(
            f"{type(machine).__name__} of {machine.key}: {type(event).__name__} led from "
            f"{before.name} to {machine.poll.name}, which its table does not list"
        )
    return actions


def fault(machine: _Machine, event: object, why: str = "") -> InternalError:
    """Return the error of an event that must not come in the present state."""
    return InternalError(
        f"{type(machine).__name__} of {machine.key}: {type(event).__name__} must not come in "
        f"{machine.poll.name}" + (f": {why}" if why else "")
    )


def mermaid(table: Table) -> str:
    """Return a table as a mermaid state diagram. An arrow names the events that may lead along it,
    a note those that its state ignores. Others must not come."""
    lines = ["stateDiagram-v2", f"    [*] --> {min(table).name}"]
    for state, row in table.items():
        for after in KVPoll:
            events = [event.__name__ for event, step in row.items() if after in step.next_states]
            if events:
                lines.append(f"    {state.name} --> {after.name} : {', '.join(events)}")
        if state.ended:
            lines.append(f"    {state.name} --> [*]")
        ignored = [event.__name__ for event, step in row.items() if step.method is None]
        if ignored:
            lines.append(f"    note right of {state.name} : ignores {', '.join(ignored)}")
    return "\n".join(lines)


def diagrams() -> dict[str, str]:
    """Return the mermaid diagrams of both room machines, by the name of the class."""
    found = {}
    for side in ("Receiver", "Sender"):  # by name: those modules import this one
        module = import_module(f"prefixkv.protocol.{side.lower()}_machine")
        machine = getattr(module, f"{side}Machine")
        found[machine.__name__] = mermaid(machine.TABLE)
    return found


if __name__ == "__main__":
    for name, diagram in diagrams().items():
        print(f"`{name}`:\n\n```mermaid\n{diagram}\n```\n")
