"""The sockets of the control plane: a ROUTER on prefill, one DEALER per prefill worker on decode.
The only importer of zmq besides `connections`.

A socket belongs to the thread that made it. Nothing here waits but `poll`, and nothing queues
without bound: a frame that finds its queue full, or its peer gone, is counted and dropped; what
matters is repeated by the room machines. What peers can make the sockets hold is bounded by
`connections`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from prefixkv.addresses import check_address, is_loopback
from prefixkv.config import ControlConfig, short_key
from prefixkv.connections import (
    Bounds,
    Connection,
    Watched,
    Watcher,
    is_empty,
    message_bytes,
    receive,
)
from prefixkv.control.effects import ConnectFailed, FrameReceived, Reached, Unreached
from prefixkv.errors import ConfigError, HandshakeError, RefusedError
from prefixkv.protocol.messages import MAX_FRAME_BYTES
from prefixkv.runtime.closing import Closing
from prefixkv.runtime.fragments import MAX_MESSAGE_BYTES, FragmentError, Joiner, cut
from prefixkv.wakeups import Inbox

_REACHED = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_WRONG_ADDRESS = "a wrong address, or no prefill worker runs there"
_ZAP = "inproc://zeromq.zap.01"  # where libzmq asks which clients to let in
_NOT_LISTED = 400  # ZAP's status for a client that is turned away
_GREETING_BYTES = 64  # what each end of a ZeroMQ connection says first; its mechanism from byte 12
_CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(52, b"\0")
_GONE = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_QUEUED_MESSAGES = 16  # of one connection: 1 MiB
_KERNEL_BYTES = 128 << 10  # the kernel takes twice as many
_CONNECTION_BYTES = 3 << 19  # above the sum of both, so that no honest peer comes near it
_SOCKET_BYTES = 4 << 20
_UNREAD_BYTES = 32 << 20  # sent by us to one peer that does not read
_FRAMES_A_POLL = 256  # so that a flood from one side cannot keep the owner from its other work
_BYTES_A_POLL = 2 * MAX_FRAME_BYTES  # of one worker's frames
_BYTES_OF_ALL_A_POLL = 2 * _BYTES_A_POLL
_READS_A_POLL = 16 * _FRAMES_A_POLL  # messages per poll: fragments, and dropped ones among them


def _keys_differ(is_curve: bool) -> HandshakeError:
    ours, theirs = ("keys", "no keys") if is_curve else ("no keys", "keys")
    return HandshakeError("curve", ours, theirs, "differs (set keys on both sides, or on neither)")


def _came_from(frame: zmq.Frame) -> str:
    try:
        host = str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""
    return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"


class _Channel(Closing):
    """The parts of both ends: a context, a poller that also listens to a file descriptor, counters
    of drops, and the thread that watches connections. Owned by the control thread once built."""

    def __init__(self, config: ControlConfig, wake_fd: int) -> None:
        self._watcher = Watcher("prefixkv-connections")
        self.counters: Counter[str] = self._watcher.counters
        self._config = config
        self._is_curve = config.curve is not None
        self._wake_fd = wake_fd
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(wake_fd, zmq.POLLIN)

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        """Return a ZeroMQ socket of a control channel with every option set. Raises ValueError or
        ZMQError; nothing is left open."""
        check_address(address)
        sock = self._context.socket(kind)
        try:
            self._set_options(sock, address)
        except BaseException:
            sock.close()
            raise
        return sock

    def _set_options(self, sock: zmq.Socket[bytes], address: str) -> None:
        """Set the options that ROUTER and DEALER sockets share: length of the queue, pauses between
        reconnections, CURVE keys."""
        # Options take effect only before bind or connect.
        sock.setsockopt(zmq.IPV6, "[" in address)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, self._config.max_queued_frames)
        sock.setsockopt(zmq.RECONNECT_IVL, 20)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._config.curve is not None:
            public, secret = self._config.curve.public_key, self._config.curve.secret_key
            if zmq.curve_public(secret.encode()) != public.encode():
                raise ValueError(
                    f"the secret_key is not that of the public_key {short_key(public)}"
                )
            sock.curve_publickey = public.encode()
            sock.curve_secretkey = secret.encode()

    def _bounds(self) -> Bounds:
        # What is beyond the queue waits with the kernel, and then in the peer's own queue.
        return Bounds(
            MAX_MESSAGE_BYTES, min(_QUEUED_MESSAGES, self._config.max_queued_frames),
            _KERNEL_BYTES, _CONNECTION_BYTES, _SOCKET_BYTES, self._config.max_peers, _UNREAD_BYTES,
        )  # fmt: skip

    def _poll(self, timeout_s: float) -> list[Any]:
        """Wait on the channel's zmq poller, and return what is ready: descriptors of watched
        sockets, and monitors."""
        # zmq waits in whole milliseconds: round up, so that a short wait is not a busy one.
        timeout_ms = (
            None if timeout_s == float("inf") else max(0, int(timeout_s * 1000) + (timeout_s > 0))
        )
        ready: list[Any] = self._poller.poll(timeout_ms)
        return [sock for sock, _ in ready if sock != self._wake_fd]

    def _drop(self, why: str) -> None:
        self.counters[f"frames_not_sent: {why}"] += 1

    def close(self, linger_s: float = 0.0) -> None:
        # The watcher first: it holds duplicates of the sockets' descriptors and reads their
        # monitors.
        self._watcher.close()
        self._context.destroy(linger=int(linger_s * 1000))


class RouterChannel(_Channel):
    """Prefill's socket: many decode workers, each behind a route that the socket made up.

    Raises:
        ConfigError: the address cannot be bound; or other machines can reach it while no keys are
            set, and `allow_remote_without_keys` is not.
    """

    def __init__(self, bind: str, config: ControlConfig, wake_fd: int) -> None:
        # 1. Refused before anything is open: an address, or one that is open to the network without
        # keys.
        try:
            check_address(bind)
        except ValueError as error:
            raise ConfigError(f"bind is {bind!r}: {error}") from None
        if config.curve is None and not config.allow_remote_without_keys and not is_loopback(bind):
            raise ConfigError(
                f"bind is {bind!r}: other machines need CURVE keys, or allow_remote_without_keys"
            )
        super().__init__(config, wake_fd)
        self._joiner: Joiner[bytes] = Joiner()
        self._connections: dict[bytes, Connection] = {}  # by route; some have ended
        self._sock: zmq.Socket[bytes] | None = None
        self._failures: Inbox[int] = Inbox()  # codes of failed handshakes, from the watcher
        self._poller.register(self._failures.fd, zmq.POLLIN)
        try:
            # 2. The answers to ZAP, before the socket can be connected to.
            self._zap = self._context.socket(zmq.REP)
            self._zap.bind(_ZAP)
            self._poller.register(self._zap, zmq.POLLIN)
            sock = self._sock = self._socket(zmq.ROUTER, bind)
            # An unknown route is an error to count, not a silent drop.
            sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if config.curve is not None:
                sock.curve_server = True
            # 3. Watched before it is bound: a connection that came earlier would not be counted.
            bounds = self._bounds()
            self._watched = self._watcher.watch_bound(sock, bind, bounds, self._is_curve)
            self._watched.failed = self._failures.put
            sock.bind(bind)
            self._is_local = is_loopback(bind)
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise ConfigError(f"bind is {bind!r}: {error}") from error
        self.endpoint = sock.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller.register(self._watched.fd, zmq.POLLIN)

    def poll(self, timeout_s: float) -> list[FrameReceived[bytes] | ConnectFailed]:
        """Wait for decode workers' frames on the ROUTER socket, or for the wake-up descriptor, and
        return the frames, and the clients that were not let in. One worker's frames beyond its
        bytes per poll are dropped: all workers share the socket."""
        frames: list[FrameReceived[bytes] | ConnectFailed] = []
        assert self._sock is not None
        # Only an empty socket is slept on, see `Watched.may_sleep`. Awake, the watcher must know at
        # once that bytes may wait for us.
        may_sleep = self._watched.may_sleep(self._sock)
        ready = self._poll(timeout_s if may_sleep else 0.0)
        self._watched.is_waiting = False
        if self._failures.fd in ready:
            frames += self._failed_handshakes()
        if self._zap in ready:
            frames += self._let_in()
        if may_sleep and not ready:
            self._watched.found_empty()
            return frames
        # Read until one of the bounds: frames, bytes of all, messages, or nothing there. So the
        # control thread is back at its other work soon, however much peers send.
        taken: dict[bytes, int] = {}
        taken_of_all = 0
        for number in range(_READS_A_POLL):
            if len(frames) == _FRAMES_A_POLL or taken_of_all > _BYTES_OF_ALL_A_POLL:
                break
            # After the first message it is asked, since an exception costs three times as much.
            if number and is_empty(self._sock):
                self._watched.found_empty()
                break
            try:
                received = receive(self._sock, self._watched)
            except zmq.Again:
                self._watched.found_empty()
                break
            if received is None:
                break
            parts, connection = received
            # A route and one message. More parts come from no socket of ours.
            if len(parts) != 2:
                self.counters["frames_malformed"] += 1
                continue
            route, message = parts[0].bytes, parts[1]
            self._note(route, connection)
            taken[route] = taken.get(route, 0) + len(message)
            taken_of_all += len(message)
            # Its unfinished frame is dropped too: its next fragments would not fit on it.
            if taken[route] > _BYTES_A_POLL:
                self._joiner.forget(route)
                self.counters["frames_over_budget"] += 1
                continue
            try:
                raw = self._joiner.join(route, message.bytes)
            except FragmentError:
                self.counters["frames_malformed"] += 1
                continue
            # `Peer-Address` decides whether the sender is on this machine where the bind is not
            # loopback.
            if raw is not None:
                frame = FrameReceived(
                    route,
                    raw,
                    credential=self._credential(message),
                    is_local=self._is_local or is_loopback(_came_from(message)),
                )
                frames.append(frame)
        return frames

    def _let_in(self) -> Iterator[ConnectFailed]:
        """Answer libzmq, which asks for each CURVE client whether its key is allowed; yield those
        that are turned away."""
        curve = self._config.curve
        with suppress(zmq.Again):
            for _ in range(_FRAMES_A_POLL):
                version, number, _, host, _, _, key = self._zap.recv_multipart(zmq.DONTWAIT)
                text = z85.encode(key).decode()
                is_listed = curve is not None and text in curve.allowed_clients
                code, user = (200, text) if is_listed else (_NOT_LISTED, "")
                answer = version, number, b"%d" % code, b"", user.encode(), b""
                self._zap.send_multipart(answer)
                if not is_listed:
                    why = (
                        f"its key {short_key(text)!r} is not in our allowed_clients: list it there"
                    )
                    yield ConnectFailed(
                        host.decode(), ConfigError(f"{why} under its worker's name")
                    )

    def _failed_handshakes(self) -> Iterator[ConnectFailed]:
        """Yield the clients that ended in the handshake because of their keys. libzmq does not say
        from where they came."""
        client, curve = f"a client of {self.endpoint}", self._config.curve
        for code in self._failures.drain():
            if code == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                yield ConnectFailed(client, _keys_differ(self._is_curve))
            elif code == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC and curve is not None:
                ours, why = short_key(curve.public_key), "of the client is not our public_key"
                yield ConnectFailed(client, HandshakeError("server_key", ours, "another", why))

    def _note(self, route: bytes, connection: Connection | None) -> None:
        if connection is None or self._connections.get(route) is connection:
            return
        self._connections[route] = connection
        # Routes of ended connections are removed now and then, so that reconnecting peers do not
        # make the table grow.
        if len(self._connections) > 2 * self._watched.most:
            for other, one in list(self._connections.items()):
                if one.is_over:
                    del self._connections[other]
                    self._joiner.forget(other)

    def _credential(self, frame: zmq.Frame) -> str:
        return str(frame.get("User-Id")) if self._config.curve is not None else ""

    def send(self, route: bytes, raw: bytes) -> None:
        """Queue a frame on the ROUTER socket for the decode worker behind `route`. One that cannot
        be queued is counted and dropped."""
        assert self._sock is not None
        connection = self._connections.get(route)
        try:
            # A frame that is queued in part is lost at the other end, as any frame may be.
            for message in cut(raw):
                self._sock.send_multipart((route, message), zmq.DONTWAIT)
                self._watched.gave(connection, message_bytes(len(message), self._is_curve))
        except zmq.Again:
            self._drop("queue full")
        except zmq.ZMQError as error:
            self._drop(str(error.strerror))

    def close(self, linger_s: float = 0.0) -> None:
        """Stop the monitor, then close the ROUTER socket. See `_Channel.close`."""
        # The monitor is ended before the watcher, which reads it: libzmq may wait for that.
        if self._sock is not None and not self._sock.closed:
            self._sock.disable_monitor()
        super().close(linger_s)
        self._failures.close()


class _Probe:
    """A plain TCP connection to an address, for the greeting of what listens there."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._heard = b""
        self.sock = context.socket(zmq.STREAM)
        self.sock.setsockopt(zmq.IPV6, "[" in address)
        self.sock.setsockopt(zmq.LINGER, 0)
        self.sock.setsockopt(zmq.RECONNECT_IVL, 1000)
        self.sock.connect(address)

    @property
    def is_curve(self) -> bool:
        return self._heard[12:17] == b"CURVE"

    def read(self) -> None:
        """Take what the connection has brought; a new one is greeted, since the other end waits for
        that."""
        with suppress(zmq.ZMQError):
            route, raw = self.sock.recv_multipart(zmq.DONTWAIT)
            if raw:
                self._heard = (self._heard + raw)[:_GREETING_BYTES]
            elif not self.is_curve:
                self._heard = b""
                self.sock.send_multipart((route, _CURVE_GREETING), zmq.DONTWAIT)


class DealerChannel(_Channel):
    """Decode's sockets: one per prefill worker's address.

    `check` raises ConfigError for an address that KV would not come from.
    """

    def __init__(
        self, config: ControlConfig, wake_fd: int, check: Callable[[str], None] = lambda _: None
    ) -> None:
        super().__init__(config, wake_fd)
        self._check = check
        self._socks: dict[str, zmq.Socket[bytes]] = {}
        self._addresses: dict[object, str] = {}  # by the watched descriptor, and by the monitor
        self._monitors: dict[str, zmq.Socket[bytes]] = {}
        self._watched: dict[str, Watched] = {}
        self._joiner: Joiner[str] = Joiner()
        self._abandoned: set[str] = set()  # addresses that libzmq does not connect to by itself
        self._probes: dict[str, _Probe] = {}  # of addresses that ended a handshake under keys

    def connect(self, address: str) -> None:
        """Open a DEALER socket for the prefill worker at `address`, if it has none; connecting goes
        on by itself.

        Raises:
            ConfigError: it is no address, or `check` refuses it; nothing is left open.
        """
        if address in self._socks:
            return
        sock: zmq.Socket[bytes] | None = None
        monitor: zmq.Socket[bytes] | None = None
        watched: Watched | None = None
        # Monitored and watched before it connects, so that neither misses the first event.
        try:
            sock = self._socket(zmq.DEALER, address)
            if self._config.curve is not None:
                sock.curve_serverkey = self._config.curve.server_key.encode()
            monitor = sock.get_monitor_socket(_GONE | _REACHED)
            bounds = self._bounds()
            watched = self._watcher.watch_connected(sock, address, bounds, self._is_curve)
            sock.connect(address)
            self._check(address)  # nothing is sent yet
        except (zmq.ZMQError, ValueError, ConfigError) as error:
            # Undo all that was made, the watcher's part included.
            for made in (sock, monitor):
                if made is not None:
                    made.close()
            if watched is not None:
                self._watcher.forget(watched)
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"prefill is {address!r}: {error}") from error
        self._socks[address], self._monitors[address] = sock, monitor
        self._watched[address] = watched
        for one in (watched.fd, monitor):
            self._addresses[one] = address
            self._poller.register(one, zmq.POLLIN)

    def disconnect(self, address: str) -> None:
        """Close the DEALER socket for this address; frames that are queued may still leave for a
        second."""
        sock = self._socks.pop(address, None)
        if sock is not None:
            monitor = self._monitors.pop(address)
            watched = self._watched.pop(address)
            # Out of the poller before they are closed: their numbers may be used again at once.
            self._watcher.forget(watched)
            self._joiner.forget(address)
            self._abandoned.discard(address)
            self._end_probe(address)
            for one in (watched.fd, monitor):
                del self._addresses[one]
                self._poller.unregister(one)
            sock.disable_monitor()
            monitor.close()
            sock.close(linger=1000)

    def poll(
        self, timeout_s: float
    ) -> list[FrameReceived[str] | Reached | Unreached | ConnectFailed]:
        """Wait on the DEALER sockets, and return frames, changes of connections, or nothing if the
        wake-up descriptor ended it."""
        frames: list[FrameReceived[str] | Reached | Unreached | ConnectFailed] = []
        # Sockets that hold something already: their descriptors do not become readable for it.
        full = [
            watched.fd
            for address, watched in self._watched.items()
            if not watched.may_sleep(self._socks[address])
        ]
        ready = self._poll(0.0 if full else timeout_s)
        for watched in self._watched.values():
            watched.is_waiting = False
        # Each socket is read up to its own bounds, so that one worker's flood does not delay
        # others.
        for one in dict.fromkeys([*ready, *full]):
            address = self._addresses[one]
            if one is self._monitors[address]:
                frames += self._monitor_changes(one, address)
                continue
            probe = self._probes.get(address)
            if probe is not None and one is probe.sock:
                probe.read()
                continue
            sock = self._socks[address]
            num_bytes = 0
            for number in range(_FRAMES_A_POLL):
                # The rest waits in this worker's own socket.
                if num_bytes >= _BYTES_A_POLL:
                    break
                if number and is_empty(sock):  # as in `RouterChannel.poll`
                    self._watched[address].found_empty()
                    break
                try:
                    received = receive(sock, self._watched[address])
                except zmq.Again:
                    self._watched[address].found_empty()
                    break
                if received is None:
                    break
                parts, _ = received
                num_bytes += sum(map(len, parts))
                try:
                    if len(parts) != 1:
                        raise FragmentError("a message of several parts")
                    raw = self._joiner.join(address, parts[0].bytes)
                except FragmentError:
                    self.counters["frames_malformed"] += 1
                    continue
                if raw is not None:
                    frames.append(FrameReceived(address, raw, is_local=is_loopback(address)))
        return frames

    def _monitor_changes(
        self, monitor: zmq.Socket[bytes], address: str
    ) -> Iterator[Reached | Unreached | ConnectFailed]:
        """Yield the last change that a DEALER socket's zmq monitor reports for its connection, and
        whether keys are in the way of it; pass all to the watcher."""
        last: Reached | Unreached | None = None
        error: HandshakeError | None = None
        with suppress(zmq.Again):
            while True:
                change = recv_monitor_message(monitor, zmq.DONTWAIT)
                event, value = change["event"], change["value"]
                # Connected is not reached: the handshake is still to come.
                if event == zmq.EVENT_CONNECTED:
                    self._watcher.came(self._watched[address], value)
                    continue
                if event == zmq.EVENT_DISCONNECTED:
                    self._watcher.went(self._watched[address], value)
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    last, error = Reached(address), None
                    self._end_probe(address)
                    continue
                error = self._wrong_keys(address, event, value) or error
                if event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                    self._abandoned.add(address)
                last = Unreached(address, "no answer", _WRONG_ADDRESS)
        if last is not None:
            yield last
        if error is not None:
            yield ConnectFailed(address, error)

    def _wrong_keys(self, address: str, event: int, value: int) -> HandshakeError | None:
        curve = self._config.curve
        mismatch = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == mismatch:
            return _keys_differ(self._is_curve)
        if curve is None:
            return None
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == _NOT_LISTED:
            key = short_key(curve.public_key)
            why = f"our key {key!r} is not in the allowed_clients of {address}: list it there"
            return RefusedError("prefill", f"{why} under this worker's name")
        # A server that cannot read what is encrypted for another key ends the connection, as one
        # does that is closed, or a relay with nothing behind it. So it is asked for its greeting,
        # and named if it goes on after that.
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            probe = self._probes.get(address)
            if probe is not None and probe.is_curve:
                why = f"is not the public key of {address} (set it to that)"
                return HandshakeError("server_key", short_key(curve.server_key), "another", why)
            if probe is None and address.startswith("tcp:"):
                probe = self._probes[address] = _Probe(self._context, address)
                self._addresses[probe.sock] = address
                self._poller.register(probe.sock, zmq.POLLIN)
        return None

    def _end_probe(self, address: str) -> None:
        probe = self._probes.pop(address, None)
        if probe is not None:
            del self._addresses[probe.sock]
            self._poller.unregister(probe.sock)
            probe.sock.close()

    def send(self, address: str, raw: bytes) -> None:
        """Queue a frame on the DEALER socket of the prefill worker at `address`. One that cannot be
        queued is counted and dropped."""
        sock = self._socks.get(address)
        if sock is None:
            self._drop("not connected")
            return
        # libzmq tries no more after an answer that refuses it. The keys may be right by now.
        if address in self._abandoned:
            self._abandoned.discard(address)
            sock.disconnect(address)
            sock.connect(address)
        try:
            for message in cut(raw):
                sock.send(message, zmq.DONTWAIT)
        except zmq.Again:
            self._drop("queue full")
