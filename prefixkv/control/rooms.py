"""What a decode rank keeps of a room; and which of the prefill processes that are lost may still
write in which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prefixkv.control.decode.links import Link
from prefixkv.control.peer_changes import News
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.receiver_machine import ReceiverMachine
from prefixkv.protocol.refusal_machine import RefusalMachine

LostPeers = dict[PeerId, tuple[str, int]]
"""By life: what is wrong with it, and how much it still holds."""


@dataclass(slots=True, eq=False)
class Room:
    """`link` is the leader's; `links` and `peers` are of the ranks that the pages were promised."""

    machine: ReceiverMachine | RefusalMachine
    link: Link
    digest: bytes = b""  # of the prompt, where it is promised
    links: dict[int, Link] = field(default_factory=dict)
    peers: dict[int, PeerId] = field(default_factory=dict)

    def ranks_of(self, peer: PeerId, address: str | None = None) -> list[int]:
        """The ranks of the room that this process is; with `address`, those it was promised to
        there."""
        return [
            rank
            for rank, known in self.peers.items()
            if known == peer and address in (None, self.links[rank].address)
        ]

    @property
    def heard_s(self) -> float:
        """By when every rank that knows the room had been heard; -infinity where none does, or one
        answers no more."""
        times = [
            link.live.heard_s if link.peer == self.peers[rank] else -math.inf
            for rank, link in self.links.items()
        ]
        return min(times, default=-math.inf)

    def writers(self) -> Iterator[tuple[PeerId, Link]]:
        """What may still write its pages. Any thread may ask."""
        if isinstance(self.machine, ReceiverMachine):
            for rank in self.machine.undrained:
                if rank in self.peers:
                    yield self.peers[rank], self.links[rank]

    def tell_overdue(self, news: News) -> None:
        for peer, _ in self.writers():
            key, pages = self.machine.key, getattr(self.machine, "num_pages", 0)
            room = f"of room {key.room} generation {key.generation}"
            news.say("quarantined", peer, f"has not proved that {pages} pages {room} are free")


def lost_peers(rooms: Iterable[Room], wrong: Callable[[PeerId, Link], str]) -> LostPeers:
    """Of the writers with which something is `wrong`, how many pages each holds."""
    found: LostPeers = {}
    for room in rooms:
        for peer, link in room.writers():
            if what := wrong(peer, link):
                assert isinstance(room.machine, ReceiverMachine)
                pages = found[peer][1] if peer in found else 0
                found[peer] = what, pages + room.machine.num_pages
    return found


def merged(ranks: Iterable[LostPeers]) -> LostPeers:
    """Of all ranks of a decode worker, whose pages are the same ones: the most that each holds."""
    found: LostPeers = {}
    for lost in ranks:
        for peer, (what, pages) in lost.items():
            found[peer] = what, max(pages, found.get(peer, (what, 0))[1])
    return found
