"""The control thread of a node: it drives the endpoint with frames, transport events, commands and
time.

    scheduler's thread  --submit-->  inbox  -->  control thread: endpoint, sockets  --write,
    expect-->  transport
                        <--events--  inbox  <--
                        <-----sink-------

The thread sleeps until one of these has something for it or the endpoint's next deadline comes. An
exception while one item is handled, or one action carried out, harms nothing else: it is handed to
the scheduler's thread, which raises it, and the thread lives on.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from prefixkv.config import ControlConfig
from prefixkv.control import decode as decode_endpoint
from prefixkv.control import prefill as prefill_endpoint
from prefixkv.control.decode import DecodeEndpoint
from prefixkv.control.prefill import PrefillEndpoint
from prefixkv.errors import ClosedError, ConfigError, RequestError
from prefixkv.prefill import scheduler as prefill
from prefixkv.protocol import commands as decode
from prefixkv.protocol import receiver_machine as receiver
from prefixkv.protocol import sender_events as sender
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Hello, ModelDigest, Topology
from prefixkv.protocol.tags import ChunkTag
from prefixkv.runtime.channel import DealerChannel, RouterChannel
from prefixkv.runtime.copy_pool import CopyDone
from prefixkv.runtime.staging import Gathered, ReceiveStaging, Scattered, SendStaging
from prefixkv.runtime.wakeups import Inbox
from prefixkv.staging import sender as staging_sender
from prefixkv.staging.receiver import Scatter
from prefixkv.transport.base import (
    Arrived,
    PeerUnreachable,
    Route,
    Settled,
    Transport,
    TransportEvent,
    WriteDone,
    WriteDrained,
    WriteFailed,
    WriteJob,
)

_FAREWELL_S = 0.5  # how long the last frames of a node that closes may take to leave
_DECODE_NEWS: Final = (receiver.RoomEnded, receiver.RoomDrained, receiver.RoomOverdue)
_PREFILL_NEWS: Final = (sender.Bootstrapped, sender.RoomEnded, sender.SourceFree)
_STUMBLE_S = 0.01  # pause after a step that failed as a whole, lest it fail in a busy loop

A = TypeVar("A")


class Fence:
    """Command: the caller knows that this incarnation can write no more."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer


class ControlFailed:
    """Event: an exception in the control thread, for the scheduler's thread to raise."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Manager:
    """What both sides share. Made by the scheduler's thread, which calls `submit`, `events` and
    `close`."""

    def __init__(
        self,
        name: str,
        transport: Callable[[Callable[[TransportEvent], None]], Transport],
        copies: SendStaging | ReceiveStaging | None,
    ) -> None:
        self._copies = copies
        self.inbox: Inbox[Any] = Inbox()
        self.events: Inbox[Any] = Inbox()
        self.counters: Counter[str] = Counter()
        self._stopping = False
        self._closed = False
        self._close_error: Exception | None = None
        try:
            self.transport = transport(self.inbox.put)
        except BaseException:
            self._close_inboxes()
            raise
        if copies is not None:
            copies.start(self.inbox.put)
        self._thread = threading.Thread(
            target=self._run, name=f"prefixkv-control-{name}", daemon=True
        )

    @property
    def staging_counters(self) -> Mapping[str, int]:
        """What the staging machine has counted; nothing where there is none."""
        return {}

    def submit(self, command: Any) -> None:
        """Queue a command. Raises ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the node is closed")
        self.inbox.put(command)

    def close(self) -> None:
        """Destroy the transport's agent, say farewell, join the thread. Again: no-op.

        Raises InternalError if the agent could not be destroyed; the peers are then told nothing,
        since writes may still land.
        """
        if self._closed:
            return
        self._closed = True
        self._stopping = True
        self.inbox.put(None)
        self._thread.join()
        self._close_inboxes()
        if self._close_error is not None:
            raise self._close_error

    def _close_inboxes(self) -> None:
        self.inbox.close()
        self.events.close()

    def _now(self) -> float:
        """The time; a simulation has its own."""
        return time.monotonic()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._step(self._now())
            except Exception as error:
                self._failed(error)
                time.sleep(_STUMBLE_S)
        try:
            self.transport.close()
        except Exception as error:
            self._close_error = error  # not fenced
        if self._copies is not None:
            self._copies.close()
        try:
            if self._close_error is None:
                self._farewell()
        finally:
            self._close_channel()

    def _guarded(self, act: Callable[..., None], *args: Any) -> None:
        """Run one piece of work; its exception is the scheduler's to raise, and nobody else's to
        suffer."""
        try:
            act(*args)
        except Exception as error:
            self._failed(error)

    def _tell_first(self, actions: Sequence[A], news: tuple[type, ...]) -> list[A]:
        """Hand the scheduler its part of the actions; returns the rest.

        A send wakes zmq's own thread and may cost 0.2 ms; nothing that the scheduler does depends
        on it.
        """
        rest = []
        for action in actions:
            if isinstance(action, news):
                self.events.put(action)
            else:
                rest.append(action)
        return rest

    def _failed(self, error: Exception) -> None:
        self.counters["control_errors"] += 1
        self.events.put(ControlFailed(error))

    def _step(self, now_s: float) -> None:
        raise NotImplementedError

    def _farewell(self) -> None:
        raise NotImplementedError

    def _close_channel(self) -> None:
        raise NotImplementedError


class DecodeManager(_Manager):
    """Decode's control thread. `events` brings RoomEnded, RoomDrained and RoomOverdue."""

    def __init__(
        self,
        me: PeerId,
        hello: Callable[[bytes], Hello],
        timing: ControlConfig,
        transport: Callable[[Callable[[TransportEvent], None]], Transport],
        staging: ReceiveStaging | None = None,
    ) -> None:
        super().__init__(me.name, transport, staging)
        self._staging = staging
        self.endpoint = DecodeEndpoint(me, hello(self.transport.metadata), timing)
        self._settle_s = timing.fence_settle_s
        self._channel = DealerChannel(timing, self.inbox.fd)
        self._expected = 0
        self._thread.start()

    @property
    def staging_counters(self) -> Mapping[str, int]:
        return {} if self.endpoint.staging is None else self.endpoint.staging.counters

    def _step(self, now_s: float) -> None:
        frames = self._channel.poll(self.endpoint.wake_s - now_s)
        now_s = self._now()
        for item in self.inbox.drain():
            self._guarded(self._take, item, now_s)
        for address, raw in frames:
            self._guarded(self._act_frame, address, raw, now_s)
        self._act(self.endpoint.tick(now_s))
        if self.endpoint.num_expected != self._expected:
            self._expected = self.endpoint.num_expected
            self.transport.expect(self._expected)

    def _act_frame(self, address: str, raw: bytes, now_s: float) -> None:
        self._act(self.endpoint.on_frame(address, raw, now_s))

    def _take(self, item: Any, now_s: float) -> None:
        match item:
            case decode.OpenRoom():
                self._open(item, now_s)
            case decode.AbortRoom():
                self._act(self.endpoint.abort(item.key, item.error, now_s))
            case decode.RefuseRoom(key, ticket, address, error):
                self._act(self.endpoint.refuse(key, ticket, address, error, now_s))
            case Arrived():
                self._act(self.endpoint.on_arrival(item.tag, now_s))
            case CopyDone(Scattered(lease_id), error):
                self._act(self.endpoint.on_scattered(lease_id, error, now_s))
            case Fence():
                self._act(self.endpoint.fence(item.peer, now_s))
            case Settled():
                self._act(self.endpoint.settled(item.token, now_s))
            case PeerUnreachable():
                self.counters["peers_unreachable"] += 1

    def _open(self, item: decode.OpenRoom, now_s: float) -> None:
        try:
            actions = self.endpoint.open(item.promise, item.address, now_s)
        except RequestError as error:  # nobody has been told of the pages
            key = RoomKey(item.promise.room, item.promise.generation)
            actions = [receiver.RoomEnded(key, KVPoll.FAILED, error), receiver.RoomDrained(key)]
        self._act(actions)

    def _act(self, actions: list[decode_endpoint.Action]) -> None:
        for action in self._tell_first(actions, _DECODE_NEWS):
            self._guarded(self._do, action)

    def _do(self, action: decode_endpoint.Action) -> None:
        match action:
            case decode_endpoint.SendFrame():
                self._channel.send(action.address, action.raw)
            case decode_endpoint.Connect():
                self._connect(action.address)
            case Scatter():
                assert self._staging is not None
                self._staging.scatter(action)
            case decode_endpoint.Settle():
                self.transport.settle(action.token, self._settle_s)
            case decode_endpoint.Disconnect():
                self._channel.disconnect(action.address)

    def _connect(self, address: str) -> None:
        try:
            self._channel.connect(address)
        except ConfigError as error:
            self._act(self.endpoint.unreachable(address, error, self._now()))

    def _farewell(self) -> None:
        self._act(self.endpoint.farewell())

    def _close_channel(self) -> None:
        self._channel.close(linger_s=_FAREWELL_S)


class PrefillManager(_Manager):
    """Prefill's control thread. `events` brings Bootstrapped, RoomEnded and SourceFree."""

    def __init__(
        self,
        me: PeerId,
        bind: str,
        digest: ModelDigest,
        topology: Topology,
        timing: ControlConfig,
        transport: Callable[[Callable[[TransportEvent], None]], Transport],
        rank: int = 0,
        endpoints: tuple[str, ...] = (),
        staging: SendStaging | None = None,
    ) -> None:
        super().__init__(me.name, transport, staging)
        self._staging = staging
        self._rank = rank
        try:
            self._channel = RouterChannel(bind, timing, self.inbox.fd)
        except ConfigError:
            self.transport.close()
            if staging is not None:
                staging.close()
            self._close_inboxes()
            raise
        slot_bytes = 0 if staging is None else staging.buffer.area.lease_bytes
        self.endpoint = PrefillEndpoint(
            me, digest, topology, timing, ("", *endpoints), rank, slot_bytes
        )
        if staging is not None:
            staging.start_sending(rank, timing.resend_s, self.endpoint.next_job_id)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where decode workers reach this node."""
        return self._channel.endpoint

    @property
    def staging_counters(self) -> Mapping[str, int]:
        return {} if self._staging is None else self._staging.machine.counters

    def _step(self, now_s: float) -> None:
        staging = self._staging
        wake_s = (
            self.endpoint.wake_s
            if staging is None
            else min(self.endpoint.wake_s, staging.machine.wake_s)
        )
        frames = self._channel.poll(wake_s - now_s)
        now_s = self._now()
        for item in self.inbox.drain():
            self._guarded(self._take, item, now_s)
        for route, credential, raw in frames:
            self._guarded(self._act_frame, route, credential, raw, now_s)
        self._act(self.endpoint.tick(now_s))
        if staging is not None:
            self._act_staged(staging.machine.tick(now_s), now_s)

    def _act_frame(self, route: bytes, credential: str, raw: bytes, now_s: float) -> None:
        self._act(self.endpoint.on_frame(route, credential, raw, now_s))

    def _take(self, item: Any, now_s: float) -> None:
        endpoint = self.endpoint
        match item:
            case prefill.AddRoom():
                self._add(item, now_s)
            case prefill.SendChunk():
                what = item.first_page, item.src_pages, item.last, item.aux, item.ready
                self._act(endpoint.chunk(item.key, *what, now_s, item.state_slot))
            case prefill.AbortRoom():
                self._act(endpoint.abort(item.key, item.error, now_s))
            case WriteDone():
                self.counters["bytes_sent"] += item.num_bytes
                self.counters["writes_done"] += 1
                self._write_ended(item.job_id, None, True, now_s)
            case WriteFailed():
                self.counters["writes_failed"] += 1
                self._write_ended(item.job_id, item.error, item.drained, now_s)
                if (
                    not item.drained
                ):  # it holds decode's pages until the agent that posted it is gone
                    self.transport.renew()
            case WriteDrained():
                self.counters["writes_drained_by_renewal"] += 1
                if self._staging is not None and self._staging.machine.owns(item.job_id):
                    self._act_staged(self._staging.machine.on_write_drained(item.job_id), now_s)
                else:
                    self._act(endpoint.on_write_drained(item.job_id, now_s))
            case CopyDone(Gathered(gather_id), error):
                assert self._staging is not None
                self._act_staged(self._staging.machine.on_gathered(gather_id, error, now_s), now_s)
            case PeerUnreachable():
                self.counters["peers_unreachable"] += 1

    def _add(self, item: prefill.AddRoom, now_s: float) -> None:
        try:
            actions = self.endpoint.add(item.key, item.num_tokens, now_s)
        except (
            RequestError
        ) as error:  # its number is in use by a room whose end decode has not acknowledged
            actions = [
                sender.RoomEnded(item.key, KVPoll.FAILED, error),
                sender.SourceFree(item.key),
            ]
        self._act(actions)

    def _write_ended(
        self, job_id: int, error: Exception | None, drained: bool, now_s: float
    ) -> None:
        if self._staging is not None and self._staging.machine.owns(job_id):
            self._act_staged(
                self._staging.machine.on_write_ended(job_id, error, drained, now_s), now_s
            )
        else:
            self._act(self.endpoint.on_write_ended(job_id, error, drained, now_s))

    def _act(self, actions: list[prefill_endpoint.Action]) -> None:
        if self._staging is not None:
            for action in actions:
                if isinstance(action, sender.SourceFree):  # none of the room's writes is under way
                    self._staging.machine.forget(action.key)
        for action in self._tell_first(actions, _PREFILL_NEWS):
            self._guarded(self._do, action)

    def _act_staged(self, actions: list[staging_sender.Action], now_s: float) -> None:
        for action in actions:
            self._guarded(self._do_staged, action, now_s)

    def _do_staged(self, action: staging_sender.Action, now_s: float) -> None:
        assert self._staging is not None
        match action:
            case staging_sender.SendAsk():
                self._act(self.endpoint.say(action.peer, action.ask, now_s))
            case staging_sender.Gather():
                self._staging.gather(action)
            case staging_sender.PostStaged():
                self.transport.write(
                    self._staging.job(action, self.endpoint.me.incarnation, self._rank)
                )
            case staging_sender.CancelStaged():
                self.transport.cancel(action.write_id)
            case staging_sender.JobEnded():
                self._act(
                    self.endpoint.on_write_ended(action.job_id, action.error, action.drained, now_s)
                )
            case staging_sender.JobDrained():
                self._act(self.endpoint.on_write_drained(action.job_id, now_s))

    def _write(self, action: sender.PostWrite) -> None:
        if self._staging is not None and self._staging.takes(action.peer) and not action.state:
            now_s = self._now()
            staged = self._staging.machine.write(
                action.job_id, action.key, action.ticket, action.peer, action.first_unit,
                action.src_pages, action.ready, now_s,
            )  # fmt: skip
            self._act_staged(staged, now_s)
            return
        tag = ChunkTag(
            self.endpoint.me.incarnation, *action.key, rank=self._rank, chunk=action.chunk
        )
        route: Route = "state" if action.state else "pages"
        self.transport.write(
            WriteJob(
                action.job_id,
                action.peer,
                action.src_pages,
                action.dst_pages,
                tag,
                action.ready,
                route,
            )
        )

    def _cancel(self, job_id: int) -> None:
        if self._staging is not None:
            self._act_staged(self._staging.machine.cancel(job_id), self._now())
        self.transport.cancel(job_id)

    def _do(self, action: prefill_endpoint.Action) -> None:
        match action:
            case prefill_endpoint.SendFrame():
                self._channel.send(action.route, action.raw)
            case sender.PostWrite():
                self._write(action)
            case sender.CancelWrite():
                self._cancel(action.job_id)
            case prefill_endpoint.LeaseGranted():
                if self._staging is not None:
                    self._act_staged(
                        self._staging.machine.on_grant(action.peer, action.grant), self._now()
                    )
            case prefill_endpoint.AddPeer():
                more = action.parts, action.staging, action.state
                self.transport.add_peer(action.peer, action.metadata, action.layout, *more)
                if self._staging is not None:
                    self._staging.add_peer(action)
            case prefill_endpoint.RemovePeer():
                self.transport.remove_peer(action.peer)
                if self._staging is not None:
                    self._act_staged(self._staging.machine.remove_peer(action.peer), self._now())
                    self._staging.remove_peer(action.peer)

    def _farewell(self) -> None:
        self._act(self.endpoint.farewell())

    def _close_channel(self) -> None:
        self._channel.close(linger_s=_FAREWELL_S)
