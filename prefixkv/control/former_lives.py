"""Which lives of peers are over, and what a Hello has to prove.

Lives are random numbers without an order. Under one name the later accepted handshake wins, and
frames of the life before are refused. A handshake has to repeat a `nonce` that was made after the
life before was known, so a late frame of a dead process cannot replace a live one.

`PER_NAME` lives of each of `MAX_NAMES` names are kept, the last heard of longest. A forgotten life
comes back only by a handshake, so only if it lives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Final

from prefixkv.control.peer_changes import PeerChanges
from prefixkv.errors import FormerLifeError
from prefixkv.protocol.ids import PeerId

PER_NAME = 64
MAX_NAMES = 4096
LEFT: Final = "has left"
_NONE: Final[Mapping[int, str]] = MappingProxyType({})


class IncarnationHistory:
    """Lives that are over, by name. Owned by a control object; any thread may call `how`."""

    def __init__(self, news: PeerChanges | None = None) -> None:
        self.news = news or PeerChanges()
        # By name, then by life: how it ended. In both the one heard of longest ago comes first.
        self._over: OrderedDict[str, OrderedDict[int, str]] = OrderedDict()
        # By name: the life that was forgotten for its silence. It is not over.
        self._silent: OrderedDict[str, PeerId] = OrderedDict()

    def end(self, life: PeerId, how: str) -> None:
        """Record that a life is over; `how` completes a sentence about it: "was fenced", `LEFT`."""
        lives = self._over.setdefault(life.name, OrderedDict())
        # The first end stands: a later word must not turn "was fenced" into something weaker.
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
        return name in self._over

    def check(self, life: PeerId) -> None:
        """Raise FormerLifeError if this life is over."""
        if how := self.how(life):
            # It still speaks, so keep it among those remembered longest.
            self._heard(life)
            raise FormerLifeError(f"{life} {how}", life)

    def how(self, life: PeerId) -> str:
        """Return how a life ended, "" if it is not over. Any thread may ask."""
        return self._over.get(life.name, _NONE).get(life.incarnation, "")

    def _heard(self, life: PeerId) -> None:
        self._over.move_to_end(life.name)
        self._over[life.name].move_to_end(life.incarnation)

    # --- lives that were forgotten for their silence ----------------------------------------------

    def silent(self, life: PeerId) -> None:
        """Remember a life, forgotten for its silence: it may come back if no other does."""
        self._silent[life.name] = life
        self._silent.move_to_end(life.name)
        if len(self._silent) > MAX_NAMES:
            self._silent.popitem(last=False)

    def begin(self, life: PeerId) -> None:
        """Record that a life was accepted; a silent one that it replaces is over now."""
        before = self._silent.pop(life.name, life)
        if before != life:
            self.supersede(before, life)

    def last_silent(self, name: str) -> PeerId | None:
        """Return the last life of this name that was forgotten for its silence, if any."""
        return self._silent.get(name)


def nonce(me: PeerId, them: PeerId, known: PeerId | None) -> int:
    """Return the number that a Hello of `them` has to repeat to make `known` a former life.

    Derived from the three lives, so nothing is stored for strangers. It changes with `known`, so an
    answer from before the present life came is of no use. Never 0, which says "none".
    """
    words = f"{me.incarnation} {them.incarnation} {known.incarnation if known else None}"
    return int.from_bytes(blake2b(words.encode(), digest_size=8).digest()) or 1
