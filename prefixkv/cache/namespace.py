"""A namespace that says what it is made of, for those who have to tell others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from prefixkv.errors import RequestError


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
