"""Errors of the JSON parser in words for the author of a client.

msgspec names its own types ("Expected `int | null`, got `str`"), which the author of a client need
not know. Each of its sentences is said again in English.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

_TYPES: Final = {
    "str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false",
    "array": "a list", "object": "an object", "null": "null", "bytes": "a text",
}  # fmt: skip
_MANY: Final = {
    "str": "texts", "int": "whole numbers", "float": "numbers", "object": "objects",
    "array": "lists",
}  # fmt: skip
_UNIT: Final = {"str": "characters", "array": "items", "object": "fields"}
_BOUND: Final = {"<=": "{} at most", ">=": "{} at least", ">": "above {}", "<": "below {}"}
_OTHERWISE: Final = "has a value that is not taken"

_SENTENCES: Final[tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...]] = (
    (
        re.compile(r"Expected `([^`]+)`, got `([^`]+)`"),
        lambda m: f"has to be {_of_type(m[1])}, not {_of_type(m[2])}",
    ),
    (
        re.compile(r"Expected `(str|array|object)` of length (<=|>=) (\d+)"),
        lambda m: f"has to be {_of_type(m[1])}, {_BOUND[m[2]].format(f'{m[3]} {_UNIT[m[1]]}')}",
    ),
    (
        re.compile(r"Expected `(int|float)` (<=|>=|<|>) (\S+)"),
        lambda m: f"has to be {_of_type(m[1])}, {_BOUND[m[2]].format(m[3])}",
    ),
    (re.compile(r"Object missing required field `([^`]+)`"), lambda m: f"has no {m[1]}"),
    (
        re.compile(r"Object contains unknown field `(.+)`", re.DOTALL),
        lambda m: f"has a field {m[1][:100]} that is not known",
    ),
    (re.compile(r"(?:Integer value|Number) out of range"), lambda m: "is out of range"),
)


def plain_words(said: str) -> str:
    """Return what is wrong with a value, in English, from the text of a msgspec error without its
    place.

    >>> plain_words("Expected `str | array<int> | null`, got `int`")
    'has to be a text or a list of whole numbers, not a whole number'
    >>> plain_words("Expected `str` of length <= 1024")
    'has to be a text, 1024 characters at most'
    """
    for pattern, words in _SENTENCES:
        if found := pattern.fullmatch(said):
            return words(found)
    return _OTHERWISE


def _of_type(name: str) -> str:
    """Return a type of msgspec's in English; a union without its null, unless it is all there is.

    >>> _of_type("int | null"), _of_type("array<int>"), _of_type("object<str, any>")
    ('a whole number', 'a list of whole numbers', 'an object')
    """
    found: list[str] = []
    for one in name.split(" | "):
        kind, _, inner = one.rstrip(">").partition("<")
        words = _TYPES.get(kind, "another value")
        if kind == "array" and inner in _MANY:
            words = f"a list of {_MANY[inner]}"
        if words not in found and (one != "null" or name == "null"):
            found.append(words)
    return " or ".join(found)
