"""A peer as one NIXL agent knows it, and a post to it. Owned by the transport thread."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from prefixkv.protocol.ids import PeerId
from prefixkv.transport.jobs import ActiveJob
from prefixkv.transport.loop import LoopPeer
from prefixkv.transport.nixl.agent import FORGOTTEN, NixlAgent
from prefixkv.transport.parts import Part
from prefixkv.transport.routes import PeerMemory, Routes


def nixl_name(peer: PeerId) -> str:
    """Return the agent's name, with the incarnation: a restarted peer has another."""
    return f"{peer.name}#{peer.incarnation}"


class NixlPeer(LoopPeer):
    """A peer with its descriptor lists, (ours, theirs) by `WriteJob.route`."""

    def __init__(self, peer: PeerId, metadata: bytes, memory: PeerMemory) -> None:
        super().__init__(peer, metadata, memory)
        self.loaded = False  # NIXL has its metadata
        self.lists: dict[str, tuple[Any, Any]] = {}
        self.in_flight = 0  # posts of the present agent under way

    def load(self, agent: NixlAgent, routes: Routes) -> None:
        """Load the peer and prepare its lists. Raises HandshakeError, or what NIXL raises; `unload`
        undoes what was done by then."""
        name = nixl_name(self.peer)
        agent.load(name, self.metadata)
        self.loaded = True
        for route, runs in routes.by_name().items():
            self.lists[route] = agent.prepare(name, runs, self.memory.layout)
        # Last: `routes` says that all lists are there.
        self.routes = routes

    def unload(self, agent: NixlAgent) -> None:
        """Undo `load`, or as much of it as was done."""
        self.routes = None
        # Popped one by one, so that a list that cannot be released is not tried a second time. The
        # lists go before the agent forgets the peer that they refer to.
        while self.lists:
            _, pair = self.lists.popitem()
            for prepared in pair:
                prepared.release()
        if self.loaded:
            self.loaded = False
            with contextlib.suppress(FORGOTTEN):  # NIXL forgot it by itself
                agent.api.remove_remote_agent(nixl_name(self.peer))

    def detach_agent(self) -> list[Any]:
        """Forget what the peer has of an agent that is destroyed elsewhere; return its lists, which
        posts under way may still need."""
        lists = [prepared for pair in self.lists.values() for prepared in pair]
        self.lists.clear()
        self.routes, self.loaded, self.in_flight, self.retry_at = None, False, 0, 0.0
        return lists


@dataclass(slots=True, eq=False)
class Post:
    """A part under way, and the agent that posted it."""

    agent: NixlAgent
    handle: Any
    peer: NixlPeer
    job: ActiveJob
    part: Part
