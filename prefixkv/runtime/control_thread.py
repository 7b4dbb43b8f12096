"""The control thread of a node: it feeds a control object and carries out its effects.

    scheduler's thread  --submit-->  inbox  -->  control thread: control object, sockets
                        <--events--  inbox  <--    |  write, expect, gather, ...    ^
                                                   v                                | inbox
                                         transport, copy threads  --what became of it

It sleeps until the next input or deadline. An exception harms one input or effect only: the
scheduler's thread raises it. A fault of a peer's frame is logged and ends the room that it names.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, cast

from prefixkv.config import ControlConfig
from prefixkv.control.effects import (
    AddPeer,
    AgentDestroyed,
    Cancel,
    Common,
    Connect,
    ConnectFailed,
    DecodeEffect,
    Disconnect,
    Examine,
    Expect,
    FrameReceived,
    PrefillEffect,
    Raised,
    RemovePeer,
    Renew,
    SendFrame,
    Settle,
    Tick,
)
from prefixkv.control.inbox import ControlInbox
from prefixkv.control.lives import PeerChange
from prefixkv.errors import ClosedError, ConfigError
from prefixkv.protocol.events import HostCopyDone, RoomEvent
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import ProcessLife
from prefixkv.runtime.channel import DealerChannel, RouterChannel
from prefixkv.threads import Inbox
from prefixkv.transport.base import Settled, WriteJob
from prefixkv.transport.transports import Transports

_log = logging.getLogger("prefixkv.control")
_news_log = logging.getLogger("prefixkv.peers")

REPEAT_S: Final = 60.0
_MAX_KEYS: Final = 4096
_CALM: Final = {"met", "heard", "left", "forgotten"}

_FAREWELL_S = 0.5  # seconds in which the last frames of a node that closes may leave
_RETRY_PAUSE_S = 0.01  # pause after a step that failed as a whole, lest it fail in a busy loop

Effect = DecodeEffect | PrefillEffect

Command = TypeVar("Command")
Control: TypeAlias = ControlInbox[Any, Any]  # DecodeControl or PrefillControl
Channel: TypeAlias = DealerChannel | RouterChannel


class ControlFailed(NamedTuple):
    """An event: an exception in the control thread, for the scheduler's thread to raise."""

    error: Exception


class ControlThread(Generic[Command]):
    """The thread with its inboxes. Created by the scheduler's thread, which calls `submit`,
    `events` and `close`.

    The parts are made here by the transfer side, one after the other, since each needs the one
    before: transports report to the inbox, the control object says in its Hello how to reach them,
    the channel wakes with the inbox. If one raises, all that was made is closed again.
    """

    def __init__(self, name: str, side: Any) -> None:
        """Have the parts made by `side`, a Transfers, and start the thread."""
        self.num_errors = 0  # exceptions handed to the scheduler's thread
        self.num_log_errors = 0  # what log handlers have raised
        self._peer_log = PeerLog(name)
        self._closed = False
        self._pid = os.getpid()  # a fork of this process must not close what its parent uses
        self._close_error: Exception | None = None
        with ExitStack() as undo:
            # A transport writes to addresses. The side holds the memory, which so lives as long as
            # the thread, even if the node is dropped.
            self._side = side
            # It says which process this is, so it comes before the control object.
            self._proofs: Proofs = side._make_proofs()
            undo.callback(self._proofs.close)
            self.inbox: Inbox[Command | Common | None] = Inbox()
            undo.callback(self.inbox.close)
            # The threads that copy to and from host memory put theirs there as well.
            self.events: Inbox[RoomEvent | ControlFailed | HostCopyDone] = Inbox()
            undo.callback(self.events.close)
            self.transports: Transports = side._make_transports(self.inbox.put)
            undo.callback(self.transports.close)
            self.control: Control = side._make_control(self.transports.offers, self._proofs.life)
            # Threads of organs, and by type the effects that they carry out.
            self._parts: list[Any] = []
            self._does: dict[type, Callable[[Any], object]] = {}
            for part in side._make_parts(self.inbox.put):
                undo.callback(part.close)
                self._parts.append(part)
                self._does |= part.effects
            self.channel: Channel = side._make_channel(self.inbox.fd)
            undo.callback(self.channel.close)
            self._thread = threading.Thread(
                target=self._run, name=f"prefixkv-control-{name}", daemon=True
            )
            self._thread.start()
            # Everything is running: `close` undoes it from here on.
            undo.pop_all()

    def submit(self, command: Command) -> None:
        """Queue a command. Raises ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the node is closed")
        self.inbox.put(command)

    def close(self) -> None:
        """Destroy the transport's agent, send the farewell, join the thread.

        No-op if called again, and in a process forked from this one: the inboxes' descriptors are
        its parent's. Raises InternalError if the agent could not be destroyed: the peers then get
        no farewell, since writes may still land.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.inbox.put(None)  # only wakes the thread
        self._thread.join()
        # After the thread, which waits on them.
        self.inbox.close()
        self.events.close()
        if self._close_error is not None:
            raise self._close_error

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        """Steps until it is stopped, then the end in its order."""
        while not self._closed:
            try:
                self._step(time.monotonic())
            except Exception as error:
                self._failed(error)
                time.sleep(_RETRY_PAUSE_S)
        # 1. The agent: only once it is destroyed are our writes fenced.
        self._end(self.transports.close)
        # 2. What depends on that: the socket that proves us alive (kept if writes may still land),
        # the copies, and the farewell, which tells peers that pages are free. It must not come
        # before the fence.
        self._end(partial(self._proofs.close, ended=self._close_error is None))
        for part in self._parts:
            self._end(part.close)
        if self._close_error is None:
            self._end(self._farewell)
        self._log(self._peer_log.write, self.control.news.take(), time.monotonic())
        # 3. The sockets last, with time for the farewell to leave.
        self.channel.close(linger_s=_FAREWELL_S)

    def _end(self, close: Callable[[], None]) -> None:
        try:
            close()
        except Exception as error:
            self._close_error = self._close_error or error

    def _farewell(self) -> None:
        for effect in self._take(AgentDestroyed(), time.monotonic()):
            if isinstance(effect, Raised):
                raise effect.error

    def _step(self, now_s: float) -> None:
        frames = self.channel.poll(self.control.wake_s - now_s)
        # The time after the wait: deadlines are compared with it.
        now_s = time.monotonic()
        # Commands and events before frames: a room that the scheduler has opened is there when a
        # frame about it is taken.
        for item in self.inbox.drain():
            if item is not None:
                self._take(item, now_s)
        for frame in frames:
            self._take(frame, now_s)
        # A step ends with a Tick where one is due. On the way of a request four steps in five have
        # none.
        try:
            if self.control.wake_s <= now_s:
                before = self.num_errors
                self._take(Tick(), now_s)
                if self.num_errors > before:  # it may be due at once again
                    time.sleep(_RETRY_PAUSE_S)
        finally:
            if self.control.news.kept:
                self._log(self._peer_log.write, self.control.news.take(), now_s)

    def _log(self, write: Callable[..., None], *what: object) -> None:
        try:
            write(*what)
        except Exception:  # a handler's, which is the user's: only counted
            self.num_log_errors += 1

    def _take(self, what: Command | FrameReceived[Any] | Common, now_s: float) -> Sequence[Effect]:
        """Give an input to the control object; carry out its effects, and return them."""
        if isinstance(what, Settled) and not self.transports.settled(what.token):
            return ()
        try:
            effects = self.control.on(what, now_s)
        except Exception as error:
            self._failed(error)
            return ()
        # First what the scheduler waits for: a send wakes zmq's own thread and may cost 0.2 ms, and
        # nothing that the scheduler does depends on it.
        for effect in effects:
            if isinstance(effect, RoomEvent):
                self.events.put(effect)
        for effect in effects:
            if not isinstance(effect, RoomEvent):
                try:
                    self._do(effect)
                except Exception as error:
                    self._failed(error)
        return effects

    def _failed(self, error: Exception) -> None:
        self.num_errors += 1
        self.events.put(ControlFailed(error))

    def _do(self, effect: Effect) -> None:
        # Sockets, transport, copy threads and proofs carry them out. No call here waits for
        # that; the result is an input later.
        match effect:
            case SendFrame():
                self.channel.send(cast(Any, effect.to), effect.raw)
            case Raised(error, source):
                # A frame is a peer's word: its exception ends a room. All else is our own defect.
                if source is None:
                    self._failed(error)
                else:
                    write = partial(_log.error, exc_info=error)
                    self._log(write, "a frame from %r raised", source)
            case WriteJob():
                self.transports.write(effect)
            case Expect():
                self.transports.expect(effect.num_rooms)
            case Cancel():
                self.transports.cancel(effect.job_id)
            case Settle():
                self.transports.settle(effect.token, effect.for_s)
            case Renew():
                self.transports.renew()
            case Examine():
                self._proofs.submit(effect.peer, effect.life)
            case AddPeer():
                self.transports.add_peer(effect.way, effect.peer, effect.metadata, effect.memory)
                self._tell_parts(effect)
            case RemovePeer():
                self.transports.remove_peer(effect.peer)
                self._tell_parts(effect)
            case Connect():
                try:
                    cast(DealerChannel, self.channel).connect(effect.address)
                except ConfigError as error:  # at once, since rooms wait for the address
                    self._take(ConnectFailed(effect.address, error), time.monotonic())
            case Disconnect():
                cast(DealerChannel, self.channel).disconnect(effect.address)
            case _:
                self._does[type(effect)](effect)

    def _tell_parts(self, effect: Effect) -> None:
        if (do := self._does.get(type(effect))) is not None:
            do(effect)


class Proofs:
    """The kernel's part of proofs that a process is dead: there are none, so the fence of a peer is
    the word of the caller alone.

    A part that looks at processes overrides these; `Transfers.proofs` makes it.
    """

    def __init__(
        self, name: str, timing: ControlConfig, is_written_to: bool, tell: Callable[[PeerId], None]
    ) -> None:
        """`tell` takes each peer that is dead and has nothing on its way here. `is_written_to`:
        peers write into memory of this process."""

    @property
    def life(self) -> ProcessLife | None:
        """Identity of this process for Hello, None if it is not said."""
        return None

    def submit(self, peer: PeerId, life: ProcessLife) -> None:
        """Have a peer's process looked at soon. No-op while that is under way."""

    def close(self, *, ended: bool = True) -> None:
        """Let the identity go, if writes have `ended`. Idempotent."""


class PeerLog:
    """Writes what becomes of peers to the logger `prefixkv.peers`. What becomes of one again and
    again, of a refused one in whatever life, is one line per minute. Owned by a control thread;
    `name` is the worker's.

    An exception of a log handler comes out of `write`; the lines behind it are lost.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # By kind and peer: when a line was written last, and how many were left out since. The
        # oldest comes first; bounded, since peers choose their names.
        self._written: OrderedDict[tuple[str, PeerId | str], tuple[float, int]] = OrderedDict()

    def write(self, news: list[PeerChange], now_s: float) -> None:
        """Write the lines that are due; may raise what a log handler raises."""
        for one in news:
            # Repeats are counted, not written.
            if (more := self._more(one, now_s)) is not None:
                level = logging.INFO if one.kind in _CALM else logging.WARNING
                again = f" ({more} more since the last line)" if more else ""
                _news_log.log(
                    level, "%s: %s: %s %s%s", self._name, one.kind, one.peer, one.why, again
                )

    def _more(self, one: PeerChange, now_s: float) -> int | None:
        """Return how many such changes were left out since the last line; None: this one too."""
        # A refused peer is known by its name alone: each restart is another life.
        peer = one.peer
        if one.kind == "refused" and isinstance(peer, PeerId):
            peer = peer.name
        key = one.kind, peer
        last_s, more = self._written.get(key, (now_s - REPEAT_S, 0))
        if now_s < last_s + REPEAT_S:
            self._written[key] = last_s, more + 1
            return None
        self._written[key] = now_s, 0
        self._written.move_to_end(key)
        if len(self._written) > _MAX_KEYS:
            self._written.popitem(last=False)
        return more
