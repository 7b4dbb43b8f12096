"""The sockets of the control plane: a ROUTER on prefill, one DEALER per prefill worker on decode.

A socket belongs to the thread that made it. Nothing here waits but `poll`, and nothing queues
without bound: a frame that finds its queue full, or its peer gone, is counted and dropped; what
matters is repeated by the room machines.

`set_bounds` bounds messages, by libzmq and the kernel. `Newcomers` bounds the connections that have
only begun. What a peer sends, or does not read, is not counted beyond that: see docs/security.md.
"""

from __future__ import annotations

import os
import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any, Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from prefixkv.config import ControlConfig, check_address, is_loopback, short_key
from prefixkv.control.effects import ConnectFailed, FrameReceived, Reached, Unreached
from prefixkv.errors import ConfigError, HandshakeError, RefusedError
from prefixkv.protocol.messages import MAX_FRAME_BYTES
from prefixkv.settings import is_loopback_host
from prefixkv.threads import Closing, undoing

CONNECT_MS: Final = 2000
"""Milliseconds of an attempt to connect, in which TCP asks twice."""
HANDSHAKE_S: Final = 10.0
"""Seconds after which libzmq ends a connection that has not shaken hands."""

_DESCRIPTORS: Final = 4  # a quarter of the process's, for the newcomers of one socket
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
# As integers: pyzmq's enumerations take longer to combine than the call.
_EVENTS_OPTION: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)

_Socket = zmq.Socket[bytes]


def set_bounds(sock: _Socket, message_bytes: int, queued_messages: int, kernel_bytes: int) -> None:
    """Set the bounds of each connection of a ZeroMQ socket, before it is bound or connected.

    `message_bytes`: of a part of a message. `queued_messages`: that wait for the owner.
    `kernel_bytes`: that wait with the kernel, as `SO_RCVBUF` counts.
    """
    sock.setsockopt(zmq.MAXMSGSIZE, message_bytes)
    sock.setsockopt(zmq.RCVHWM, queued_messages)
    sock.setsockopt(zmq.RCVBUF, kernel_bytes)
    sock.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))


class Newcomers:
    """The accepted TCP connections without a message yet: of more than `most`, the oldest is ended.

    So connections that do not shake hands cannot take all descriptors. Those of a PUB socket, which
    hears no messages, are newcomers for as long as they last.

    Created before the socket is bound. `counters` has "connections_cut" once one was ended.
    """

    def __init__(self, sock: _Socket, most: int, counters: Counter[str]) -> None:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = max(16, min(most, descriptors // _DESCRIPTORS))
        self._counters = counters
        self._sock = sock
        self._accepted: dict[int, None] = {}  # libzmq's descriptors, the oldest first
        address = f"inproc://monitor-{sock.FD}"
        sock.monitor(address, _EVENTS)
        self.monitor = sock.context.socket(zmq.PAIR)
        # Without a limit: libzmq's thread would wait for the owner with a lock that `close` needs.
        self.monitor.setsockopt(zmq.RCVHWM, 0)
        self.monitor.connect(address)
        # Readable when `read`, which reads all, has something to do, once it was found empty here.
        # Polled in the socket's place: of each socket of a poll zmq asks the state several times.
        self.fd: int = self.monitor.FD
        self.monitor.poll(0)

    def read(self) -> list[int]:
        """Take what libzmq reports of the connections; return the codes of failed handshakes."""
        failed: list[int] = []
        with suppress(zmq.Again):
            while True:
                change = recv_monitor_message(self.monitor, zmq.DONTWAIT)
                event, value = change["event"], change["value"]
                if event == zmq.EVENT_ACCEPTED:
                    self._accepted.pop(value, None)  # what had this descriptor before has gone
                    self._accepted[value] = None
                    if len(self._accepted) > self._most:
                        oldest = next(iter(self._accepted))
                        del self._accepted[oldest]
                        self._end(oldest)
                elif event == zmq.EVENT_DISCONNECTED:
                    self._accepted.pop(value, None)
                else:
                    failed.append(value)
        return failed

    def heard(self, frame: zmq.Frame) -> None:
        """Note that a message has come, of which this is a part."""
        if self._accepted:  # else the descriptor need not be looked up
            with suppress(zmq.ZMQError):  # ipc
                self._accepted.pop(int(frame.get(zmq.SRCFD)), None)

    def close(self) -> None:
        """Stop the monitor, before the socket is closed."""
        if not self._sock.closed:
            self._sock.disable_monitor()
        self.monitor.close(linger=0)

    def _end(self, fd: int) -> None:
        """No-op if the descriptor is another's by now."""
        port = self._sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as link:
            is_tcp = link.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and str(link.getsockname()[1]) == port:
                link.shutdown(socket.SHUT_RDWR)
                self._counters["connections_cut"] += 1


_REACHED = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_WRONG_ADDRESS = "a wrong address, or no prefill worker runs there"
_WRONG_KEY = f"server_key is not its public key, or {_WRONG_ADDRESS}"
_ZAP = "inproc://zeromq.zap.01"  # where libzmq asks which clients to let in
_NOT_LISTED = 400  # ZAP's status for a client that is turned away
_GONE = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_CURVE_BYTES = 64  # CURVE's own bytes in a frame are fewer
_QUEUED_MESSAGES = 16  # of one connection
_KERNEL_BYTES = 128 << 10  # the kernel takes twice as many
_FRAMES_A_POLL = 256  # so that many frames do not keep the owner from its other work


def _keys_differ(is_curve: bool) -> HandshakeError:
    ours, theirs = ("keys", "no keys") if is_curve else ("no keys", "keys")
    return HandshakeError("curve", ours, theirs, "differs (set keys on both sides, or on neither)")


def _is_near(frame: zmq.Frame) -> bool:
    with suppress(zmq.ZMQError):
        # A socket of IPv6 has IPv4's addresses as its own.
        return is_loopback_host(str(frame.get("Peer-Address")).removeprefix("::ffff:"))
    return False


class _Channel(Closing):
    """A context, a poller that also listens to a file descriptor, and counters of drops. Owned by
    the control thread once built."""

    def __init__(self, config: ControlConfig, wake_fd: int) -> None:
        self.counters: Counter[str] = Counter()
        self._config = config
        self._is_curve = config.curve is not None
        self._wake_fd = wake_fd
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Three for each address of decode's; by itself libzmq allows 1,023.
        self._context.set(zmq.MAX_SOCKETS, 1 << 14)
        self._poller = zmq.Poller()
        self._poller.register(wake_fd, zmq.POLLIN)

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        """Raises ValueError or ZMQError; nothing is left open."""
        check_address(address)
        sock = self._context.socket(kind)
        with undoing(sock.close):
            self._set_options(sock, address)
        return sock

    def _set_options(self, sock: zmq.Socket[bytes], address: str) -> None:
        # Options take effect only before bind or connect.
        sock.setsockopt(zmq.IPV6, "[" in address)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, self._config.max_queued_frames)
        queued = min(_QUEUED_MESSAGES, self._config.max_queued_frames)
        set_bounds(sock, MAX_FRAME_BYTES + _CURVE_BYTES, queued, _KERNEL_BYTES)
        sock.setsockopt(zmq.RECONNECT_IVL, 20)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        # From a machine that is gone nothing comes back: by itself TCP tries for two minutes.
        sock.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        if self._config.curve is not None:
            public, secret = self._config.curve.public_key, self._config.curve.secret_key
            if zmq.curve_public(secret.encode()) != public.encode():
                raise ValueError(
                    f"the secret_key is not that of the public_key {short_key(public)}"
                )
            sock.curve_publickey = public.encode()
            sock.curve_secretkey = secret.encode()

    def _poll(self, timeout_s: float) -> list[Any]:
        # zmq waits in whole milliseconds: round up, so that a short wait is not a busy one.
        timeout_ms = None if timeout_s == inf else max(0, int(timeout_s * 1000) + (timeout_s > 0))
        ready: list[Any] = self._poller.poll(timeout_ms)
        return [sock for sock, _ in ready if sock != self._wake_fd]

    def _messages(
        self, sock: zmq.Socket[bytes], num_parts: int, newcomers: Newcomers | None = None
    ) -> Iterator[list[zmq.Frame]]:
        """Yield up to `_FRAMES_A_POLL` messages that have come, so that no socket delays the
        others. Other numbers of parts come from no socket of ours."""
        for number in range(_FRAMES_A_POLL):
            # After the first message it is asked, since an exception costs three times as much.
            if number and not int(sock.getsockopt(_EVENTS_OPTION)) & _POLLIN:
                return
            try:
                parts = sock.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            if newcomers is not None:
                newcomers.heard(parts[-1])
            if len(parts) == num_parts:
                yield parts
            else:
                self.counters["frames_malformed"] += 1

    def _drop(self, why: str) -> None:
        self.counters[f"frames_not_sent: {why}"] += 1

    def close(self, linger_s: float = 0.0) -> None:
        """Close every socket; queued frames may leave for `linger_s` more."""
        self._context.destroy(linger=int(linger_s * 1000))


class RouterChannel(_Channel):
    """Prefill's socket: many decode workers, each behind a route that the socket made up. Raises
    ConfigError: the address cannot be bound; or other machines can reach it while no keys are set,
    and `network_is_isolated` is not."""

    def __init__(self, bind: str, config: ControlConfig, wake_fd: int) -> None:
        # 1. Refused before anything is open: an address, or one that is open to the network without
        # keys.
        try:
            check_address(bind)
        except ValueError as error:
            raise ConfigError(f"bind is {bind!r}: {error}") from None
        if config.curve is None and not config.network_is_isolated and not is_loopback(bind):
            raise ConfigError(
                f"bind is {bind!r}: other machines may reach it: set CURVE keys, or "
                "network_is_isolated if only workers are on that network"
            )
        super().__init__(config, wake_fd)
        self._newcomers: Newcomers | None = None
        try:
            # 2. The answers to ZAP, before the socket can be connected to.
            self._zap: zmq.Socket[bytes] | None = None
            if config.curve is not None:
                self._zap = self._context.socket(zmq.REP)
                self._zap.bind(_ZAP)
                self._poller.register(self._zap, zmq.POLLIN)
            self._sock = sock = self._socket(zmq.ROUTER, bind)
            # An unknown route is an error to count, not a silent drop.
            sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if config.curve is not None:
                sock.curve_server = True
            # 3. Before it is bound: a connection that came earlier would not be counted.
            self._newcomers = Newcomers(sock, config.max_peers, self.counters)
            self._poller.register(self._newcomers.fd, zmq.POLLIN)
            sock.bind(bind)
            self._is_local = is_loopback(bind)
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise ConfigError(f"bind is {bind!r}: {error}") from error
        self.endpoint = sock.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller.register(sock, zmq.POLLIN)

    def poll(self, timeout_s: float) -> list[FrameReceived[bytes] | ConnectFailed]:
        """Wait for frames, or for the wake-up descriptor, and return the frames, and the clients
        that were not let in."""
        frames: list[FrameReceived[bytes] | ConnectFailed] = []
        assert self._newcomers is not None
        ready = self._poll(timeout_s)
        # First: a connection is known before its messages are read.
        if self._newcomers.fd in ready:
            frames += self._failed_handshakes(self._newcomers.read())
        if self._zap is not None and self._zap in ready:
            frames += self._let_in(self._zap)
        if self._sock not in ready:
            return frames
        # `Peer-Address` decides whether the sender is on this machine where the bind is not
        # loopback.
        for route, message in self._messages(self._sock, 2, self._newcomers):
            credential = str(message.get("User-Id")) if self._is_curve else ""
            is_local = self._is_local or _is_near(message)
            frames.append(FrameReceived(route.bytes, message.bytes, credential, is_local))
        return frames

    def _let_in(self, zap: zmq.Socket[bytes]) -> Iterator[ConnectFailed]:
        """Answer libzmq, which asks for each CURVE client whether its key is allowed."""
        curve = self._config.curve
        with suppress(zmq.Again):
            for _ in range(_FRAMES_A_POLL):
                version, number, _, host, _, _, key = zap.recv_multipart(zmq.DONTWAIT)
                text = z85.encode(key).decode()
                is_listed = curve is not None and text in curve.allowed_clients
                code, user = (200, text) if is_listed else (_NOT_LISTED, "")
                zap.send_multipart((version, number, b"%d" % code, b"", user.encode(), b""))
                if not is_listed:
                    why = f"its key {short_key(text)!r} is not in our allowed_clients"
                    error = ConfigError(f"{why}: list it there under its worker's name")
                    yield ConnectFailed(host.decode(), error)

    def _failed_handshakes(self, codes: list[int]) -> Iterator[ConnectFailed]:
        """libzmq does not say from where these clients came."""
        client, curve = f"a client of {self.endpoint}", self._config.curve
        for code in codes:
            if code == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                yield ConnectFailed(client, _keys_differ(self._is_curve))
            elif code == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC and curve is not None:
                ours, why = short_key(curve.public_key), "of the client is not our public_key"
                yield ConnectFailed(client, HandshakeError("server_key", ours, "another", why))

    def send(self, route: bytes, raw: bytes) -> None:
        """Queue a frame for `route`. If that cannot be, it is counted and dropped."""
        try:
            self._sock.send_multipart((route, raw), zmq.DONTWAIT)
        except zmq.Again:
            self._drop("queue full")
        except zmq.ZMQError as error:
            self._drop(str(error.strerror))

    def close(self, linger_s: float = 0.0) -> None:
        """Stop the monitor, then close as `_Channel.close`."""
        if self._newcomers is not None:
            self._newcomers.close()
        super().close(linger_s)


@dataclass(slots=True, eq=False)
class _Line:
    """What a dealer has for one address."""

    address: str
    sock: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    fd: int  # the monitor's, see `Newcomers`
    guess: str = _WRONG_ADDRESS  # why there is no answer
    is_abandoned: bool = False  # libzmq does not connect by itself


class DealerChannel(_Channel):
    """Decode's sockets: one per prefill worker's address.

    `check` raises ConfigError for an address that KV would not come from.
    """

    def __init__(
        self, config: ControlConfig, wake_fd: int, check: Callable[[str], None] = lambda _: None
    ) -> None:
        super().__init__(config, wake_fd)
        self._check = check
        self._lines: dict[str, _Line] = {}
        self._line_of: dict[object, _Line] = {}  # by what is polled: socket, monitor's descriptor

    def connect(self, address: str) -> None:
        """Open a socket for `address`, if it has none; connecting goes on by itself. Raises
        ConfigError, with nothing left open, if it is no address, or `check` refuses it."""
        if address in self._lines:
            return
        made: list[zmq.Socket[bytes]] = []
        # Monitored before it connects, so that the first event is not missed.
        try:
            made.append(sock := self._socket(zmq.DEALER, address))
            if self._config.curve is not None:
                sock.curve_serverkey = self._config.curve.server_key.encode()
            made.append(sock.get_monitor_socket(_GONE | _REACHED))
            made[1].poll(0)  # as in `Newcomers`
            sock.connect(address)
            self._check(address)  # nothing is sent yet
        except (zmq.ZMQError, ValueError, ConfigError) as error:
            for one in made:
                one.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"prefill is {address!r}: {error}") from error
        self._lines[address] = line = _Line(address, made[0], made[1], made[1].FD)
        for polled in (line.sock, line.fd):
            self._line_of[polled] = line
            self._poller.register(polled, zmq.POLLIN)

    def disconnect(self, address: str) -> None:
        """Close the socket for this address; queued frames may still leave for a second."""
        line = self._lines.pop(address, None)
        if line is not None:
            # Out of the poller before they are closed.
            for one in (line.sock, line.fd):
                del self._line_of[one]
                self._poller.unregister(one)
            line.sock.disable_monitor()
            line.monitor.close()
            line.sock.close(linger=1000)

    def poll(
        self, timeout_s: float
    ) -> list[FrameReceived[str] | Reached | Unreached | ConnectFailed]:
        """Wait, and return frames, changes of connections, or nothing if woken up."""
        frames: list[FrameReceived[str] | Reached | Unreached | ConnectFailed] = []
        for one in self._poll(timeout_s):
            line = self._line_of[one]
            if one == line.fd:
                frames += self._monitor_changes(line)
                continue
            is_local = is_loopback(line.address)
            for (message,) in self._messages(one, 1):
                frames.append(FrameReceived(line.address, message.bytes, is_local=is_local))
        return frames

    def _monitor_changes(self, line: _Line) -> Iterator[Reached | Unreached | ConnectFailed]:
        """Yield the last change of the connection, and whether keys are in the way of it."""
        last: Reached | Unreached | None = None
        error: HandshakeError | None = None
        with suppress(zmq.Again):
            while True:
                change = recv_monitor_message(line.monitor, zmq.DONTWAIT)
                event, value = change["event"], change["value"]
                # Connected is not reached: the handshake is still to come.
                if event == zmq.EVENT_CONNECTED:
                    continue
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    last, error, line.guess = Reached(line.address), None, _WRONG_ADDRESS
                    continue
                error = self._wrong_keys(line, event, value) or error
                if event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                    line.is_abandoned = True
                last = Unreached(line.address, "no answer", line.guess)
        if last is not None:
            yield last
        if error is not None:
            yield ConnectFailed(line.address, error)

    def _wrong_keys(self, line: _Line, event: int, value: int) -> HandshakeError | None:
        curve = self._config.curve
        mismatch = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == mismatch:
            return _keys_differ(self._is_curve)
        if curve is None:
            return None
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == _NOT_LISTED:
            key, what = short_key(curve.public_key), f"the allowed_clients of {line.address}"
            why = f"our key {key!r} is not in {what}: list it there under this worker's name"
            return RefusedError("prefill", why)
        # A server that cannot read what is encrypted for another key ends the connection, as one
        # does that is closed, or a relay with nothing behind it.
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            line.guess = _WRONG_KEY
        return None

    def send(self, address: str, raw: bytes) -> None:
        """Queue a frame for `address`. One that cannot be queued is counted and dropped."""
        line = self._lines.get(address)
        if line is None:
            self._drop("not connected")
            return
        # libzmq tries no more after an answer that refuses it. The keys may be right by now.
        if line.is_abandoned:
            line.is_abandoned = False
            line.sock.disconnect(address)
            line.sock.connect(address)
        try:
            line.sock.send(raw, zmq.DONTWAIT)
        except zmq.Again:
            self._drop("queue full")
