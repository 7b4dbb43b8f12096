"""What may happen in a `FakeFabric`, what keeps it from happening, what goes wrong on command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from prefixkv.spi import ChunkTag, PeerId

Kind = Literal["event", "connect", "post", "land", "complete", "fail", "notify", "renew"]


class FakeDisconnectError(Exception):
    """The peer of a write is gone. No class of ours, as NIXL's are not."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that may happen. `tag` names the part, where there is one; `number` counts the
    writes posted."""

    kind: Kind
    owner: PeerId
    target: PeerId | None = None
    job_id: int | None = None
    tag: ChunkTag | None = None
    number: int | None = None


Predicate = Callable[[Action], bool]
Choice = tuple[Action, Callable[[], None]]


@dataclass(eq=False, slots=True)
class Hold:
    """Keeps matching actions from happening until `release()`."""

    matches: Predicate
    _holds: list[Hold] = field(repr=False)

    def release(self) -> None:
        if self in self._holds:
            self._holds.remove(self)


class Fault(NamedTuple):
    """What becomes of a post; of one by chance, with no condition."""

    error: Exception
    at: Literal["post", "check"]
    lands: bool
    matches: Predicate | None = None
