"""What becomes of peers, in words, for the log: a control object says it, its thread writes it."""

from __future__ import annotations

from collections import deque

import msgspec

from prefixkv.protocol.ids import PeerId

KEPT = 1000


class PeerNews(msgspec.Struct, frozen=True):
    """`kind` is "met", "refused", "silent", "heard", "over" (replaced or fenced), "left" (it was
    closed), "lost" (nothing answers), "forgotten" or "quarantined". `peer` is an address where it
    is not known what answers there."""

    kind: str
    peer: PeerId | str
    why: str = ""


class News:
    """Owned by a control object. What is not taken is bounded: the oldest goes first."""

    def __init__(self) -> None:
        self._kept: deque[PeerNews] = deque(maxlen=KEPT)
        self._silent: set[PeerId] = set()

    def say(self, kind: str, peer: PeerId | str, why: str = "") -> None:
        self._kept.append(PeerNews(kind, peer, why))

    def silent(self, peer: PeerId, is_silent: bool) -> bool:
        """To be said as often as one likes: a change is news, and True."""
        if is_silent is (peer in self._silent):
            return False
        if is_silent:
            self._silent.add(peer)
            self.say("silent", peer, "is suspect: it gets no new rooms")
        else:
            self._silent.discard(peer)
            self.say("heard", peer, "is heard again")
        return True

    def forget(self, peer: PeerId) -> None:
        """Nothing is known of it any more."""
        self._silent.discard(peer)

    def take(self) -> list[PeerNews]:
        """All that was said since the last call, in order."""
        taken = []
        while self._kept:
            taken.append(self._kept.popleft())
        return taken
