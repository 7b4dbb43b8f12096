"""Which lives of peers are over, and what a Hello has to prove.

Lives are random numbers, so none is newer than another by itself. Under one name the later accepted
handshake wins, and the life before it is over: its words are refused, by name. A handshake is
accepted only if it answers what was said after the life before was known, so a late frame of a
process that is gone takes no place of a live one.

What is kept is bounded: `PER_NAME` lives of each of `MAX_NAMES` names. What was heard of last is
kept longest. A life that was forgotten may come back only if it lives, by a handshake; then the one
before is over, and hears so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Final

from prefixkv.control.peer_changes import News
from prefixkv.errors import FormerLifeError
from prefixkv.protocol.ids import PeerId

PER_NAME = 64
MAX_NAMES = 4096
LEFT: Final = "has left"
_NONE: Final[Mapping[int, str]] = MappingProxyType({})


class Lives:
    """Owned by a control object, which takes its news; but any thread may ask `how`."""

    def __init__(self, news: News | None = None) -> None:
        self.news = news or News()
        # By name, and by life: how it ended. The oldest first.
        self._over: OrderedDict[str, OrderedDict[int, str]] = OrderedDict()
        self._silent: OrderedDict[str, PeerId] = OrderedDict()

    def end(self, life: PeerId, how: str) -> None:
        """It is over; `how` goes on after its name: "was fenced", `LEFT`."""
        lives = self._over.setdefault(life.name, OrderedDict())
        if life.incarnation not in lives:
            lives[life.incarnation] = how
            self.news.say("left" if how == LEFT else "over", life, how)
        self.news.forget(life)
        self._heard(life)
        if len(lives) > PER_NAME:
            lives.popitem(last=False)
        if len(self._over) > MAX_NAMES:
            self._over.popitem(last=False)

    def supersede(self, life: PeerId, by: PeerId) -> None:
        self.end(life, f"was superseded by life {by.incarnation:x}")

    def has_former(self, name: str) -> bool:
        """Whether a life of this name is over."""
        return name in self._over

    def check(self, life: PeerId) -> None:
        """Raises FormerLifeError where the life is over."""
        if how := self.how(life):
            self._heard(life)
            raise FormerLifeError(f"{life} {how}")

    def how(self, life: PeerId) -> str:
        """How it ended, "" if it has not."""
        return self._over.get(life.name, _NONE).get(life.incarnation, "")

    def _heard(self, life: PeerId) -> None:
        self._over.move_to_end(life.name)
        self._over[life.name].move_to_end(life.incarnation)

    # --- lives that were forgotten for their silence ----------------------------------------------

    def silent(self, life: PeerId) -> None:
        """It was silent for long and is known no more; it may come back unless another comes."""
        self._silent[life.name] = life
        self._silent.move_to_end(life.name)
        if len(self._silent) > MAX_NAMES:
            self._silent.popitem(last=False)

    def begin(self, life: PeerId) -> None:
        """It was accepted under its name."""
        before = self._silent.pop(life.name, life)
        if before != life:
            self.supersede(before, life)

    def last_silent(self, name: str) -> PeerId | None:
        return self._silent.get(name)


def nonce(me: PeerId, them: PeerId, known: PeerId | None) -> int:
    """What a Hello of `them` has to repeat to take the place of `known`. It differs for each three,
    so that nothing has to be kept."""
    words = f"{me.incarnation} {them.incarnation} {known.incarnation if known else None}"
    return int.from_bytes(blake2b(words.encode(), digest_size=8).digest()) or 1
