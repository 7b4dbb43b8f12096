"""Changes of peers, in sentences for the log. A control object records, its thread writes."""

from __future__ import annotations

from collections import deque

import msgspec

from prefixkv.protocol.ids import PeerId

KEPT = 1000


class PeerChange(msgspec.Struct, frozen=True):
    """One change of a peer.

    `kind` is "met", "refused", "silent", "heard", "over" (replaced or fenced), "left" (it was
    closed), "lost" (nothing answers), "forgotten", "quarantined" or "shut out" (by its keys).
    `peer` is an address, or a key, where it is not known which process has it.
    """

    kind: str
    peer: PeerId | str
    why: str = ""


class PeerChanges:
    """Changes that are not written yet, at most `KEPT`: the oldest is dropped. Of a control
    object."""

    def __init__(self) -> None:
        # Bounded, since peers cause the entries and nothing may take them for a while.
        self._kept: deque[PeerChange] = deque(maxlen=KEPT)
        # Peers last reported as silent, so that only a change is reported.
        self._silent: set[PeerId] = set()

    def say(self, kind: str, peer: PeerId | str, why: str = "") -> None:
        self._kept.append(PeerChange(kind, peer, why))

    def silent(self, peer: PeerId, is_silent: bool) -> bool:
        """Record a change to silent, or to heard again; return whether it is one. May be called on
        every look."""
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
        """Drop whether this peer, known no more, was silent."""
        self._silent.discard(peer)

    def take(self) -> list[PeerChange]:
        """Return and remove all changes, in order."""
        taken = []
        # One by one, so that an entry added meanwhile by another thread is neither lost nor
        # doubled.
        while self._kept:
            taken.append(self._kept.popleft())
        return taken
