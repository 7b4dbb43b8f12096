"""Counts for operators: histograms, and tallies by label.

The owner's thread writes, any thread reads: every value is an int, a float or a list that is copied
in one step, so a reader needs no lock and the writer does not wait. Figures read together may be of
moments a few microseconds apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any

from prefixkv.errors import UserErrors, shown_namespace

SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 120.0,
)  # fmt: skip
MICROSECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1)

OTHER = "other"
"""The label under which a full tally counts all further ones."""


RECENT = 0.99
"""The weight that a recent sum keeps from one request to the next."""

OUTCOMES = ("success", "failed", "aborted")
"""Outcomes of transfers."""


class Histogram:
    """Counts of values by upper bound. `observe` is O(log bounds).

    >>> waits = Histogram((1.0, 2.0))
    >>> for value in (0.5, 2.0, 9.0):
    ...     waits.observe(value)
    >>> waits.cumulative(), waits.total
    ([1, 2, 3], 11.5)
    """

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        # One more than bounds: values above the last.
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[int]:
        """Return the numbers of values up to each bound, the last one infinity."""
        return list(accumulate(self._counts.copy()))


class Tally:
    """Numbers by label, a row of `width` each. Labels beyond `max_labels` share the row `OTHER`.
    `name`: returns the text of a label. Called once per row."""

    def __init__(self, width: int, max_labels: int = 64, name: Callable[[Any], str] = str) -> None:
        self._width = width
        self._max_labels = max_labels
        self._name = name
        # Both name the same rows: labels as the writer has them, and texts as readers want them.
        # Labels with the same text share a row.
        self._rows: dict[Hashable, list[float]] = {}
        self._named: dict[str, list[float]] = {}

    def row(self, label: Hashable) -> list[float]:
        """Return the row of a label, to add to. O(1)."""
        if (row := self._rows.get(label)) is not None:
            return row
        if len(self._rows) >= self._max_labels:
            # Clients may choose labels (a namespace): those beyond the limit are not kept, or they
            # would fill memory.
            return self._named.setdefault(OTHER, [0.0] * self._width)
        row = self._named.setdefault(self._name(label), [0.0] * self._width)
        return self._rows.setdefault(label, row)

    def read(self) -> dict[str, list[float]]:
        """Return a copy of all rows, by the labels' text."""
        # Copied before iterating: the writer may add a row meanwhile.
        return {name: row.copy() for name, row in self._named.copy().items()}


class Journal:
    """Counts of one side's requests. Written by the scheduler's thread.

    `counters` by name, over all events. `tokens` by namespace, each request once: of its prompt,
    found here, both again as sums that fade over some hundred requests, and found on their way.
    `transfers` by outcome and peer. `waits` in seconds, by reason.

    Each of `on_ended` is called with (req, now_s) by the scheduler's thread when a request has
    ended.
    """

    PROMPT, HIT, RECENT_PROMPT, RECENT_HIT, SHARED = range(5)

    def __init__(self, reasons: Sequence[str]) -> None:
        self.counters: Counter[str] = Counter()
        self.tokens = Tally(5, name=namespace_label)
        self.transfers = {outcome: Tally(1) for outcome in OUTCOMES}
        self.waits = {reason: Histogram() for reason in reasons}
        self.on_ended: list[Callable[[Any, float], object]] = []
        # What these raised. A scheduler replaces it by its own collector.
        self.errors = UserErrors()

    def ended(self, req: Any, now_s: float) -> None:
        """Call all of `on_ended`. Never raises: the request is in the middle of its end."""
        req.ended_s = now_s
        for listener in self.on_ended:
            try:
                listener(req, now_s)
            except Exception as error:
                self.errors.caught(error)

    def found(
        self, namespace: Hashable, prompt_tokens: int, hit_tokens: int, shared_tokens: int = 0
    ) -> None:
        """Count a request at its first admission, and how much of its prompt was found."""
        row = self.tokens.row(namespace)
        prompt, hit, recent_prompt, recent_hit, shared = row
        # The recent ones fade alike, so their quotient is a recent hit rate.
        row[:] = (
            prompt + prompt_tokens, hit + hit_tokens, recent_prompt * RECENT + prompt_tokens,
            recent_hit * RECENT + hit_tokens, shared + shared_tokens,
        )  # fmt: skip

    def transfer_ended(self, peer: str, outcome: str) -> None:
        """Count an ended transfer, by outcome and peer."""
        self.transfers[outcome].row(peer)[0] += 1

    def waited(self, reason: str, since_s: float | None, until_s: float | None) -> None:
        """Observe the wait from `since_s` to `until_s`; no-op if either is not known."""
        if since_s is not None and until_s is not None:
            self.waits[reason].observe(until_s - since_s)


def namespace_label(namespace: Hashable) -> str:
    """Return a namespace as a label of at most 64 characters: "" for the common one."""
    if namespace is None:
        return ""
    return (namespace if isinstance(namespace, str) else shown_namespace(namespace))[:64]
