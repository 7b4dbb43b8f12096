"""What a pass of decode's engine costs: a model, fitted to the last passes.

    seconds = pass + per_running * running + per_prompt * prompts + per_token * tokens

Least squares, in which old passes fade and short ones weigh more. Terms begin near 0 and are never
below it; those of a pass and a prompt begin nearest, so requests and tokens take what was never
told apart. A far too long pass is a stall and counts only as far as usual passes vary; the third in
a row is a change, after which old passes fade fast. A stall among the first passes shows by a later
pass that is far shorter; then the first ones are forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

_TOKENS: Final = 256.0  # unit of tokens
_PRIOR: Final = (0.02, 2e-4, 0.02, 1e-5)  # precisions of terms that are 0, by those of a pass
_KEPT: Final = 0.98  # the weight that passes keep when another one of their kind comes
_KEPT_CHANGED: Final = 0.7  # the same where passes have become others
_MOST_STALLS: Final = 2  # in a row
_LEAST_PASSES: Final = 8  # of a kind, before one of it can be a stall
_STALL: Final = 4.0  # times the usual error, that a stall is late
_STALL_SHARE: Final = 0.3  # and at least so much of what was expected
_FIT_EVERY: Final = 8  # steps, while no one asks
_DEVIATION: Final = 1.25  # a normal distribution's, by the mean error
_FADED: Final = 0.1  # the weight that chunks keep which were long ago
_NUM: Final = len(_PRIOR)


@dataclass(slots=True)
class _PassSums:
    """Weighted sums of a kind of passes: of products of their terms, and of these with seconds."""

    rows: int = _NUM  # the first terms, which may be other than 0
    products: list[float] = field(default_factory=lambda: [0.0] * (_NUM * _NUM))
    seconds: list[float] = field(default_factory=lambda: [0.0] * _NUM)
    num: int = 0
    unusual: int = 0  # in a row, until the last one
    error_s: float = 0.0  # mean of how far these passes were from what was expected

    def copy(self) -> _PassSums:
        return replace(self, products=self.products.copy(), seconds=self.seconds.copy())

    def add(self, terms: Sequence[float], seconds: float, weight: float, kept: float) -> None:
        products, rows = self.products, self.rows
        for row in range(rows):  # only where a sum can be other than 0
            weighted = weight * terms[row]
            self.seconds[row] = self.seconds[row] * kept + weighted * seconds
            for at in range(row * _NUM, row * _NUM + rows):
                products[at] = products[at] * kept + weighted * terms[at - row * _NUM]
        self.num += 1


class PassCosts:
    """The model of what a pass costs. Every call is O(1)."""

    def __init__(self) -> None:
        # A kind each, so that what one has said does not fade while others come: steps without
        # chunks, chunks alone, chunks beside running requests.
        self._kinds = [_PassSums(rows=2), _PassSums(), _PassSums()]
        # To amend the last pass with chunks: its kind, and the sums before it.
        self._before: tuple[int, _PassSums] | None = None
        self.num_chunks = 0  # passes with chunks that were measured, ever
        self.most_tokens = 0.0  # of the last chunks; fades
        self._fitted = [0.0] * _NUM
        self._unfitted = 0  # passes since

    def add(
        self, running: int, prompts: int, tokens: int, seconds: float, amends: bool = False
    ) -> None:
        """Add a pass. `amends`: the last one with chunks, which had more."""
        kind = (1 if not running else 2) if prompts else 0
        if amends and self._before is not None:
            kind, self._kinds[kind] = self._before
            self._unfitted = _FIT_EVERY
        sums = self._kinds[kind]
        if prompts:
            self._before = kind, sums.copy()
            self.num_chunks += not amends
            self.most_tokens = max(self.most_tokens * _KEPT, tokens)
        terms = _terms(1, running, prompts, tokens)
        # 1. Is it a stall, or has something changed?
        kept, most_s = _KEPT, math.inf
        # The costs may be those of some steps ago: they cost more than all else here.
        is_few = sums.num < _LEAST_PASSES
        fits = prompts or is_few or self._unfitted >= _FIT_EVERY
        costs = self._fit() if fits else self._fitted
        late_s = seconds - (expected_s := _product(costs, terms))
        if _STALL * seconds < expected_s and self._forget_stalls(seconds, prompts > 0):
            sums, is_few = self._kinds[kind], True
            late_s = seconds - (expected_s := _product(self._fit(), terms))
        if is_few:
            # How far these vary is hardly known: one alone that is very late does not count.
            is_late = sums.num > 0 and late_s > _STALL * max(sums.error_s, expected_s)
            sums.unusual = int(is_late and not sums.unusual)
            if sums.unusual:
                return
        else:
            most_s = max(_STALL * sums.error_s, _STALL_SHARE * expected_s)
            if abs(late_s) <= most_s:
                sums.unusual = 0
            elif sums.unusual < _MOST_STALLS:
                sums.unusual += 1
                late_s = math.copysign(most_s, late_s)
            else:
                kept = _KEPT_CHANGED
        # 2. It counts.
        if sums.num:
            is_new = max(1 - _KEPT, 1 / sums.num)
            sums.error_s += (min(abs(late_s), most_s) - sums.error_s) * is_new
        sums.add(terms, max(0.0, expected_s + late_s), _TOKENS / (_TOKENS + tokens), kept)
        self._unfitted += 1

    def fade(self) -> None:
        """Note that the last pass with a chunk was long ago: what comes now counts for more."""
        for sums in self._kinds[1:]:
            sums.products = [one * _FADED for one in sums.products]
            sums.seconds = [one * _FADED for one in sums.seconds]
            sums.num = sums.unusual = 0
        self._unfitted, self._before = _FIT_EVERY, None

    def _forget_stalls(self, seconds: float, has_chunks: bool) -> bool:
        """Forget the kinds of which few passes were measured, and these took far longer than
        `seconds`. Return True if there are some. A step says nothing of chunks."""
        stalled = [
            kind
            for kind, sums in enumerate(self._kinds if has_chunks else self._kinds[:1])
            if sums.num <= _LEAST_PASSES and sums.seconds[0] > _STALL * seconds * sums.products[0]
        ]
        for kind in stalled:
            self._kinds[kind] = _PassSums(self._kinds[kind].rows)
            self._unfitted = _FIT_EVERY
        return bool(stalled)

    def seconds(self, passes: float, running: float, prompts: float, tokens: float) -> float:
        return _product(self._fit(), _terms(passes, running, prompts, tokens))

    def error(self, passes: float, running: float, prompts: float, tokens: float) -> float:
        terms = _terms(passes, running, prompts, tokens)
        spread = max(0.0, _product(_solved(self._products(), list(terms)), terms))
        return self._deviation_s(running) * math.sqrt(spread)

    def tokens_within(self, seconds: float) -> float:
        """Return how many tokens of one prompt add at most `seconds` to a step; at least 0."""
        _, _, prompt_s, token_s = self._fit()
        left_s = seconds - prompt_s
        if left_s <= 0:
            return 0.0
        return left_s / token_s * _TOKENS if token_s > 0 else math.inf

    def perhaps_within(self, seconds: float, most: int) -> int:
        """As `tokens_within`, less the standard error: `most`, or a half, a quarter and so on of
        it; at least 1."""
        products = self._products()
        of_prompt = _solved(products, [0.0, 0.0, 1.0, 0.0])
        of_token = _solved(products, [0.0, 0.0, 0.0, 1.0])
        _, _, prompt_s, token_s = self._fit()
        while most > 1:
            units = most / _TOKENS
            spread = of_prompt[2] + 2 * units * of_prompt[3] + units * units * of_token[3]
            error_s = self._deviation_s(1) * math.sqrt(max(0.0, spread))
            if prompt_s + token_s * units - error_s <= seconds:
                break
            most //= 2
        return most

    @property
    def prompt_tokens(self) -> float:
        _, _, prompt_s, token_s = self._fit()
        if not prompt_s:
            return 0.0
        return prompt_s / token_s * _TOKENS if token_s > 0 else math.inf

    def _deviation_s(self, running: float) -> float:
        alone, beside = self._kinds[1:]
        return _DEVIATION * (beside if beside.num and (running or not alone.num) else alone).error_s

    def _products(self) -> list[float]:
        kinds = [sums.products for sums in self._kinds]
        found = [sum(of_kinds) for of_kinds in zip(*kinds, strict=True)]
        for row, precision in enumerate(_PRIOR):
            found[row * (_NUM + 1)] += precision
        return found

    def _fit(self) -> list[float]:
        if not self._unfitted:
            return self._fitted
        products = self._products()
        kinds = [sums.seconds for sums in self._kinds]
        seconds = [sum(of_kinds) for of_kinds in zip(*kinds, strict=True)]
        found = _solved(products, seconds)
        # The term that is furthest below 0 is 0, then what is left is fitted again.
        while (least := min(found)) < 0:
            at = found.index(least)
            for other in range(_NUM):
                products[at * _NUM + other] = products[other * _NUM + at] = 0.0
            products[at * (_NUM + 1)], seconds[at] = 1.0, 0.0
            found = _solved(products, seconds)
        self._fitted, self._unfitted = found, 0
        return found


def _terms(passes: float, running: float, prompts: float, tokens: float) -> Sequence[float]:
    return passes, running, prompts, tokens / _TOKENS


def _product(costs: Sequence[float], terms: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(costs, terms, strict=True))


def _solved(matrix: Sequence[float], right: Sequence[float]) -> list[float]:
    rows, found = list(matrix), list(right)
    for at in range(_NUM):
        pivot = rows[at * _NUM + at]
        for below in range(at + 1, _NUM):
            if factor := rows[below * _NUM + at] / pivot:
                for column in range(at + 1, _NUM):
                    rows[below * _NUM + column] -= factor * rows[at * _NUM + column]
                found[below] -= factor * found[at]
    for at in reversed(range(_NUM)):
        done = sum(rows[at * _NUM + column] * found[column] for column in range(at + 1, _NUM))
        found[at] = (found[at] - done) / rows[at * _NUM + at]
    return found
