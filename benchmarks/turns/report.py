"""What a pass of the stand-in has measured, and the figures that follow. No engine in here."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Measured:
    """One pass, as the two workers saw it. Times are seconds; one entry of `ttft_s` a request
    answered."""

    requests: int = 0  # asked for: answered and failed
    failed: int = 0
    # By turn, prompt and hit tokens of the requests that decode admitted.
    by_turn: defaultdict[int, tuple[int, int]] = field(
        default_factory=lambda: defaultdict(lambda: (0, 0))
    )
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
    left: dict[str, int] = field(default_factory=dict)  # what was not given back at the end

    def admitted(self, turn: int, prompt_tokens: int, hit_tokens: int) -> None:
        """Count a request of a conversation's turn."""
        prompts, hits = self.by_turn[turn]
        self.by_turn[turn] = prompts + prompt_tokens, hits + hit_tokens

    @property
    def hit_tokens(self) -> int:
        return sum(hits for _, hits in self.by_turn.values())

    def complaints(self) -> list[str]:
        """What must not be: every failed request, wrong page and page or lock that was not
        given back."""
        found = {"requests failed": self.failed, "pages mismatched": self.pages_mismatched}
        return [f"{count} {what}" for what, count in (found | self.left).items() if count]

    def figures(self) -> dict[str, Any]:
        """The row of this pass: times in ms, bytes in MiB."""
        prompt_tokens = sum(prompts for prompts, _ in self.by_turn.values())
        hits = {turn + 1: rate(hit, of) for turn, (of, hit) in sorted(self.by_turn.items())}
        return {
            "requests": self.requests,
            "failed": self.failed,
            "hit_rate": rate(self.hit_tokens, prompt_tokens),
            "hit_rate_by_turn": hits,
            "prefill_hit_rate": rate(self.prefill_hit_tokens, self.prefill_prompt_tokens),
            "sent_mib": round(self.bytes_sent / 2**20, 1),
            "not_sent_mib": round(self.bytes_skipped / 2**20, 1),
            "ttft_ms": in_ms(self.ttft_s, 50, 90, 99),
            "itl_ms": in_ms(self.itl_s, 50, 99),
            "requests_per_s": rate(self.requests - self.failed, self.duration_s),
            "evicted_pages": self.evicted_pages,
            "pages_verified": self.pages_verified,
            "pages_mismatched": self.pages_mismatched,
        }


def rate(numerator: float, divisor: float) -> float | None:
    return round(numerator / divisor, 4) if divisor else None


def in_ms(seconds: list[float], *percents: int) -> dict[str, float | None]:
    found = np.percentile(seconds, percents).tolist() if seconds else [None] * len(percents)
    return {
        f"p{percent}": None if s is None else round(1e3 * s, 2)
        for percent, s in zip(percents, found, strict=True)
    }
