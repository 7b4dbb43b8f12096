"""State of a connection on either side: when the other end was heard, which frames are new."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from prefixkv.config import ControlConfig
from prefixkv.errors import ProtocolError
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import AnyBody, Frame, encode


class Stamper:
    """Numbers and encodes the frames of one process, in one sequence that grows for each peer."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self._seq = count(1)

    def frame(self, body: AnyBody) -> bytes:
        """Encode a frame, stamped with the next number."""
        return encode(self.me, next(self._seq), body)


@dataclass(slots=True)
class PeerClock:
    """When the other end was heard, and spoken to. Silence makes it suspect, never dead."""

    heard_s: float
    sent_s: float
    in_seq: int = 0

    def take(self, frame: Frame, now_s: float) -> None:
        """Count a frame in. Raise ProtocolError if its number is not above all before: repeated or
        reordered."""
        # Numbers of one life only grow, also over several connections. So a frame that was recorded
        # and sent again, or was overtaken on another connection, is refused.
        if frame.seq <= self.in_seq:
            raise ProtocolError(f"frame {frame.seq} after {self.in_seq}")
        self.in_seq = frame.seq
        self.heard_s = now_s

    def suspect(self, timing: ControlConfig, now_s: float) -> bool:
        """Return whether it has been silent for longer than `suspect_after_s`."""
        return now_s - self.heard_s > timing.suspect_after_s

    def heartbeat_due(self, timing: ControlConfig, now_s: float) -> bool:
        return now_s >= self.heartbeat_due_s(timing)

    def heartbeat_due_s(self, timing: ControlConfig) -> float:
        """Return when the next Heartbeat is due. Timers use this very sum, so that no wake-up comes
        a rounding error too early."""
        return self.sent_s + timing.heartbeat_s

    def forgettable(self, timing: ControlConfig, now_s: float) -> bool:
        """Return whether it has been silent for longer than `forget_after_s`."""
        return now_s - self.heard_s > timing.forget_after_s
