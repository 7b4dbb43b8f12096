"""Decode's side of a room that it does not open: tell prefill, which may have the request, that no
promise will come. No page is at stake, so this room also ends once prefill has not been heard for
long."""

from __future__ import annotations

from typing import ClassVar, assert_never

from prefixkv.config import ControlConfig
from prefixkv.protocol import receiver_machine as receiver
from prefixkv.protocol.events import RoomDrained
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.protocol.machine import Fail, RoomTick, fault
from prefixkv.protocol.messages import Abort
from prefixkv.protocol.timers import Backoff, Wait


class RefusalMachine:
    """One (room, generation) that decode refuses. Pure; owned by the control object that holds it.

    It has one state, FAILED, and no table: it ends once (`over`), and takes nothing after that.
    `reports_end`: whether it ends with RoomDrained, once prefill has answered or cannot.
    """

    drained: ClassVar = True  # no peer ever knew its pages
    is_written: ClassVar = False

    def __init__(
        self,
        key: RoomKey,
        ticket: int,
        reason: str,
        timing: ControlConfig,
        now_s: float,
        *,
        reports_end: bool = True,
        versions: tuple[str, str] | None = None,
    ) -> None:
        self.key = key
        self.ticket = ticket
        self.poll = KVPoll.FAILED
        self.over = False
        self._reason, self._versions = reason[:1000], versions
        self.reports_end = reports_end
        self._unanswered: set[int] = set()  # ranks that have the Abort, and have not answered
        self._resend = Backoff(timing.resend_s)
        # By then prefill, which does not hear of decode either, has given up by itself.
        self._wait = Wait(timing.longest_wait_s)
        self._wait.start(now_s, timing.bootstrap_timeout_s)

    @property
    def wake_s(self) -> float:
        """Latest time at which the next RoomTick is wanted."""
        return float("inf") if self.over else min(self._wait.due_s, self._resend.due_s)

    def on(self, event: receiver.ReceiverEvent, now_s: float) -> list[receiver.ReceiverAction]:
        """Take one event; return the actions. Raises InternalError for a second PeerReady."""
        match event:
            case receiver.PeerReady(ranks):
                if self._unanswered or self.over:
                    raise fault(self, event, "its ranks are known")
                self._unanswered = set(ranks)
                self._resend.start(now_s)
                return self._aborts()
            # All ranks have to answer: one that has not may still wait for the promise.
            case receiver.DrainedSaid(rank) | receiver.FencedOff(rank):
                if rank in self._unanswered:
                    self._unanswered.discard(rank)
                    return [] if self._unanswered else self._end()
            case Fail():
                return self._end()
            # Giving up on time is safe only here: no peer ever knew pages of this room.
            case RoomTick():
                if not self._wait.goes_on(event.heard_s, now_s):
                    return self._end()
                if self._unanswered and self._resend.take(now_s):
                    return self._aborts()
            case (
                receiver.PromiseAcked()
                | receiver.ChunkLanded()
                | receiver.UnitsStaged()
                | receiver.OutcomeSaid()
            ):
                pass  # nothing was promised: about an earlier use of the number
            case _:
                assert_never(event)
        return []

    def _aborts(self) -> list[receiver.ReceiverAction]:
        abort = Abort(*self.key.numbers, self._reason, self.ticket, self._versions)
        return [receiver.SendToRank(rank, abort) for rank in sorted(self._unanswered)]

    def _end(self) -> list[receiver.ReceiverAction]:
        if self.over:
            return []
        self.over = True
        self._unanswered.clear()
        return [RoomDrained(self.key)] if self.reports_end else []
