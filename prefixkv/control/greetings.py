"""The way of a decode rank to become prefill's peer: Hello checked, then its metadata tried."""

from __future__ import annotations

from collections import Counter

from prefixkv.config import ControlConfig
from prefixkv.control import handshake
from prefixkv.control.effects import FrameReceived, PeerTried
from prefixkv.control.peers import Peers
from prefixkv.control.trials import OnTrial, Trials
from prefixkv.control.writes import Want
from prefixkv.errors import ConfigError, FormerLifeError, HandshakeError
from prefixkv.protocol.messages import Frame, Hello


class Greetings:
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
    ) -> None:
        self.counters = counters
        self._ours = ours
        self._peers = peers
        self._tries = tries
        self._trials = Trials(timing.max_peers, timing.max_peer_bytes)

    def hello(
        self,
        received: FrameReceived[bytes],
        frame: Frame,
        hello: Hello,
        now_s: float,
        out: list[Want],
    ) -> OnTrial | None:
        """Check the Hello of a decode rank, and start the trial of what the transport would load of
        it."""
        # 1. Can the two work together, and is the sender what it says it is? Both before the trial,
        # which may cost the child process: a stranger must not be able to end that at will.
        try:
            accepted = handshake.accept(self._ours, frame.sender, hello)
            self._peers.check_worker(frame, received.credential, hello)
        except (HandshakeError, ConfigError) as error:
            self._refuse(received, frame, hello, error, out)
            return None
        # 2. Nothing to load, so nothing to try: where we do not write to it, or by shm alone.
        arrived = OnTrial(accepted, received, frame, hello, now_s)
        if not self._tries or accepted.added is None or not hello.agent_metadata:
            return arrived
        out += self._trials.begin(arrived)
        return None

    def tried(self, tried: PeerTried, out: list[Want]) -> OnTrial | None:
        """Take the end of a trial: return the rank if it may be admitted, refuse it otherwise."""
        arrived = self._trials.end(tried)
        if arrived is None:
            return None
        _, received, frame, hello, _ = arrived
        error = tried.error
        try:  # a trial takes time: the life may be over by now, the last place taken
            self._peers.lives.check(frame.sender)
            self._peers.check_worker(frame, received.credential, hello)
        except (HandshakeError, FormerLifeError) as late:
            error = error or late
        if error is None:
            return arrived
        self._refuse(received, frame, hello, error, out)
        return None

    def _refuse(
        self,
        received: FrameReceived[bytes],
        frame: Frame,
        hello: Hello,
        error: Exception,
        out: list[Want],
    ) -> None:
        """Answer with the reason, count it, and say it in the log."""
        error = handshake.named(error, self._ours.option_names)
        self.counters["handshakes_refused"] += 1
        self._peers.news.say("refused", frame.sender, str(error))
        out.append(self._peers.reply(received.source, hello, str(error)))
