"""64-bit hashes in numpy, vectorised: of single numbers, and of every prefix of a token sequence.

The prefix hash is a polynomial, so a whole prompt takes one cumulative sum and one more token one
multiplication. uint64 arithmetic wraps around on purpose.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

VOCABULARY: Final = 128_000  # token ids that `sample` returns are below it

_FACTOR: Final = 0xD1342543DE82EF95  # odd, so it has an inverse
_INVERSE: Final = pow(_FACTOR, -1, 2**64)
_START: Final = 0x243F6A8885A308D3


def splitmix64(values: Hashes) -> Hashes:
    """Mix hashes by a bijection: each output bit depends on all input bits. Returns a new array."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class PrefixHasher:
    """`hashes[i]` depends on tokens 0 to i and on nothing else. Keeps a table of powers."""

    def __init__(self) -> None:
        self._powers = np.ones(1, dtype=np.uint64)  # _FACTOR ** i
        self._inverses = np.ones(1, dtype=np.uint64)

    def prefixes(self, tokens: npt.NDArray[np.int32], before: int = _START) -> Hashes:
        """Return the hash of the prefix up to each token: uint64, same length. O(n). `before`: the
        hash of what comes before them.

        >>> hasher = PrefixHasher()
        >>> long = hasher.prefixes(np.array([5, 6, 7], dtype=np.int32))
        >>> bool(np.array_equal(long[1:], extend(long[:2], np.array([6, 7], dtype=np.int32))))
        True
        >>> bool(np.array_equal(long[1:], hasher.prefixes(np.array([6, 7]), int(long[0]))))
        True
        """
        n = len(tokens)
        if n >= len(self._powers):
            self._powers = _powers(_FACTOR, 2 * n + 1)
            self._inverses = _powers(_INVERSE, 2 * n + 1)
        # h[i] = sum of (token[j] + 1) * F**(i - j), plus `before`: with the inverse powers of F
        # taken inside the sum it is one cumulative sum, times F**(i + 1). The + 1 keeps token 0
        # from vanishing.
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * self._inverses[1 : n + 1]
        terms[:1] += np.uint64(before)
        return self._powers[1 : n + 1] * np.cumsum(terms, dtype=np.uint64)


def extend(hashes: Hashes, tokens: npt.NDArray[np.int32]) -> Hashes:
    """Return the hashes of prefixes that are each one token of `tokens` longer."""
    return hashes * np.uint64(_FACTOR) + tokens.astype(np.uint64) + np.uint64(1)


def sample(hashes: Hashes) -> npt.NDArray[np.int32]:
    """Return the token that follows each prefix, int32 in [0, VOCABULARY)."""
    return (splitmix64(~hashes) % np.uint64(VOCABULARY)).astype(np.int32)


def _powers(base: int, count: int) -> Hashes:
    """Return `base` to the powers 0 to `count` - 1, modulo 2**64."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)
