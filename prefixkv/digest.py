"""Digests by which two workers know that they mean the same prompt.

The digest is a cryptographic hash, since clients choose prompts, and an offer's nonce is part of
what is hashed: no other prompt may have it, and nothing may be learnt from it. It is a stream: a
`PathHash` of a prompt's beginning goes on to the digest of any prompt that begins so.
"""

from __future__ import annotations

from collections.abc import Hashable
from hashlib import blake2b
from typing import TypeAlias

from prefixkv.cache.radix_key import RadixKey, TokensLike
from prefixkv.errors import RequestError, shown

DIGEST_BYTES = 32
MIN_DIGEST_BYTES, MAX_DIGEST_BYTES = 16, 64
"""Bounds for a digest that an engine makes itself."""

PathHash: TypeAlias = blake2b
"""A hash of a namespace and the tokens of a path so far. One that is shared is copied before it is
updated."""


def prompt_digest(tokens: TokensLike, namespace: Hashable = None) -> bytes:
    """Return a digest of 32 bytes that names a prompt. O(tokens).

    It is the same in every process for equal tokens and namespaces, and for no others. `tokens`: as
    of `RadixKey`; a key's own namespace counts if none is given. `namespace`: None, an int, a str,
    bytes, or a tuple of these. Raises TokenError: tokens that are not integers in [0, 2**31).
    RequestError: another namespace: its bytes are not the same in every process.
    """
    key = tokens if type(tokens) is RadixKey and namespace is None else RadixKey(tokens, namespace)
    path_hash = begin_hash(key.namespace)
    path_hash.update(key.data)
    return path_hash.digest()


def begin_hash(namespace: Hashable) -> PathHash:
    """Return the path hash of no tokens in a namespace. Raises as `prompt_digest` does."""
    if namespace is None:
        return _COMMON.copy()
    try:
        named = _canonical(namespace)
    # Tuples in tuples without end, or a number of more digits than Python prints.
    except (RecursionError, ValueError) as error:
        raise RequestError(f"namespace is a {type(namespace).__name__}: {error}") from None
    return _begin(named)


def _begin(named: bytes) -> PathHash:
    # The length first: else a longer namespace with fewer tokens could give the same bytes.
    return blake2b(len(named).to_bytes(8, "little") + named, digest_size=DIGEST_BYTES)


def check_digest(digest: bytes) -> bytes:
    """Return a prompt's digest as bytes. Raises RequestError unless it is 16 to 64 bytes."""
    if not isinstance(digest, bytes | bytearray | memoryview):
        raise RequestError(f"digest is {shown(digest)}, bytes are needed: `prefixkv.prompt_digest`")
    if not MIN_DIGEST_BYTES <= len(raw := bytes(digest)) <= MAX_DIGEST_BYTES:
        bounds = f"{MIN_DIGEST_BYTES} to {MAX_DIGEST_BYTES}"
        raise RequestError(f"digest has {len(raw)} bytes, {bounds} are needed")
    return raw


def _canonical(namespace: Hashable) -> bytes:
    """Return the same bytes for equal namespaces, others for different ones: type, size, value."""
    match namespace:
        case None:
            letter, value = b"n", b""
        # A bool too: True equals 1, so it has to be the same namespace.
        case int():
            letter, value = b"i", b"%d" % namespace
        case str():
            letter, value = b"s", namespace.encode("utf-8", "surrogatepass")
        case bytes():
            letter, value = b"b", namespace
        case tuple():
            # Its parts as Python hashes them, which a subclass may not iterate over.
            letter, value = b"t", b"".join(map(_canonical, tuple.__iter__(namespace)))
        case _:
            raise RequestError(
                f"namespace is {shown(namespace)}; None, an int, a str, bytes or a tuple of these "
                "means the same in every process"
            )
    # The size makes a tuple's items distinct: ("ab", "c") is not ("a", "bc").
    return letter + len(value).to_bytes(8, "little") + value


_COMMON = _begin(_canonical(None))  # of the namespace that most requests have
