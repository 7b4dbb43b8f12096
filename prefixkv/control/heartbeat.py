"""What both sides keep of a connection: when the other end was heard, which frames are fresh."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from prefixkv.config import ControlConfig
from prefixkv.errors import ProtocolError
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import AnyBody, Frame, encode


class Stamper:
    """Numbers and encodes what one process says. One sequence over all its peers, so it grows for
    each."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self._seq = count(1)

    def frame(self, body: AnyBody) -> bytes:
        return encode(self.me, next(self._seq), body)


@dataclass(slots=True)
class Liveness:
    """When the other end was last heard and last spoken to. Silence makes it suspect, never
    dead."""

    heard_s: float
    sent_s: float
    in_seq: int = 0

    def take(self, frame: Frame, now_s: float) -> None:
        """Count a frame in. Raises ProtocolError if it is not newer than all before it."""
        if frame.seq <= self.in_seq:
            raise ProtocolError(f"frame {frame.seq} after {self.in_seq}")
        self.in_seq = frame.seq
        self.heard_s = now_s

    def suspect(self, timing: ControlConfig, now_s: float) -> bool:
        return now_s - self.heard_s > timing.suspect_after_s

    def heartbeat_due(self, timing: ControlConfig, now_s: float) -> bool:
        return now_s >= self.heartbeat_due_s(timing)

    def heartbeat_due_s(self, timing: ControlConfig) -> float:
        """When to say something again. Timers take this very sum, so that no wake-up is a rounding
        error early."""
        return self.sent_s + timing.heartbeat_s

    def forgettable(self, timing: ControlConfig, now_s: float) -> bool:
        return now_s - self.heard_s > timing.forget_after_s
