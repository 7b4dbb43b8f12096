"""What the two sides of the connector tell each other, once a step of the engine. Plain data: it
is pickled, since they are in different processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True, slots=True)
class Open:
    """Decode: promise `pages` for tokens `prefix_len` to `num_tokens` of a prompt. `ticket` is the
    same on all workers, and never used again."""

    rid: str
    room: int
    prefill: str
    num_tokens: int
    prefix_len: int
    pages: tuple[int, ...]
    digest: bytes
    ticket: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Decode: this room will not be opened here."""

    room: int
    prefill: str
    reason: str
    ticket: int


@dataclass(frozen=True, slots=True)
class Add:
    """Prefill: the prompt of this room is here."""

    rid: str
    room: int
    decode: str
    num_tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Decline:
    """Prefill: the prompt of this room is not sent, and decode is not to wait for it."""

    room: int
    decode: str
    reason: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prefill: this step computes the prompt up to token `end`, whole pages but for the last chunk.
    `pages` are the request's pages
    from its page number `first_page` on."""

    rid: str
    first_page: int
    pages: tuple[int, ...]
    end: int
    last: bool


@dataclass(frozen=True, slots=True)
class Offer:
    """Prefill: the prompt is computed with this step, in `pages`. The decode server that proves the
    digest gets it; nobody opens the room after `timeout_s`."""

    rid: str
    room: int
    num_tokens: int
    digest: bytes
    pages: tuple[int, ...]
    timeout_s: float


@dataclass(slots=True)
class Orders:
    """From the scheduler to every worker. `abort_loads`, `abort_sends` and `withdrawals` are
    request ids, with the reason. `bell` is where a worker rings when it has news; "": nowhere.

    Where `weights_version` is not None the weights have moved to it: the orders in `before` are
    carried out first, then the move, then the others."""

    opens: list[Open] = field(default_factory=list)
    refusals: list[Refuse] = field(default_factory=list)
    adds: list[Add] = field(default_factory=list)
    declines: list[Decline] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    abort_loads: dict[str, str] = field(default_factory=dict)
    abort_sends: dict[str, str] = field(default_factory=dict)
    offers: list[Offer] = field(default_factory=list)
    withdrawals: dict[str, str] = field(default_factory=dict)
    bell: str = ""
    weights_version: str | None = None
    before: Orders | None = None

    def __bool__(self) -> bool:
        return self.weights_version is not None or bool(
            self.opens
            or self.refusals
            or self.adds
            or self.declines
            or self.chunks
            or self.abort_loads
            or self.abort_sends
            or self.offers
            or self.withdrawals
        )


@dataclass(slots=True)
class News:
    """From the workers to the scheduler, by request id; each worker says each thing once.

    `failed`: loads that did not arrive, and why. `refused`: those of them whose two servers do not
    work with each other, which the log of peers says once. `settled`: loads whose pages no peer
    writes any more. `overdue`: loads that are not settled in time. `promised`: sends for which
    decode has promised its pages. `unsent`: sends that failed, and why. `freed`: sends whose pages
    no write reads any more. `bells`: how many workers ring from now on. `address`: where the
    prefill side listens.
    """

    failed: dict[str, str] = field(default_factory=dict)
    settled: list[str] = field(default_factory=list)
    overdue: list[str] = field(default_factory=list)
    promised: list[str] = field(default_factory=list)
    unsent: dict[str, str] = field(default_factory=dict)
    freed: list[str] = field(default_factory=list)
    bells: int = 0
    address: str = ""
    refused: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return self.has_outcomes or bool(self.bells or self.address)

    @property
    def has_outcomes(self) -> bool:
        """Whether something became of a request."""
        return bool(
            self.failed
            or self.settled
            or self.overdue
            or self.promised
            or self.unsent
            or self.freed
        )

    def aggregate(self, other: Self) -> Self:
        """What two workers say, as vLLM asks for it."""
        return type(self)(
            {**other.failed, **self.failed},
            self.settled + other.settled,
            self.overdue + other.overdue,
            self.promised + other.promised,
            {**other.unsent, **self.unsent},
            self.freed + other.freed,
            self.bells + other.bells,
            self.address or other.address,
            self.refused | other.refused,
        )
