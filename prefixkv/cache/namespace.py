"""A namespace that says what it is made of, for those who have to tell others."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from hashlib import blake2b
from typing import Final, NamedTuple

from prefixkv.errors import RequestError

MAX_NAMESPACE_BYTES: Final = 64 << 10
"""Of all texts in one: it is kept for as long as KV of it is."""

_SHORT_CHARS: Final = 256


def shortened(text: str) -> str:
    """A text that a client has chosen, as it is kept: itself, or what stands for a long one. Equal
    in every process for equal texts, and for no others.

    >>> shortened("tenant"), len(shortened("x" * 8_000_000))
    ('tenant', 72)
    """
    if len(text) <= _SHORT_CHARS:
        return text
    return "blake2b:" + blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def check_size(namespace: Hashable) -> None:
    """Raises RequestError for a namespace with more than `MAX_NAMESPACE_BYTES` of texts, or bytes,
    in it."""
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


class Image(NamedTuple):
    """An image, or another input that is not text: a name that no other has, and which tokens of
    the prompt stand for it."""

    identifier: str
    start: int
    length: int


class _Fields(NamedTuple):
    lora: str | None
    salt: str | None
    images: tuple[Image, ...]


class Namespace(_Fields):
    """What keeps requests apart that have equal tokens. A tuple, and a namespace like any other;
    but cache events can tell of it in the words of other engines (`prefixkv.kv_events`).

    Args:
        lora: name of the adapter.
        salt: of a tenant, say.
        images: (identifier, first token, tokens) of each.
    Raises:
        RequestError: none of them (that is None, the common namespace), or one of a wrong type.

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
            if text is not None and (type(text) is not str or not text):
                raise RequestError(f"{name} is {text!r}, a string that is not empty is needed")
        listed = tuple(Image(*image) for image in images)
        for image in listed:
            if (
                type(image.identifier) is not str
                or not image.identifier
                or type(image.start) is not int
                or type(image.length) is not int
                or image.start < 0
                or image.length < 1
            ):
                raise RequestError(f"{image} is no name, first token and number of tokens")
        if lora is None and salt is None and not listed:
            raise RequestError("a namespace of nothing is the common one: None")
        return super().__new__(cls, lora, salt, listed)
