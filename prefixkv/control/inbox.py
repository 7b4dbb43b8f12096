"""Run to completion: the one deque of a control object.

An input goes in at the back, and so does whatever rooms, relay and peers say while it is handled.
Each item is taken from the front by the method that a table names for its type, until the deque is
empty; effects go out in the order in which they were said. A machine takes an event at once: only
what it wants done waits for its turn. So nothing calls back into what is still running.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from prefixkv.config import ControlConfig
from prefixkv.control.effects import FrameFailed, FrameReceived, Raised, SendFrame
from prefixkv.control.lives import LostPeers, PeerChanges
from prefixkv.errors import ChecksumError, InternalError, WeightsVersionError, ours
from prefixkv.protocol.events import RoomEnded
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.messages import AnyBody, encode
from prefixkv.protocol.timers import Timers

Input = TypeVar("Input")
E = TypeVar("E")
Takes = Mapping[type, Callable[[Any, Any, float], None]]


class ControlInbox(Generic[Input, E]):
    """A control object as its parts need it: the deque, the effects of the present input, and what
    the parts share."""

    INPUTS: ClassVar[Takes] = {}  # by type: the method that takes an input
    INSIDE: ClassVar[Takes] = {}  # the same for what is said inside; all else goes out as it is
    relay: Any  # of writes that cannot go straight into pages; None: there are none

    def __init__(
        self, me: PeerId, timing: ControlConfig, option_names: Mapping[str, str] | None = None
    ) -> None:
        self.me = me
        self.timing = timing
        self.option_names = option_names or {}  # of the engine, for errors that its user reads
        self.timers: Timers[str | RoomKey] = Timers()  # peers by name or address, rooms by key
        self.news = PeerChanges()
        self.counters: Counter[str] = Counter()
        self._seq = count(1)  # of this process's frames: one sequence, which grows for each peer
        self._todo: deque[Any] = deque()
        self.say = self._todo.append
        self.say_all = self._todo.extend
        self._out: list[Any] = []

    def on(self, what: Input, now_s: float) -> list[E]:
        """Take one input and return what to do about it, in order. An exception ends the item that
        raised it, and no other, nor what it has said: a `Raised` says so, and the room that a frame
        names ends."""
        if type(what) not in self.INPUTS:
            raise InternalError(f"{type(self).__name__} takes no {type(what).__name__}")
        self._out = []
        self.say(what)
        while (item := self._next()) is not None:
            takes = self.INSIDE.get(type(item)) or self.INPUTS.get(type(item))
            if takes is None:
                self._out.append(item)
                continue
            try:
                takes(self, item, now_s)
            except Exception as error:
                frame = what if isinstance(what, FrameReceived) else None
                self._out.append(Raised(error, None if frame is None else frame.source))
                if frame is not None and not isinstance(item, FrameFailed):
                    self.say(FrameFailed(frame, error))
        return self._out

    def lost_peers(self, now_s: float) -> LostPeers:
        """Return the peers that are suspect or over and still hold something of ours, and what is
        wrong with each. Any thread may ask."""
        raise NotImplementedError

    def _next(self) -> Any:
        """Return the item whose turn it is, None if all is done."""
        return self._todo.popleft() if self._todo else None

    def send(self, to: str | bytes, body: AnyBody) -> None:
        """Say a frame, stamped with the next number."""
        self.say(SendFrame(to, encode(self.me, next(self._seq), body)))

    def _end(self, ended: RoomEnded, now_s: float) -> None:
        # Of a copy, of a look, of the engine's event it may be of any class.
        error = ended.error and ours(ended.error)
        if isinstance(error, ChecksumError):
            self.counters["checksum_mismatches"] += 1
        if isinstance(error, WeightsVersionError) and self.option_names:
            error = error.named(self.option_names)
        self._out.append(msgspec.structs.replace(ended, error=error))

    def _ignore(self, item: Any, now_s: float) -> None:
        """Take an item that means nothing to this side."""
