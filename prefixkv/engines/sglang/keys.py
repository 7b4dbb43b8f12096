"""SGLang's token ids, packed as keys of prefixkv's tree.

A request's tokens are in an `array('q')` that grows. A key has them as they lie there, eight bytes
each: packing converts nothing and has nothing to check. Added tokens are packed when the key is
asked for. With EAGLE, the tree is keyed by pairs of neighbouring tokens, of four bytes each. So a
token, or a pair, is two words of the tree's keys.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Hashable
from itertools import pairwise
from typing import Any

import numpy as np

from prefixkv.errors import TokenError
from prefixkv.spi import TOKEN_LIMIT, RadixKey, shortened

TOKEN_WORDS = 2
"""Words of a key per token, or per pair of tokens."""

FEW = 32
"""Limit up to which pairs are packed one by one: for few the set-up of an array costs more."""

_LE_INT32 = np.dtype("<i4")


def namespace_of(extra_key: str | None, cache_salt: str | None) -> Hashable:
    """Return the namespace of a request's key, which keeps apart requests with equal tokens; None:
    the common one. A long text is replaced by its digest, which cache events have then as well.

    >>> namespace_of("lora", "")
    ('lora', None)
    """
    salt = shortened(cache_salt) if cache_salt else None
    named = None if extra_key is None else shortened(extra_key)
    return None if named is None and salt is None else (named, salt)


class Packer:
    """A converter from tokens to keys, for one thread. It keeps its work memory: a new allocation
    per call costs more than the packing itself."""

    def __init__(self, bigram: bool) -> None:
        self.bigram = bigram
        self._words = np.empty(0, _LE_INT32)

    def pack(self, token_ids: Any, num_tokens: int, namespace: Hashable) -> RadixKey:
        """Raises TokenError: see `words`."""
        return RadixKey.of_packed(self.words(token_ids, 0, num_tokens), namespace)

    def words(self, token_ids: Any, start: int, end: int) -> bytes:
        """Pack tokens as they stand in a key: int64, or pairs of int32. Raises TokenError if pairs
        are wanted, and a token is not in [0, 2**31)."""
        if not self.bigram:
            return as_buffer(token_ids)[start:end].tobytes()
        if end - start <= FEW:
            return _few_pairs(token_ids[start:end])
        # One pass checks the range: a negative number or one of 32 bits sets a bit of the
        # disjunction that no valid token has.
        ids = np.frombuffer(as_buffer(token_ids), np.int64)[start:end]
        if not 0 <= int(np.bitwise_or.reduce(ids)) < TOKEN_LIMIT:
            bad = ids[(ids < 0) | (ids >= TOKEN_LIMIT)][0]
            raise TokenError(f"token {bad} is not in [0, {TOKEN_LIMIT})")
        # Packed into kept memory; `tobytes` copies it, so the next call may overwrite it.
        num_words = 2 * (len(ids) - 1)
        if num_words > len(self._words):
            self._words = np.empty(2 * num_words, _LE_INT32)
        words = self._words[:num_words]
        words[::2] = ids[:-1]
        words[1::2] = ids[1:]
        return words.tobytes()

    def begins(self, token_ids: Any, num_tokens: int, packed: bytes) -> bool:
        """Return whether the first `num_tokens` tokens are those packed before."""
        if len(token_ids) < num_tokens:
            return False
        if not self.bigram:
            return packed.startswith(as_buffer(token_ids)[:num_tokens])
        return self.words(token_ids, 0, num_tokens) == packed


def as_buffer(token_ids: Any) -> memoryview:
    """Return token ids as int64; an `array('q')` is not copied. It cannot grow while the result
    exists, so that must not be kept."""
    if isinstance(token_ids, array):
        return memoryview(token_ids)
    return np.ascontiguousarray(token_ids, np.int64).data


def _few_pairs(ids: Any) -> bytes:
    for token in ids:
        if not 0 <= token < TOKEN_LIMIT:
            raise TokenError(f"token {token} is not in [0, {TOKEN_LIMIT})")
    words = [word for pair in pairwise(ids) for word in pair]
    return struct.pack(f"<{len(words)}i", *words)


class RequestKey:
    """The key of one request, which grows with the request. `namespace` is of `namespace_of`."""

    __slots__ = ("_ids", "_key", "_num_tokens", "_packer", "namespace", "seen")

    def __init__(self, namespace: Hashable, packer: Packer) -> None:
        self.namespace = namespace
        self.seen = False  # True once this request has been counted as a visit of the tree
        self._packer = packer
        self._ids: Any = ()  # SGLang's array; its first `_num_tokens` are packed in `_key`
        self._key = RadixKey.of_packed(b"", namespace)
        self._num_tokens = 0

    def cover(self, token_ids: Any, num_tokens: int) -> RadixKey:
        """Return the key of the first `num_tokens` tokens, or of all; do not change it.

        `token_ids` only ever grows; all tokens are compared where it is another object than before.
        O(tokens not packed before). Raises TokenError, with nothing changed: see `Packer.words`.
        """
        packer, bigram = self._packer, self._packer.bigram
        num_tokens = min(num_tokens, len(token_ids))
        # 1. Another array than before. With the same tokens the packed key is still right.
        if token_ids is not self._ids:
            known = self._num_tokens
            if not known or not packer.begins(token_ids, known, self._key.data):
                self._key = packer.pack(token_ids, num_tokens, self.namespace)
                self._num_tokens = num_tokens
            self._ids = token_ids
        # 2. More tokens than before: extend. 3. Fewer: cut a copy, and keep the longer key.
        if num_tokens > self._num_tokens:
            # The last pair of before ended with the token that the next begins with.
            start = max(self._num_tokens - bigram, 0)
            self._key.extend_packed(packer.words(token_ids, start, num_tokens))
            self._num_tokens = num_tokens
        elif num_tokens < self._num_tokens:
            return self._key.prefix(TOKEN_WORDS * max(num_tokens - bigram, 0))
        return self._key
