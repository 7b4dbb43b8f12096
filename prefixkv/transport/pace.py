"""The rate at which a transport sends: a token bucket over the bytes of its parts."""

from __future__ import annotations

import math
from typing import Final

_SLICE_S: Final = 2e-3  # of the rate: as much is sent at once, and saved up while nothing is sent
_LEAST_BYTES: Final = 64 << 10  # of a slice; smaller parts cost more time than their bytes


class Pace:
    """Bytes that may be sent now. Owned by the transport's thread. `bytes_per_s` 0: no limit.

    A part may go while the bucket is not in debt, and is then taken off it whole. So no part is too
    large to go, the mean is the rate, and at most a slice and one part go beyond it at once.

    >>> pace = Pace(1e9)
    >>> pace.free_at(0.0), pace.spend(10_000_000, 0.0), round(pace.free_at(0.0), 6)
    (0.0, None, 0.008)
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._rate = bytes_per_s
        self._slice = max(_LEAST_BYTES, int(bytes_per_s * _SLICE_S))
        self._left: float = self._slice  # bytes that may go; below 0: debt
        self._at_s = -math.inf  # monotonic: when `_left` was counted

    def __bool__(self) -> bool:
        return self._rate > 0

    def part_bytes(self, post_bytes: int) -> int:
        """Return the bound on a part: `post_bytes`, or a slice where the rate is limited."""
        # A part of many slices would make all others wait for as many, and then come at once.
        return min(post_bytes, self._slice) if self._rate else post_bytes

    def free_at(self, now_s: float) -> float:
        """Return from when the next part may be sent: `now_s`, or later while in debt."""
        if not self._rate:
            return now_s
        self._fill(now_s)
        return now_s if self._left >= 0 else now_s - self._left / self._rate

    def spend(self, num_bytes: int, now_s: float) -> None:
        """Take a part that is sent off the bucket."""
        if self._rate:
            self._fill(now_s)
            self._left -= num_bytes

    def _fill(self, now_s: float) -> None:
        self._left = min(self._slice, self._left + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
