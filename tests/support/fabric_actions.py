"""Actions of a `FakeFabric`: their description, holds that delay them, and faults on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from prefixkv.protocol.ids import ChunkTag, PeerId

Kind = Literal["event", "connect", "post", "land", "complete", "fail", "notify", "renew"]


class FakeDisconnectError(Exception):
    """Not a class of prefixkv, as NIXL's errors are not."""


@dataclass(frozen=True, slots=True)
class Action:
    """`tag` names the part, if there is one; `number` is its write's, in order of posting."""

    kind: Kind
    owner: PeerId
    target: PeerId | None = None
    job_id: int | None = None
    tag: ChunkTag | None = None
    number: int | None = None


# A choice is an action, and the call that performs it.
Predicate = Callable[[Action], bool]
Choice = tuple[Action, Callable[[], None]]


@dataclass(eq=False, slots=True)
class Hold:
    """Keeps matching actions from happening until `release`."""

    matches: Predicate
    _holds: list[Hold] = field(repr=False)

    def release(self) -> None:
        if self in self._holds:
            self._holds.remove(self)


class Fault(NamedTuple):
    """A fault by chance has no condition."""

    error: Exception
    at: Literal["post", "check"]
    lands: bool
    matches: Predicate | None = None
