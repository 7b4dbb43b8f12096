"""What the explorer's world is made of: values, all of them, but for a `Draft`."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prefixkv.protocol.ids import PeerId
from tests.laws.explore.actors import Use


class LawError(AssertionError):
    """`trace` are the moves that lead there, once the search has found them."""

    trace: tuple[str, ...] = ()


class Budget(NamedTuple):
    """How many of each fault may still happen, anywhere."""

    lose: int = 0
    repeat: int = 0  # or overtake
    abort: int = 0  # by an engine of either side; a refusal is one
    restart: int = 0  # of a process of either side
    fail: int = 0  # of writes
    slow: int = 0
    stall: int = 0
    hush: int = 0  # nothing is heard for longer than any patience


@dataclass(frozen=True)
class Config:
    """Ranks of prefill; of each decode worker; the requests; the faults.

    `arrivals`: a notification may come after the write has ended, else it comes with the bytes.
    `refuse`: a refusal is one of the aborts. `fenced`: prefill's operator fences lives of
    decode that are over. `retry`: request 1 is another attempt at
    request 0, which decode makes once that has failed there, and then asks prefill for.
    `successor`: request 1 uses the number of request 0, once that has ended on both sides.
    `heard`: heartbeats come, from what lives; else silence ends each wait. `brief`: a copy of a
    frame is gone at once where its receiver has heard of that life, and no life ends any more: in
    configurations that are not brief it is shown that such a copy does nothing.
    """

    name: str
    prefill: int = 1
    decode: tuple[int, ...] = (1,)
    uses: tuple[Use, ...] = (Use(0, 0, 7),)
    budget: Budget = field(default_factory=Budget)
    arrivals: bool = False
    successor: bool = False
    refuse: bool = False
    fenced: bool = False
    retry: bool = False
    heard: bool = False
    brief: bool = False


# A use on a decode rank.
CLOSED, OPEN, DONE, FAILED, DRAINED, FORGOTTEN = range(6)


class Share(NamedTuple):
    """A use on a prefill rank. `ended` is None, or whether it succeeded."""

    added: bool = False
    booted: bool = False
    chunks: int = 0
    ended: bool | None = None
    free: bool = False
    lost: bool = False  # what an earlier life had of it

    @property
    def over(self) -> bool:
        return self.added and self.ended is not None and self.free


class Record(NamedTuple):
    """A use, by rank of either side. `written`: by prefill rank, then decode rank, pages as bits.
    `wanted` is False once decode's engine wants it no more; `spoilt`: a fault that it may fail of
    has struck it."""

    reads: tuple[int, ...]
    shares: tuple[Share, ...]
    written: tuple[int, ...]
    wanted: bool = True
    spoilt: bool = False


class Write(NamedTuple):
    """`use` is whose KV it is, `reader` the slot of the decode rank in this life, -1: it is gone.
    `status`: "posted" and not ended; "failed", "renewing", "ghost" (of a former life), "kernel"
    (its agent is gone): it may land all the same."""

    slot: int
    job: int
    use: int
    reader: int
    peer: PeerId
    pages: tuple[int, ...]
    tag: bytes
    status: str = "posted"
    cancelled: bool = False
    writer: PeerId | None = None


class State(NamedTuple):
    actors: tuple[int, ...]  # prefill's ranks, then decode's
    lives: tuple[int, ...]
    wires: tuple[tuple[int, ...], ...]  # frames
    held: tuple[int, int, bool] | None  # on this wire; whether a later frame has overtaken it
    writes: tuple[Write, ...]
    settling: tuple[tuple[int, Any], ...]
    arrived: tuple[tuple[int, int, bytes], ...]  # on this slot, for this use: tags
    uses: tuple[Record, ...]
    dead: tuple[PeerId, ...]  # lives of prefill ranks that are not fenced yet
    fences: tuple[tuple[int, PeerId], ...]  # prefill's operator is to say that this life is over
    budget: Budget


Move = tuple[Any, ...]  # a method of the world, and its arguments behind the draft
Packed = tuple[int, ...]


class Draft:
    """A state in the making."""

    __slots__ = State._fields

    def __init__(self, state: State) -> None:
        (
            self.actors, self.lives, self.wires, self.held, self.writes,
            self.settling, self.arrived, self.uses, self.dead, self.fences, self.budget,
        ) = state  # fmt: skip

    def spend(self, fault: str) -> None:
        self.budget = self.budget._replace(**{fault: getattr(self.budget, fault) - 1})


def put(parts: tuple[Any, ...], at: int, part: Any) -> Any:
    """The tuple with another part in this place."""
    return *parts[:at], part, *parts[at + 1 :]


def assert_law(holds: bool, text: str) -> None:
    if not holds:
        raise LawError(text)
