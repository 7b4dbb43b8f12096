"""The way of a decode rank to become prefill's peer: Hello checked, then its metadata tried."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec

from prefixkv.config import ControlConfig
from prefixkv.control import handshake
from prefixkv.control.effects import (
    EffectList,
    FrameReceived,
    PeerTried,
    RoomAction,
    TryPeer,
)
from prefixkv.control.handshake import Accepted, ranges
from prefixkv.control.prefill.budgets import hello_bytes
from prefixkv.control.prefill.peers import Peers
from prefixkv.errors import BudgetError, ConfigError, FormerLifeError, HandshakeError, ProtocolError
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

    def begin(self, arrived: OnTrial) -> TryPeer | None:
        """Return the trial to start before a decode rank is admitted as prefill's peer; none if one
        of this life is under way.

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
            return None
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
        return TryPeer(frame.sender, hello.agent_metadata, ranges(hello))

    def end(self, tried: PeerTried) -> OnTrial | None:
        """Remove and return the decode rank whose trial before admission has ended; None if another
        life has replaced it meanwhile."""
        self._under_way.pop(tried.peer, None)
        arrived = self._on_trial.get(tried.peer.name)
        if arrived is None or arrived.frame.sender != tried.peer:
            return None
        return self._on_trial.pop(tried.peer.name)


class PeerAdmission:
    """The two steps before a decode rank is admitted. Owned by a `PrefillControl`.

    A returned `OnTrial` is to be admitted now; None means that it was refused, or has to wait.
    """

    def __init__(
        self,
        ours: handshake.OurSide,
        peers: Peers,
        timing: ControlConfig,
        tries: bool,
        counters: Counter[str],
        actions: EffectList[RoomAction],
    ) -> None:
        self.counters = counters
        self._ours = ours
        self._peers = peers
        self._actions = actions
        self._tries = tries
        self._trials = Trials(timing.max_peers, timing.max_peer_bytes)

    def hello(
        self,
        received: FrameReceived[bytes],
        frame: Frame,
        hello: Hello,
        now_s: float,
    ) -> OnTrial | None:
        """Check the Hello of a decode rank before it is admitted as prefill's peer, and start the
        trial of what the transport would load of it."""
        # 1. Can the two work together, and is the sender what it says it is? Both before the trial:
        # a trial costs a child process, which a stranger must not be able to start.
        try:
            accepted = handshake.accept(self._ours, frame.sender, hello)
            self._peers.check_worker(frame, received.credential, hello, now_s)
        except (HandshakeError, ConfigError) as error:
            self._refuse(received, frame, hello, error)
            return None
        # 2. Nothing to load, so nothing to try: where we do not write to it, or by shm alone.
        arrived = OnTrial(accepted, received, frame, hello, now_s)
        if not self._tries or accepted.added is None or not hello.agent_metadata:
            return arrived
        if (trial := self._trials.begin(arrived)) is not None:
            self._actions.add(trial)
        return None

    def tried(self, tried: PeerTried, now_s: float) -> OnTrial | None:
        """Take the end of a trial: return the decode rank if it may be admitted as prefill's peer,
        refuse it otherwise."""
        arrived = self._trials.end(tried)
        if arrived is None:
            return None
        _, received, frame, hello, _ = arrived
        error = tried.error
        try:  # a trial takes time: the life may be over by now, the last place taken
            self._peers.lives.check(frame.sender)
            self._peers.check_worker(frame, received.credential, hello, now_s)
        except FormerLifeError as late:
            error = error or ProtocolError(self._peers.why_over(late, now_s))
        except HandshakeError as late:
            error = error or late
        if error is None:
            return arrived
        self._refuse(received, frame, hello, error)
        return None

    def _refuse(
        self,
        received: FrameReceived[bytes],
        frame: Frame,
        hello: Hello,
        error: Exception,
    ) -> None:
        error = handshake.named(error, self._ours.option_names)
        self.counters["handshakes_refused"] += 1
        self._peers.news.say("refused", frame.sender, str(error))
        self._peers.reply(received.source, hello, str(error))
