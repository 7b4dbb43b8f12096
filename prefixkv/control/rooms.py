"""State of a room on a decode rank; which lost prefill processes may still write its pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prefixkv.control.links import Link
from prefixkv.control.news import News
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.receiver_machine import ReceiverMachine
from prefixkv.protocol.refusal_machine import RefusalMachine

LostPeers = dict[PeerId, tuple[str, int]]
"""By life: what is wrong with it, and how many pages (on decode) or rooms (on prefill) it holds."""


@dataclass(slots=True, eq=False)
class Room:
    """One room of a decode rank.

    `link` leads to the leader of the prefill worker. `links` and `peers` are by rank, of those that
    the pages were promised to: `peers` are the processes at the time of the promise, and stay so
    when another process answers on the link.
    """

    machine: ReceiverMachine | RefusalMachine
    link: Link
    digest: bytes = b""  # of the prompt, where it is promised
    links: dict[int, Link] = field(default_factory=dict)
    peers: dict[int, PeerId] = field(default_factory=dict)

    def ranks_of(self, peer: PeerId, address: str | None = None) -> list[int]:
        """Return the ranks of the room that this process is; with `address`, only those promised to
        it there."""
        return [
            rank
            for rank, known in self.peers.items()
            if known == peer and address in (None, self.links[rank].address)
        ]

    @property
    def heard_s(self) -> float:
        """The time by which every rank of the room had been heard.

        -infinity if it was promised to none yet, or if another process answers on one's link.
        """
        times = [
            link.live.heard_s if link.peer == self.peers[rank] else -math.inf
            for rank, link in self.links.items()
        ]
        return min(times, default=-math.inf)

    def writers(self) -> Iterator[tuple[PeerId, Link]]:
        """Yield the processes that may still write the room's pages, each with its link. Any thread
        may ask."""
        if isinstance(self.machine, ReceiverMachine):
            for rank in self.machine.undrained:
                if rank in self.peers:
                    yield self.peers[rank], self.links[rank]

    def tell_overdue(self, news: News) -> None:
        """Report each process that has not proved in time that it no longer writes the room's
        pages."""
        for peer, _ in self.writers():
            key, pages = self.machine.key, getattr(self.machine, "num_pages", 0)
            room = f"of room {key.room} generation {key.generation}"
            news.say("quarantined", peer, f"has not proved that {pages} pages {room} are free")


def lost_peers(rooms: Iterable[Room], wrong: Callable[[PeerId, Link], str]) -> LostPeers:
    """Return, for each writer with which something is `wrong`, the reason and the pages it
    holds."""
    found: LostPeers = {}
    for room in rooms:
        for peer, link in room.writers():
            if what := wrong(peer, link):
                assert isinstance(room.machine, ReceiverMachine)
                pages = found[peer][1] if peer in found else 0
                found[peer] = what, pages + room.machine.num_pages
    return found


def merged(ranks: Iterable[LostPeers]) -> LostPeers:
    """Merge the lost peers of all ranks of a decode worker.

    Pages are the maximum over the ranks and not the sum: all ranks hold the same page ids.
    """
    found: LostPeers = {}
    for lost in ranks:
        for peer, (what, pages) in lost.items():
            found[peer] = what, max(pages, found.get(peer, (what, 0))[1])
    return found
