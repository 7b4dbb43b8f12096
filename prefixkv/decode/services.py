"""What prefill workers take to answer: the cost of a token, by the answers of all, and what each
worker still has to answer. The choice of a source counts on it (`sources.py`). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from prefixkv.protocol.ids import RoomKey

FRESH_S: Final = 60.0
"""Seconds after which a measurement is no longer used: the load may be another by then."""

_KEPT_TRANSFERS: Final = 0.95
_AGAIN_PRIOR: Final = 16.0  # as one transfer, of which prefill computes 100 tokens again
_FIT_ROUNDS: Final = 8
_ROUND: Final = 512  # tokens that the costs of a transfer's round trip count for in its weight


@dataclass(slots=True)
class ServiceLine:
    """A line through the last services of prefill workers: seconds by tokens that are sent, that
    decode loads, which prefill may have to compute again, and that decode has computed itself,
    which prefill does. Old ones fade.

    Services are weighed by about the inverse of their tokens: of a long one a second is noise, of a
    short one it is all. No part of the line is below 0.
    """

    # Weighted sums of the products of: 1, tokens sent, loaded and computed again, seconds.
    sums: list[list[float]] = field(default_factory=lambda: [[0.0] * 5] * 5)
    num: int = 0
    first_s: float = 0.0  # of each transfer, per token sent, and per token loaded
    per_token_s: float = 0.0
    per_loaded_s: float = 0.0
    per_again_s: float = 0.0  # the same, of those that decode has computed

    def add(self, tokens: int, loaded: int, seconds: float, again: int = 0) -> tuple[float, float]:
        """Add a service: tokens sent, loaded meanwhile, and computed again. Return its weight, and
        the seconds by the line."""
        weight, kept = 1.0 / (tokens + loaded + again + _ROUND), _KEPT_TRANSFERS
        self.num += 1
        terms = 1.0, tokens, loaded, again, seconds
        self.sums = [
            [was * kept + weight * one * other for was, other in zip(row, terms, strict=True)]
            for row, one in zip(self.sums, terms, strict=True)
        ]
        self._fit()
        return weight, self.at(1, tokens, loaded, again)

    def _fit(self) -> None:
        if not self.sums[3][3]:
            self._fit_without_again()
            return
        num, sent, loaded, again, _ = (row[3] for row in self.sums)
        seconds = self.sums[3][4]
        # In turn what is computed again by the rest, and the rest by that: it goes on from the last
        # fit. As long as little is known, prefill takes as long for it as for what it sends.
        for _ in range(_FIT_ROUNDS):
            self._fit_without_again()
            left = seconds - self.first_s * num
            left -= self.per_token_s * sent + self.per_loaded_s * loaded
            known = left + _AGAIN_PRIOR * self.per_token_s
            self.per_again_s = max(0.0, known / (again + _AGAIN_PRIOR))

    def _fit_without_again(self) -> None:
        # x: tokens sent, h: loaded, a: computed again, y: seconds.
        again_s = self.per_again_s
        (num, x, h, a, y), (_, xx, xh, xa, xy), (_, _, hh, ha, hy), *_ = self.sums
        x, h, y = x / num, h / num, max(0.0, y - again_s * a) / num
        xx, xh, hh = xx / num - x * x, xh / num - x * h, hh / num - h * h
        xy, hy = (xy - again_s * xa) / num - x * y, (hy - again_s * ha) / num - h * y
        # 1. By both. Transfers of one size, or of sizes that go together, say nothing of one of the
        # rates.
        per_token = per_loaded = 0.0
        if (det := xx * hh - xh * xh) > 1e-3 * xx * hh > 0:
            per_token, per_loaded = (xy * hh - hy * xh) / det, (hy * xx - xy * xh) / det
        # 2. By one, where the other is not known or below 0; what is sent goes before.
        if per_token <= 0 or per_loaded <= 0:
            by_token, by_loaded = xy / xx if xx > 1 else 0.0, hy / hh if hh > 1 else 0.0
            if by_token > 0 and per_token >= 0:
                per_token, per_loaded = by_token, 0.0
            else:
                per_token, per_loaded = 0.0, max(0.0, by_loaded)
        # 3. No more than the mean belongs to the rates, since no round trip is below 0.
        by_rates_s = per_token * x + per_loaded * h
        most = min(1.0, y / by_rates_s) if by_rates_s > 0 else 0.0
        self.per_token_s, self.per_loaded_s = per_token * most, per_loaded * most
        self.first_s = max(0.0, y - most * by_rates_s)

    def at(self, num: float, tokens: float, loaded: float, again: float = 0.0) -> float:
        rates_s = self.per_token_s * tokens + self.per_loaded_s * loaded
        return self.first_s * num + rates_s + self.per_again_s * again


class AwaitedRoom(NamedTuple):
    """When a room was promised, and tokens: sent, loaded by decode, and computed by decode."""

    time_s: float
    tokens: int
    loaded: int
    again: int


@dataclass(slots=True)
class PrefillLoad:
    """The promises that a worker has to answer, and how it compares with all workers."""

    promises: dict[RoomKey, AwaitedRoom] = field(default_factory=dict)  # the oldest first
    tokens: int = 0  # of all of them
    loaded: int = 0
    again: int = 0
    answered_s: float = -math.inf
    # Of its services: seconds, and those by the line. Fading sums, weighed as the line's.
    took_s: float = 0.0
    by_line_s: float = 0.0

    def add(self, key: RoomKey, promise: AwaitedRoom) -> None:
        self.promises[key] = promise
        self.tokens += promise.tokens
        self.loaded += promise.loaded
        self.again += promise.again

    def remove(self, key: RoomKey) -> AwaitedRoom | None:
        promise = self.promises.pop(key, None)
        if promise is not None:
            self.tokens -= promise.tokens
            self.loaded -= promise.loaded
            self.again -= promise.again
        return promise

    def answered(self, weight: float, took_s: float, by_line_s: float, now_s: float) -> None:
        """Note an answer: in `took_s` seconds, `by_line_s` by the line, with this weight."""
        self.took_s = self.took_s * _KEPT_TRANSFERS + weight * took_s
        self.by_line_s = self.by_line_s * _KEPT_TRANSFERS + weight * by_line_s
        self.answered_s = now_s

    def began_s(self, promise: AwaitedRoom) -> float:
        return max(promise.time_s, self.answered_s)

    def factor(self, now_s: float) -> float:
        """Return how many times as long as others this worker takes; 1 if not known."""
        if now_s - self.answered_s > FRESH_S or self.by_line_s <= 0.0:
            return 1.0
        return self.took_s / self.by_line_s

    def backlog_s(self, line: ServiceLine, now_s: float) -> float:
        """Return the seconds until it has answered what it was promised."""
        oldest = next(iter(self.promises.values()), None)
        if oldest is None:
            return 0.0
        factor, had_s = self.factor(now_s), now_s - self.began_s(oldest)
        head_s = factor * line.at(1, oldest.tokens, oldest.loaded, oldest.again)
        behind_s = line.at(
            len(self.promises) - 1,
            self.tokens - oldest.tokens,
            self.loaded - oldest.loaded,
            self.again - oldest.again,
        )
        # One that takes longer than it should takes as long again.
        return max(head_s - had_s, had_s) + factor * behind_s
