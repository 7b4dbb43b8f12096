"""Decode ranks that passed the handshake, and whose metadata is on trial."""

from __future__ import annotations

from typing import NamedTuple

from prefixkv.control.effects import FrameReceived, PeerTried, TryPeer
from prefixkv.control.handshake import Accepted, ranges
from prefixkv.errors import ProtocolError
from prefixkv.protocol.messages import Frame, Hello


class OnTrial(NamedTuple):
    """A decode rank that passed the handshake, and its last Hello."""

    accepted: Accepted
    received: FrameReceived[bytes]
    frame: Frame
    hello: Hello


class Trials:
    """Owned by a `PrefillControl`. At most `limit` names."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._on_trial: dict[str, OnTrial] = {}

    def begin(self, arrived: OnTrial) -> list[TryPeer]:
        """The trial to be made: none where one of this life goes on, its Hello being said again.

        Raises ProtocolError where the limit is reached.
        """
        frame, hello = arrived.frame, arrived.hello
        former = self._on_trial.get(frame.name)
        if former is None and len(self._on_trial) >= self._limit:
            raise ProtocolError(f"{len(self._on_trial)} peers are on trial, the limit is reached")
        self._on_trial[frame.name] = arrived  # the route may be new
        if former is not None and former.frame.sender == frame.sender:
            return []
        return [TryPeer(frame.sender, hello.agent_metadata, ranges(hello))]

    def end(self, tried: PeerTried) -> OnTrial | None:
        """What was on trial; None where another life of it has come meanwhile."""
        arrived = self._on_trial.get(tried.peer.name)
        if arrived is None or arrived.frame.sender != tried.peer:
            return None
        return self._on_trial.pop(tried.peer.name)
