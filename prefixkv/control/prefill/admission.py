"""How decode ranks become prefill's peers: their Hello is checked, and their metadata is tried."""

from __future__ import annotations

from collections import Counter

from prefixkv.config import ControlConfig
from prefixkv.control import handshake
from prefixkv.control.effects import FrameReceived, PeerTried
from prefixkv.control.prefill.peers import Peers
from prefixkv.control.prefill.writes import Want
from prefixkv.control.trials import OnTrial, Trials
from prefixkv.errors import ConfigError, FormerLifeError, HandshakeError
from prefixkv.protocol.messages import Frame, Hello


class Greetings:
    """Owned by a `PrefillControl`. Where a method returns something, that is to be admitted now."""

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
        """A decode rank introduces itself. What the transport would load of it is tried first."""
        try:
            accepted = handshake.accept(self._ours, frame.sender, hello)
            self._peers.check_worker(frame, received.credential, hello)
        except (HandshakeError, ConfigError) as error:
            self._refuse(received, frame, hello, error, out)
            return None
        arrived = OnTrial(accepted, received, frame, hello, now_s)
        if not self._tries or accepted.added is None or not hello.agent_metadata:
            return arrived
        out += self._trials.begin(arrived)
        return None

    def tried(self, tried: PeerTried, out: list[Want]) -> OnTrial | None:
        arrived = self._trials.end(tried)
        if arrived is None:
            return None
        _, received, frame, hello, _ = arrived
        error = tried.error
        try:  # what was so as the trial began may be so no more
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
        error = handshake.named(error, self._ours.option_names)
        self.counters["handshakes_refused"] += 1
        self._peers.news.say("refused", frame.sender, str(error))
        out.append(self._peers.reply(received.source, hello, str(error)))
