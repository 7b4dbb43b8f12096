"""The source of the part of a prompt that decode lacks: its own compute, or a prefill worker.

The decision is made when a request is admitted, where it is known what is cached, what is on its
way, and what the batch does. The rule:

    1. more than `below` tokens: prefill
    2. at most `_ALWAYS` of them: here, since a transfer's round trip costs more than a step
    3. not measured lately: here, as long as all that is due here is at most `below` tokens
    4. else *fair*: of the ways that take at most twice as long as the fastest, and 20 ms, the one
       that sends least, and of those the fastest

Each way is a `Way`: how long it takes by what was measured, and how many tokens it sends. Another
source is another `Way`. A request that each finds fastest by itself would take the shared link
where its own compute is a little slower, and all would be slower for it; hence *fair*.

    here       (due + missing) tokens, in chunks beside the batch: the engine's calls of `computed`
    prefill    wait + missing / rate, fitted to the last transfers of the worker, from the promise
               to the KV; at least as long as its oldest promise has waited by now

While no prefill worker can be asked, decode computes as much as `down_below` per request.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from prefixkv.config import ComputeConfig
from prefixkv.protocol.ids import RoomKey

FAIR_FACTOR: Final = 2.0
FAIR_S: Final = 0.02
"""A way may take `FAIR_FACTOR` times as long as the fastest, and `FAIR_S` seconds more."""

FRESH_S: Final = 60.0
"""Seconds after which a measurement is no longer used: the load may be another by then."""

_ALWAYS: Final = 64  # tokens
_FIRST_CHUNK: Final = 64  # tokens of a chunk beside a batch while nothing is measured
_LEAST_CHUNK: Final = 16  # tokens of a chunk, whatever `itl_share` says: else prompts never end
_LEAST_TOKENS: Final = 128.0  # tokens that have to be computed before the rate counts as measured
_LEAST_TRANSFERS: Final = 3.0
_KEPT: Final = 0.9  # the weight that a sum keeps from one measurement to the next
_MAX_WORKERS: Final = 256  # prefill workers that are remembered


class Source(enum.Enum):
    """Where the missing part of a prompt comes from."""

    HERE = "here"
    PREFILL = "prefill"


class Way(NamedTuple):
    """One way to get what a request lacks: seconds until it is here, and tokens that are sent."""

    source: Source
    seconds: float
    sent_tokens: int


def fair(ways: Sequence[Way]) -> Way:
    """Return the fair one of the ways to get what a request lacks; see the module's rule.

    >>> here, sent = Way(Source.HERE, 0.5, 0), Way(Source.PREFILL, 0.3, 400)
    >>> fair([here, sent]).source
    <Source.HERE: 'here'>
    >>> fair([here._replace(seconds=0.7), sent]).source
    <Source.PREFILL: 'prefill'>
    """
    most_s = FAIR_FACTOR * min(way.seconds for way in ways) + FAIR_S
    return min(
        (way for way in ways if way.seconds <= most_s),
        key=lambda way: (way.sent_tokens, way.seconds),
    )


@dataclass(slots=True)
class _Line:
    """A line through the last transfers of a prefill worker: seconds by tokens. Old ones fade."""

    num: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    last_s: float = -math.inf
    promised: dict[RoomKey, float] = field(default_factory=dict)  # when; the oldest first

    def add(self, tokens: int, seconds: float, now_s: float) -> None:
        """Add a transfer's tokens, and the seconds that it took, to its prefill worker's line."""
        self.num = self.num * _KEPT + 1
        self.tokens = self.tokens * _KEPT + tokens
        self.seconds = self.seconds * _KEPT + seconds
        self.squares = self.squares * _KEPT + tokens * tokens
        self.products = self.products * _KEPT + tokens * seconds
        self.last_s = now_s

    def at(self, tokens: int) -> float:
        """Return the seconds that a transfer of `tokens` takes by the line of its worker."""
        mean, mean_s = self.tokens / self.num, self.seconds / self.num
        spread = self.squares / self.num - mean * mean
        # Transfers of one size say nothing of the rate; then every size takes as long.
        slope = 0.0
        if spread > 1.0:
            slope = max(0.0, (self.products / self.num - mean * mean_s) / spread)
        # No more than the mean belongs to the rate, since no wait is below 0.
        slope = min(slope, mean_s / mean)
        return max(0.0, mean_s + slope * (tokens - mean))


class Sources:
    """Measurements, and the decision by them; the module's text has the rule. Owned by the
    scheduler's thread.

    Args:
        config: None: everything comes from prefill.
        fails_over: True if decode computes up to `down_below` tokens of a request where its prefill
            worker cannot be asked; else up to `below`.
    """

    def __init__(self, config: ComputeConfig | None = None, fails_over: bool = False) -> None:
        self.config = config
        self.fails_over = fails_over
        # Of chunks: tokens, and the seconds that they took beyond a step without one. Fading sums.
        self._tokens = self._seconds = 0.0
        self._computed_s = -math.inf
        self._step_s = 0.0  # mean of a step without a chunk; 0: not known
        self._lines: dict[str, _Line] = {}

    # --- measurements -----------------------------------------------------------------------------

    def chunk(self, num_tokens: int, seconds: float, beside: bool, now_s: float) -> None:
        """Note that decode computed a chunk in a pass of `seconds`, alone or `beside` a batch."""
        if beside:
            seconds -= self._step_s
        # A pass that seems to cost nothing was measured wrong: the rate stays finite.
        self._tokens = self._tokens * _KEPT + num_tokens
        self._seconds = self._seconds * _KEPT + max(seconds, num_tokens * 1e-7)
        self._computed_s = now_s

    def step(self, seconds: float) -> None:
        """Note how long a step of decode's batch took that computed no chunk."""
        step_s = self._step_s
        self._step_s = step_s * _KEPT + seconds * (1 - _KEPT) if step_s else seconds

    def promised(self, address: str, key: RoomKey, now_s: float) -> None:
        """Note that the prefill worker at `address` was promised a room, and has to answer."""
        if self.config is None:
            return
        line = self._lines.pop(address, None) or _Line()
        self._lines[address] = line  # the one that was asked last is forgotten last
        line.promised[key] = now_s
        if len(self._lines) > _MAX_WORKERS:
            del self._lines[next(iter(self._lines))]

    def arrived(self, address: str, key: RoomKey, num_tokens: int, now_s: float) -> None:
        """Note that the KV of a room has arrived from the prefill worker at `address`."""
        line = self._lines.get(address)
        if line is not None and (since_s := line.promised.pop(key, None)) is not None:
            line.add(num_tokens, now_s - since_s, now_s)

    def gave_up(self, address: str, key: RoomKey) -> None:
        """Note that a room of the prefill worker at `address` has failed, or was aborted: its time
        says nothing.
        """
        if (line := self._lines.get(address)) is not None:
            line.promised.pop(key, None)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second that decode's own chunks are computed at; 0 where that is not known."""
        return self._tokens / self._seconds if self._tokens >= _LEAST_TOKENS else 0.0

    # --- the decision -----------------------------------------------------------------------------

    def most_tokens(self, is_down: bool) -> int:
        """Return how many tokens of one request decode computes at most; `is_down`: where its
        prefill worker cannot be asked. -1: none at all.
        """
        if self.config is None:
            return -1
        if is_down and self.fails_over:
            return self.config.down_below
        return self.config.below

    def choose(self, missing: int, due: int, is_busy: bool, address: str, now_s: float) -> Source:
        """Choose the source of a request's missing tokens, by the module's rule.

        Args:
            missing: tokens that are neither here nor on their way, at least 0.
            due: tokens that decode has to compute for other requests.
            is_busy: requests run, beside which the chunks are computed.
            address: its prefill worker, which can be asked.
        """
        config = self.config
        # 1. and 2.: by size alone.
        if config is None or missing > config.below:
            return Source.PREFILL
        if missing <= _ALWAYS:
            return Source.HERE
        # 3. One of the two ways is not known.
        here_s = self._here_s(due + missing, is_busy, now_s)
        prefill_s = self._prefill_s(address, missing, now_s)
        if here_s is None or prefill_s is None:
            return Source.HERE if due + missing <= config.below else Source.PREFILL
        # 4. Both are.
        ways = Way(Source.HERE, here_s, 0), Way(Source.PREFILL, prefill_s, missing)
        return fair(ways).source

    def chunk_tokens(self, is_busy: bool) -> int:
        """Return the most tokens of prompts that decode's next step may compute; `is_busy`: beside
        a batch, whose step `itl_share` bounds the addition to. 0 without a config.
        """
        if self.config is None:
            return 0
        most = self.config.chunk_tokens
        if not is_busy:
            return most
        rate = self.tokens_per_s
        if not rate or not self._step_s:
            return min(most, _FIRST_CHUNK)
        share = self.config.itl_share * self._step_s * rate
        return min(most, max(_LEAST_CHUNK, int(share)))

    def _here_s(self, num_tokens: int, is_busy: bool, now_s: float) -> float | None:
        """Return the seconds until decode has computed `num_tokens` itself; None if not known."""
        rate = self.tokens_per_s
        if not rate or now_s - self._computed_s > FRESH_S:
            return None
        seconds = num_tokens / rate
        # Beside a batch each chunk waits for its step.
        if is_busy:
            seconds += math.ceil(num_tokens / self.chunk_tokens(True)) * self._step_s
        return seconds

    def _prefill_s(self, address: str, num_tokens: int, now_s: float) -> float | None:
        """Return the seconds until `num_tokens` have come from a prefill worker to decode; None if
        not known.
        """
        line = self._lines.get(address)
        if line is None or line.num < _LEAST_TRANSFERS * _KEPT**2:
            return None
        if now_s - line.last_s > FRESH_S and not line.promised:
            return None
        # A worker that is behind answers none of the promises after the oldest before that one.
        waited_s = now_s - next(iter(line.promised.values()), now_s)
        return max(line.at(num_tokens), waited_s)
