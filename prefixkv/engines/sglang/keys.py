"""SGLang's token ids, packed as keys of prefixkv's tree.

SGLang has a request's tokens in an `array('q')` that grows. They are packed once; added tokens are
packed when the key is asked for. With EAGLE, SGLang keys its tree by pairs of neighbouring tokens:
a pair is two words here, so a page of the tree has twice as many words as a page has tokens.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Hashable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixkv.spi import TOKEN_LIMIT, RadixKey, TokenError, shortened

FEW = 32
"""Limit up to which tokens are packed one by one: for few tokens the set-up of an array costs
more."""

_LE_INT32 = np.dtype("<i4")


def namespace_of(extra_key: str | None, cache_salt: str | None) -> Hashable:
    """Return the namespace of a request's key, by SGLang's extra key and salt.

    It keeps apart requests with equal tokens; None: the common one.

    A long text is replaced by its digest, which then stands in cache events as well.

    >>> namespace_of("lora", "")
    ('lora', None)
    """
    salt = shortened(cache_salt) if cache_salt else None
    named = None if extra_key is None else shortened(extra_key)
    return None if named is None and salt is None else (named, salt)


class Packer:
    """A converter from SGLang's tokens to keys, for one thread.

    It keeps its work memory: a new allocation per call costs more than the packing itself.

    Args:
        bigram: True where the tree is keyed by pairs.
    """

    def __init__(self, bigram: bool) -> None:
        self.bigram = bigram
        self._words = np.empty(0, _LE_INT32)
        self._differs = np.empty(0, np.bool_)

    def pack(self, token_ids: Any, num_tokens: int, namespace: Hashable) -> RadixKey:
        """Pack the first `num_tokens` of SGLang's tokens into a key of the tree.

        Raises:
            TokenError: one that is not in [0, 2**31).
        """
        return RadixKey.of_packed(self.words(token_ids, 0, num_tokens), namespace)

    def words(self, token_ids: Any, start: int, end: int) -> bytes:
        """Pack SGLang's tokens `start` to `end` as they stand in a key: little-endian int32.

        Raises:
            TokenError: one that is not in [0, 2**31).
        """
        if end - start <= FEW:
            return self._few(token_ids[start:end])
        # One pass checks the range: a negative number or one of 32 bits sets a bit of the
        # disjunction that no valid token has.
        ids = ids_of(token_ids)[start:end]
        if not 0 <= int(np.bitwise_or.reduce(ids)) < TOKEN_LIMIT:
            bad = ids[(ids < 0) | (ids >= TOKEN_LIMIT)][0]
            raise TokenError(f"token {bad} is not in [0, {TOKEN_LIMIT})")
        # Packed into kept memory; `tobytes` copies it, so the next call may overwrite it.
        num_words = 2 * max(len(ids) - 1, 0) if self.bigram else len(ids)
        if num_words > len(self._words):
            self._words = np.empty(2 * num_words, _LE_INT32)
        words = self._words[:num_words]
        if not self.bigram:
            words[:] = ids
        elif num_words:
            words[::2] = ids[:-1]
            words[1::2] = ids[1:]
        return words.tobytes()

    def _few(self, ids: Any) -> bytes:
        """Pack few of SGLang's tokens as words of a key, such as those since the last look."""
        for token in ids:
            if not 0 <= token < TOKEN_LIMIT:
                raise TokenError(f"token {token} is not in [0, {TOKEN_LIMIT})")
        words = [word for pair in pairwise(ids) for word in pair] if self.bigram else ids
        return struct.pack(f"<{len(words)}i", *words)

    def equal(self, token_ids: Any, other: Any, num_tokens: int) -> bool:
        """Return whether the first `num_tokens` of two arrays of SGLang's tokens are equal."""
        if min(len(token_ids), len(other)) < num_tokens:
            return False
        if num_tokens > len(self._differs):
            self._differs = np.empty(2 * num_tokens, np.bool_)
        differs = self._differs[:num_tokens]
        np.not_equal(ids_of(token_ids)[:num_tokens], ids_of(other)[:num_tokens], out=differs)
        return not differs.any()


def ids_of(token_ids: Any) -> npt.NDArray[Any]:
    """Return SGLang's token ids, to be packed into a key, as an integer array.

    An `array('q')` of SGLang's is not copied.

    The result must not be kept: while it exists, the `array('q')` cannot grow.
    """
    if isinstance(token_ids, array):
        return np.frombuffer(token_ids, np.int64) if len(token_ids) else np.empty(0, np.int64)
    return np.asarray(token_ids, np.int64)


class RequestKey:
    """The key of one request, which grows with the request.

    Args:
        namespace: the result of `namespace_of`.
        packer: the tree's packer.
    """

    __slots__ = ("_ids", "_key", "_num_tokens", "_packer", "namespace", "seen")

    def __init__(self, namespace: Hashable, packer: Packer) -> None:
        self.namespace = namespace
        self.seen = False  # True once this request has been counted as a visit of the tree
        self._packer = packer
        self._ids: Any = ()  # SGLang's array; its first `_num_tokens` are packed in `_key`
        self._key = RadixKey.of_packed(b"", namespace)
        self._num_tokens = 0

    def cover(self, token_ids: Any, num_tokens: int) -> RadixKey:
        """Return the key of an SGLang request's first tokens; do not change it.

        O(tokens not packed before).

        Args:
            token_ids: an array that only ever grows, as SGLang's do. All tokens are compared where
                it is another object than at the last call.
            num_tokens: limit of tokens; fewer where there are fewer.
        Raises:
            TokenError: one that is not in [0, 2**31). Nothing has changed then.
        """
        packer, bigram = self._packer, self._packer.bigram
        num_tokens = min(num_tokens, len(token_ids))
        # 1. Another array than before. With the same tokens the packed key is still right.
        if token_ids is not self._ids:
            if not self._num_tokens or not packer.equal(token_ids, self._ids, self._num_tokens):
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
            words = 2 * max(num_tokens - 1, 0) if bigram else num_tokens
            return self._key.prefix(words)
        return self._key
