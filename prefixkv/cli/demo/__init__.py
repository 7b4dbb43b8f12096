"""`prefixkv demo`, and the networks that its KV travels on, parsed before anything is loaded."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from prefixkv.errors import ConfigError

_FORM: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([mg])bit(?:/s)?", re.IGNORECASE)
LEAST_BITS: Final = 10**8
"""Slowest link of the demo, bits a second: its turns then take half a minute in all."""


class LinkRate(NamedTuple):
    """A network that the KV travels on; a rate of 0: no limit."""

    name: str
    bytes_per_s: int


HERE: Final = LinkRate("this machine", 0)
LINKS: Final = ("1Gbit", "10Gbit")  # that the chats are played over beside this machine's own


def link_of(text: str) -> LinkRate:
    """Return the link of a text such as "10Gbit", in bits a second.

    >>> link_of("2.5Gbit")
    LinkRate(name='2.5 Gbit/s', bytes_per_s=312500000)

    Raises: ConfigError for another form, or a rate below `LEAST_BITS`.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--link: {text!r} is no rate: 1Gbit, 2.5Gbit or 500Mbit are")
    number, unit = float(match[1]), match[2].upper()
    bits = number * (10**9 if unit == "G" else 10**6)
    if not LEAST_BITS <= bits < 10**15:
        raise ConfigError(f"--link: {text!r} is not in [{LEAST_BITS // 10**6}Mbit, 1000000Gbit)")
    return LinkRate(f"{number:g} {unit}bit/s", int(bits / 8))
