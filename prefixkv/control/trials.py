"""Decode ranks that passed the handshake, while their metadata is tried in another process."""

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
    """A decode rank that passed the handshake, its latest Hello, and when its first one came."""

    accepted: Accepted
    received: FrameReceived[bytes]
    frame: Frame
    hello: Hello
    came_s: float


class Trials:
    """The trials under way: at most `limit`, and at most `max_bytes` per key. Owned by a
    `PrefillControl`."""

    def __init__(self, limit: int, max_bytes: int) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        # By name: what is admitted if its trial ends well. A later life replaces an earlier one
        # here.
        self._on_trial: dict[str, OnTrial] = {}
        # By identity: the key, and the bytes held for it. A trial stays until it ends, even if its
        # result is no longer wanted, since the child process is busy with it.
        self._under_way: dict[PeerId, tuple[str, int]] = {}

    def begin(self, arrived: OnTrial) -> list[TryPeer]:
        """Return the trial to start; none if one of this life is under way.

        Then the Hello was repeated: what is tried stays, and only where the answer goes is updated.

        Raises:
            ProtocolError: an older life's trial is under way, or `limit` is reached.
            BudgetError: the key's bytes are used up.
        """
        _, received, frame, hello, _ = arrived
        # Drop the raw frame: what was decoded of it may be a small part of its size, and
        # `hello_bytes` counts only that.
        received = msgspec.structs.replace(received, raw=b"")
        former = self._on_trial.get(frame.name)
        if former is not None and former.frame.sender == frame.sender:
            self._on_trial[frame.name] = former._replace(
                received=received,
                frame=msgspec.structs.replace(former.frame, seq=frame.seq),
                hello=msgspec.structs.replace(former.hello, known=hello.known),
            )
            return []
        # It was replaced under its name while its trial ran. The end of that trial would be taken
        # for the end of a second one under the same identity.
        if frame.sender in self._under_way:
            raise ProtocolError(f"{frame.sender} is on trial, and another life has come since")
        if len(self._under_way) >= self._limit:
            raise ProtocolError(f"{len(self._under_way)} peers are on trial, the limit is reached")
        # Bytes are counted by key, not by name: names are free to choose, a key is proved.
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
        """Remove and return what was on trial; None if another life has replaced it meanwhile."""
        self._under_way.pop(tried.peer, None)
        arrived = self._on_trial.get(tried.peer.name)
        if arrived is None or arrived.frame.sender != tried.peer:
            return None
        return self._on_trial.pop(tried.peer.name)
