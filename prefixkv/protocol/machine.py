"""Parts that the room machines share: two events, and a table of steps.

A row of the table names every event that may come in its state: with the method that takes it and
the states that may follow, or among those that are `ignored`, with the reason. Another event, or
another next state, is a fault of this process, never of a peer: `run` raises InternalError.

`docs/gen.py` draws the tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple, Protocol

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


def ignored(*events: type) -> dict[type, Step]:
    """Return entries for events that mean nothing; a comment beside them says why."""
    return dict.fromkeys(events, Step(None, frozenset()))


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
