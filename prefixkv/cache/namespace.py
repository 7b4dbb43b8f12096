"""A namespace with named fields, for code that has to describe it to other engines."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from hashlib import blake2b
from typing import Final, NamedTuple

from prefixkv.errors import RequestError, shown, shown_secret, travels

MAX_NAMESPACE_BYTES: Final = 64 << 10
"""Limit for all texts of one namespace together: it is kept for as long as KV of it is."""

_SHORT_CHARS: Final = 256
_MOST_TOKENS: Final = 2**31


def shortened(text: str) -> str:
    """Return a client's text as a namespace keeps it: its digest if it is long, or UTF-8 cannot
    encode it.

    >>> shortened("tenant"), len(shortened("x" * 8_000_000))
    ('tenant', 72)
    """
    # Clients may send unpaired surrogates, which no event carries.
    if len(text) <= _SHORT_CHARS and travels(text):
        return text
    return "blake2b:" + blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def check_size(namespace: Hashable) -> None:
    """Raise RequestError for more than `MAX_NAMESPACE_BYTES` of texts or bytes."""
    if (size := _size(namespace)) > MAX_NAMESPACE_BYTES:
        raise RequestError(
            f"namespace has {size} characters, at most {MAX_NAMESPACE_BYTES} are taken: a digest "
            "does as well"
        )


def _size(namespace: object) -> int:
    if isinstance(namespace, str | bytes):
        return len(namespace)
    if isinstance(namespace, tuple):
        return len(namespace) + sum(map(_size, namespace))
    return (namespace.bit_length() // 8) if isinstance(namespace, int) else 0


def _is_name(text: object) -> bool:
    """Of the exact type: a subclass may compare and hash as it likes, and this is a lasting key."""
    return type(text) is str and bool(text) and travels(text)


class Image(NamedTuple):
    """An image, or other input beside text: its unique name, and the tokens that stand for it."""

    identifier: str
    start: int
    length: int


class _NamespaceFields(NamedTuple):
    lora: str | None
    salt: str | None
    images: tuple[Image, ...]


class Namespace(_NamespaceFields):
    """A namespace of named parts: adapter, salt and images.

    Requests with equal tokens but different namespaces share no KV. The tree treats it like any
    other hashable; cache events can express it in the formats of other engines
    (`prefixkv.kv_events`).

    Args:
        lora: name of the adapter.
        salt: any text that separates clients, such as a tenant's name. A secret: `repr` has a
            digest of it.
        images: (identifier, first token, number of tokens) of each.

    Raises RequestError: all three are missing (the common namespace is None), or one has a wrong
    type, or is nothing that an event carries.

    >>> Namespace(lora="legal")
    Namespace(lora='legal', salt=None, images=())
    """

    __slots__ = ()

    def __new__(
        cls,
        lora: str | None = None,
        salt: str | None = None,
        images: Iterable[tuple[str, int, int]] = (),
    ) -> Namespace:
        for name, text in (("lora", lora), ("salt", salt)):
            if text is not None and not _is_name(text):
                what = "a string that is not empty, and has bytes in UTF-8"
                given = shown(text) if name == "lora" or not text else f"a {type(text).__name__}"
                raise RequestError(f"{name} is {given}, {what}, is needed")
        if not isinstance(images, Iterable) or isinstance(images, str | bytes):
            raise RequestError(f"images is {shown(images)}, a list of images is needed")
        named = list(images)
        if not all(isinstance(image, tuple | list) and len(image) == 3 for image in named):
            raise RequestError(f"images is {shown(named)}: each is a name, first token and length")
        listed = tuple(Image(*image) for image in named)
        for image in listed:
            if (
                not _is_name(image.identifier)
                or type(image.start) is not int
                or type(image.length) is not int
                or not 0 <= image.start < _MOST_TOKENS
                or not 1 <= image.length < _MOST_TOKENS
            ):
                raise RequestError(f"{shown(image)} is no name, first token and number of tokens")
        # Else there would be two names for the common namespace, and requests in one would miss KV
        # of the other.
        if lora is None and salt is None and not listed:
            raise RequestError("a namespace of nothing is the common one: None")
        return super().__new__(cls, lora, salt, listed)

    def __repr__(self) -> str:
        salt = None if self.salt is None else shown_secret(self.salt)
        return f"Namespace(lora={self.lora!r}, salt={salt!r}, images={self.images!r})"
