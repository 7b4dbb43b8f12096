"""What a pass of the stand-in has measured, and the figures that follow. No engine in here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

PAGE_STATES: Final = ("free", "owned", "cached", "held", "quarantined")
PAGES_LEFT: Final = ("owned", "held", "quarantined")  # which a node at rest has none of


@dataclass(slots=True)
class Measured:
    """One pass, as the two workers saw it. Times are seconds; one entry of `ttft_s` a request
    answered."""

    requests: int = 0  # asked for: answered and failed
    failed: int = 0
    prompt_tokens: int = 0  # of the requests that decode admitted
    hit_tokens: int = 0
    by_turn: dict[int, list[int]] = field(default_factory=dict)  # prompt and hit tokens of a turn
    prefill_prompt_tokens: int = 0
    prefill_hit_tokens: int = 0
    bytes_sent: int = 0
    bytes_skipped: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    duration_s: float = 0.0
    evicted_pages: int = 0
    retractions: int = 0
    pages_verified: int = 0
    pages_mismatched: int = 0
    locks_at_end: int = 0
    pages_at_end: dict[str, int] = field(default_factory=dict)
    prefill_locks_at_end: int = 0
    prefill_pages_at_end: dict[str, int] = field(default_factory=dict)

    def admitted(self, turn: int, prompt_tokens: int, hit_tokens: int) -> None:
        """Count a request of a conversation's turn."""
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += hit_tokens
        found = self.by_turn.setdefault(turn, [0, 0])
        found[0] += prompt_tokens
        found[1] += hit_tokens

    def complaints(self) -> list[str]:
        """What must not be: every failed request, wrong page and page or lock that was not
        given back."""
        found = {"requests failed": self.failed, "pages mismatched": self.pages_mismatched}
        for side, locks, pages in (
            ("decode", self.locks_at_end, self.pages_at_end),
            ("prefill", self.prefill_locks_at_end, self.prefill_pages_at_end),
        ):
            found[f"{side} locks left"] = locks
            for state in PAGES_LEFT:
                found[f"{side} pages left {state}"] = pages.get(state, 0)
        return [f"{count} {what}" for what, count in found.items() if count]

    def figures(self) -> dict[str, Any]:
        """The row of this pass: times in ms, bytes in MiB."""
        hits = {turn + 1: round(hit / of, 4) for turn, (of, hit) in sorted(self.by_turn.items())}
        return {
            "requests": self.requests,
            "failed": self.failed,
            "hit_rate": _rounded(ratio(self.hit_tokens, self.prompt_tokens)),
            "hit_rate_by_turn": hits,
            "prefill_hit_rate": _rounded(
                ratio(self.prefill_hit_tokens, self.prefill_prompt_tokens)
            ),
            "sent_mib": round(self.bytes_sent / 2**20, 1),
            "not_sent_mib": round(self.bytes_skipped / 2**20, 1),
            "ttft_ms": _in_ms(quantiles(self.ttft_s, 50, 90, 99)),
            "itl_ms": _in_ms(quantiles(self.itl_s, 50, 99)),
            "requests_per_s": _rounded(ratio(self.requests - self.failed, self.duration_s)),
            "evicted_pages": self.evicted_pages,
            "pages_verified": self.pages_verified,
            "pages_mismatched": self.pages_mismatched,
        }


def ratio(numerator: float, divisor: float) -> float | None:
    return numerator / divisor if divisor else None


def quantiles(values: list[float], *percents: int) -> dict[str, float | None]:
    found = np.percentile(values, percents).tolist() if values else [None] * len(percents)
    return {f"p{percent}": value for percent, value in zip(percents, found, strict=True)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _in_ms(found: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if s is None else round(1e3 * s, 2) for name, s in found.items()}
