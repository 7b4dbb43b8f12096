"""Decode's side of a room that it does not open: tell prefill, which may have the request, that no
promise will come.

No page is at stake, only prefill's patience: unlike a receiver's, this room also ends when its time
is over.
"""

from __future__ import annotations

from typing import ClassVar

from prefixkv.config import ControlConfig
from prefixkv.protocol.backoff import Backoff
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.protocol.messages import Abort
from prefixkv.protocol.receiver_machine import (
    Action,
    DrainedSaid,
    Event,
    Fail,
    FencedOff,
    PeerReady,
    RoomDrained,
    Say,
    Tick,
)


class RefusalMachine:
    """One (room, generation) that is refused. Pure; owned by the endpoint that holds it.

    Args:
        is_news: whether RoomDrained is to come of it, once prefill has answered or cannot.
    """

    poll: ClassVar = KVPoll.FAILED
    drained: ClassVar = True  # no peer ever knew its pages

    def __init__(
        self,
        key: RoomKey,
        ticket: int,
        reason: str,
        timing: ControlConfig,
        now_s: float,
        *,
        is_news: bool = True,
    ) -> None:
        self.key = key
        self.ticket = ticket
        self.over = False
        self._reason = reason[:1000]
        self.is_news = is_news
        self._unanswered: set[int] = set()  # ranks that have been told
        self._resend = Backoff(timing.resend_s)
        self._deadline_s = (
            now_s + timing.bootstrap_timeout_s
        )  # by then prefill has given up by itself

    @property
    def wake_s(self) -> float:
        """When the next Tick is wanted, at the latest."""
        return float("inf") if self.over else min(self._deadline_s, self._resend.due_s)

    def on(self, event: Event, now_s: float) -> list[Action]:
        """Take one event. What is not named here means nothing to it."""
        match event:
            case PeerReady(ranks):
                self._unanswered = set(ranks)
                self._resend.start(now_s)
                return self._aborts()
            case DrainedSaid(rank) | FencedOff(rank) if rank in self._unanswered:
                self._unanswered.discard(rank)
                return [] if self._unanswered else self._end()
            case Fail():
                return self._end()
            case Tick() if now_s >= self._deadline_s:
                return self._end()
            case Tick() if self._unanswered and self._resend.take(now_s):
                return self._aborts()
        return []

    def _aborts(self) -> list[Action]:
        return [
            Say(rank, Abort(*self.key, self._reason, self.ticket))
            for rank in sorted(self._unanswered)
        ]

    def _end(self) -> list[Action]:
        if self.over:
            return []
        self.over = True
        return [RoomDrained(self.key)] if self.is_news else []
