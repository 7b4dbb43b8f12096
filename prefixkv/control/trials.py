"""Decode ranks that passed the handshake, and whose metadata is on trial."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from prefixkv.control.effects import FrameReceived, PeerTried, TryPeer
from prefixkv.control.handshake import Accepted, ranges
from prefixkv.control.prefill.budgets import hello_bytes
from prefixkv.errors import BudgetError, ProtocolError
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import Frame, Hello


class OnTrial(NamedTuple):
    """A decode rank that passed the handshake, its last Hello, and when the first came."""

    accepted: Accepted
    received: FrameReceived[bytes]
    frame: Frame
    hello: Hello
    came_s: float


class Trials:
    """Owned by a `PrefillControl`. At most `limit` under way, of `max_bytes` a key."""

    def __init__(self, limit: int, max_bytes: int) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._on_trial: dict[str, OnTrial] = {}
        self._under_way: dict[PeerId, tuple[str, int]] = {}  # the key, bytes held; lost ones too

    def begin(self, arrived: OnTrial) -> list[TryPeer]:
        """The trial to be made: none where one of this life goes on, its Hello being said again.
        Then what is tried stands, and only where the answer goes is new.

        Raises ProtocolError where the limit is reached, BudgetError where that of the key is.
        """
        _, received, frame, hello, _ = arrived
        # Without its bytes, which may be many more than what is of use in them.
        received = msgspec.structs.replace(received, raw=b"")
        former = self._on_trial.get(frame.name)
        if former is not None and former.frame.sender == frame.sender:
            self._on_trial[frame.name] = former._replace(
                received=received,
                frame=msgspec.structs.replace(former.frame, seq=frame.seq),
                hello=msgspec.structs.replace(former.hello, known=hello.known),
            )
            return []
        if frame.sender in self._under_way:
            raise ProtocolError(f"{frame.sender} is on trial, and another life has come since")
        if len(self._under_way) >= self._limit:
            raise ProtocolError(f"{len(self._under_way)} peers are on trial, the limit is reached")
        key, num_bytes = received.credential, hello_bytes(hello)
        held = sum(num for other, num in self._under_way.values() if other == key)
        if held + num_bytes > self._max_bytes:
            raise BudgetError(
                f"{held} bytes of this key are on trial and {num_bytes} more come, max_peer_bytes "
                f"is {self._max_bytes}"
            )
        self._under_way[frame.sender] = key, num_bytes
        self._on_trial[frame.name] = arrived._replace(received=received)
        return [TryPeer(frame.sender, hello.agent_metadata, ranges(hello))]

    def end(self, tried: PeerTried) -> OnTrial | None:
        """What was on trial; None where another life of it has come meanwhile."""
        self._under_way.pop(tried.peer, None)
        arrived = self._on_trial.get(tried.peer.name)
        if arrived is None or arrived.frame.sender != tried.peer:
            return None
        return self._on_trial.pop(tried.peer.name)
