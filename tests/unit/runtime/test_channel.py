"""The sockets: frames both ways, what is dropped and counted, and who gets in."""

import gc
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from prefixkv.config import ControlConfig, CurveConfig, is_loopback, short_key
from prefixkv.control.effects import ConnectFailed, FrameReceived, Reached, Unreached
from prefixkv.errors import ConfigError, HandshakeError
from prefixkv.protocol.messages import MAX_FRAME_BYTES
from prefixkv.runtime import channel
from prefixkv.runtime.channel import DealerChannel, RouterChannel
from tests.support.patience import PATIENCE_S, lasting_address, returned, until

LOCAL = "tcp://127.0.0.1:*"


class Ends:
    """Opens channels that share a wake-up descriptor, and closes them."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        stack.callback(os.close, self.wake_fd)

    def router(self, config: ControlConfig | None = None, bind: str = LOCAL) -> RouterChannel:
        return self.stack.enter_context(
            RouterChannel(bind, config or ControlConfig(), self.wake_fd)
        )

    def dealer(self, address: str, config: ControlConfig | None = None) -> DealerChannel:
        dealer = self.stack.enter_context(DealerChannel(config or ControlConfig(), self.wake_fd))
        dealer.connect(address)
        return dealer

    def raw(self, kind: int, address: str, **options: Any) -> zmq.Socket[bytes]:
        """A socket of no channel's: somebody else's program."""
        sock = self.stack.enter_context(zmq.Context()).socket(kind)
        self.stack.callback(sock.close, linger=0)
        for name, value in options.items():
            setattr(sock, name, value)
        sock.connect(address)
        return sock


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(stack)


def heard(
    channel: Any, kind: Any = FrameReceived, want: int = 1, patience_s: float = PATIENCE_S
) -> list[Any]:
    """At least `want` of this kind, or what came before patience ended."""
    found: list[Any] = []
    deadline_s = time.monotonic() + patience_s
    while len(found) < want and time.monotonic() < deadline_s:
        found += [got for got in channel.poll(0.01) if isinstance(got, kind)]
    return found


def polled(channel: Any, want: int = 1, patience_s: float = PATIENCE_S) -> list[Any]:
    """Frames: (address, frame) of a dealer's, (route, credential, frame) of a router's."""
    frames = heard(channel, want=want, patience_s=patience_s)
    if isinstance(channel, RouterChannel):
        return [(got.source, got.credential, got.raw) for got in frames]
    assert not any(got.credential for got in frames)
    return [(got.source, got.raw) for got in frames]


@pytest.mark.parametrize("side", ["router", "dealer"])
def test_poll_ends_when_the_descriptor_is_written(ends: Ends, side: str) -> None:
    router = ends.router()
    channel = router if side == "router" else ends.dealer(router.endpoint)
    if isinstance(channel, DealerChannel):
        assert news(channel) == Reached(router.endpoint)
    timer = threading.Timer(0.05, os.eventfd_write, (ends.wake_fd, 1))
    timer.start()
    assert returned(lambda: channel.poll(float("inf"))) == []
    timer.join()


def test_poll_waits_as_long_as_it_says(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded up to whole milliseconds: rounded down, a short wait would be a busy one."""
    router = ends.router()
    before_s = time.monotonic()
    assert router.poll(0.03) == []
    assert time.monotonic() - before_s >= 0.03
    waits_ms: list[int | None] = []
    monkeypatch.setattr(
        router._poller, "poll", lambda timeout_ms: waits_ms.append(timeout_ms) or []
    )
    for timeout_s in (0.0004, 0.0304, 0.0, -1.0, float("inf")):
        assert router.poll(timeout_s) == []
    assert waits_ms == [1, 31, 0, 0, None]


def test_a_poll_takes_a_bounded_share_of_a_flood(ends: Ends) -> None:
    router = ends.router()
    dealer = ends.dealer(router.endpoint)
    for i in range(1000):
        dealer.send(router.endpoint, b"%d" % i)
    frames: list[Any] = []
    while len(frames) < 1000:
        some = router.poll(PATIENCE_S)
        assert len(some) <= 256
        frames += some
    assert [int(frame.raw) for frame in frames] == list(range(1000))


def test_a_socket_that_is_not_read_holds_few_frames_and_loses_none(ends: Ends) -> None:
    """However many its owner lets wait; the sender notices."""
    router = ends.router()
    greedy = ends.raw(zmq.DEALER, router.endpoint, sndhwm=1, sndbuf=1 << 16)
    num_sent, frame = 0, bytes(1 << 16)
    while num_sent < 200 and greedy.poll(2000, zmq.POLLOUT):
        greedy.send(frame)
        num_sent += 1
    assert num_sent < 40, "16 wait here, and what the kernel's buffers take"
    read: list[Any] = []
    until(lambda: len(read) >= num_sent, step=lambda: read.extend(router.poll(0.05)))


def news(dealer: DealerChannel, patience_s: float = PATIENCE_S) -> Any:
    """The next thing that it tells of a connection."""
    return next(iter(heard(dealer, Reached | Unreached | ConnectFailed, 1, patience_s)), None)


@pytest.mark.parametrize("curve", [False, True])
def test_a_dealer_tells_which_address_is_reached_and_which_is_not(ends: Ends, curve: bool) -> None:
    address = lasting_address()
    theirs = ours = None
    if curve:
        mine = keys()
        theirs = ControlConfig(curve=keys(client=mine.public_key))
        server_key = theirs.curve.public_key  # type: ignore[union-attr]
        ours = ControlConfig(curve=CurveConfig(mine.public_key, mine.secret_key, server_key))
    gone = Unreached(address, "no answer", "a wrong address, or no prefill worker runs there")
    dealer = ends.dealer(address, ours)
    assert news(dealer) == gone
    router = ends.router(theirs, address)
    told: list[Any] = [gone]

    def look() -> None:
        router.poll(0.0)  # it answers libzmq, which asks about keys
        told.extend(dealer.poll(0.01))

    until(lambda: told[-1] != gone, step=look)
    assert told[-1] == Reached(address)
    router.close()
    assert news(dealer) == gone
    dealer.disconnect(address)
    assert news(dealer, 0.1) is None


# --- dropped and counted --------------------------------------------------------------------------


def test_an_address_from_which_nothing_comes_back_is_not_reached(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a machine that is gone, or behind a firewall: the queue of a listener is full."""
    monkeypatch.setattr(channel, "CONNECT_MS", 100)
    full = ends.stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    address = full.getsockname()
    ends.stack.enter_context(socket.create_connection(address))
    dealer = ends.dealer(f"tcp://127.0.0.1:{address[1]}")
    assert isinstance(news(dealer), Unreached)


def test_decode_has_as_many_prefill_ranks_as_it_has_descriptors_for(ends: Ends) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("three sockets for each")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    ends.stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    dealer = ends.dealer("tcp://127.0.0.1:9")
    for number in range(400):
        dealer.connect(f"tcp://127.0.1.1:{number + 1}")


def test_a_full_queue_drops_and_counts_and_never_blocks(ends: Ends) -> None:
    config = ControlConfig(max_queued_frames=10)
    dealer = ends.dealer("tcp://127.0.0.1:1", config)  # nobody listens
    for _ in range(50):
        dealer.send("tcp://127.0.0.1:1", b"x")
    assert dealer.counters == {"frames_not_sent: queue full": 40}


def test_a_peer_that_does_not_read_costs_counted_drops_only(ends: Ends) -> None:
    router = ends.router(ControlConfig(max_queued_frames=5))
    deaf = ends.raw(zmq.DEALER, router.endpoint, rcvhwm=1)
    deaf.send(b"hi")
    ((route, _, _),) = polled(router)
    frame = bytes(1 << 20)

    def full() -> bool:
        router.send(route, frame)
        return router.counters["frames_not_sent: queue full"] >= 1

    until(full)  # once the kernels hold all they can, however much that is
    dealer = ends.dealer(router.endpoint)  # others are served
    dealer.send(router.endpoint, b"hi")
    ((other, _, _),) = polled(router)
    router.send(other, b"hello")
    assert polled(dealer) == [(router.endpoint, b"hello")]


def test_a_peer_that_has_gone_is_unroutable(ends: Ends) -> None:
    router = ends.router()
    dealer = ends.dealer(router.endpoint)
    dealer.send(router.endpoint, b"hi")
    ((route, _, _),) = polled(router)
    dealer.disconnect(router.endpoint)
    dealer.disconnect(router.endpoint)  # again: no-op
    dealer.send(router.endpoint, b"x")
    assert dealer.counters == {"frames_not_sent: not connected": 1}

    def refused() -> bool:
        router.poll(0.01)
        router.send(route, b"x")
        return bool(router.counters)

    until(refused)


def test_multipart_messages_are_counted_and_dropped(ends: Ends) -> None:
    router = ends.router()
    stranger = ends.raw(zmq.DEALER, router.endpoint)
    stranger.send_multipart([b"a", b"b", b"c"])
    stranger.send_multipart([b"", b"with a REQ's delimiter"])
    stranger.send(b"good")
    assert [raw for _, _, raw in polled(router)] == [b"good"]
    assert router.counters == {"frames_malformed": 2}
    # Decode drops them too.
    address = lasting_address()
    sock = ends.stack.enter_context(zmq.Context()).socket(zmq.ROUTER)
    ends.stack.callback(sock.close, linger=0)
    sock.bind(address)
    dealer = ends.dealer(address)
    dealer.send(address, b"hi")
    assert sock.poll(PATIENCE_S * 1000)
    route, _ = sock.recv_multipart()
    sock.send_multipart([route, b"a", b"b"])
    sock.send_multipart([route, b"good"])
    assert polled(dealer) == [(address, b"good")]
    assert dealer.counters == {"frames_malformed": 1}


def test_an_oversize_frame_does_not_get_in_and_its_sender_may_go_on(ends: Ends) -> None:
    router = ends.router()
    stranger = ends.raw(zmq.DEALER, router.endpoint)
    stranger.send(
        bytes(MAX_FRAME_BYTES + 65)
    )  # the socket cuts the connection, zmq makes a new one
    frames: list[Any] = []

    def send_and_read() -> None:
        stranger.send(b"small")
        frames.extend(polled(router, patience_s=0.05))

    until(lambda: frames, step=send_and_read)
    assert {raw for _, _, raw in frames} == {b"small"}


# --- addresses ------------------------------------------------------------------------------------


def test_what_is_loopback() -> None:
    here = "127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1"
    for host in (*here, "*:1", "0.0.0.0:1", "[::]:1", "10.0.0.1:1", "eth0:1", "localhost.x.com:1"):
        assert is_loopback(f"tcp://{host}") is (host in here)
    assert is_loopback("ipc:///run/kv")
    assert not is_loopback("127.0.0.1")


@pytest.mark.parametrize("bind", ["tcp://*:*", "tcp://0.0.0.0:*"])
def test_other_machines_need_keys_or_the_flag(ends: Ends, bind: str) -> None:
    with pytest.raises(ConfigError, match="CURVE"):
        ends.router(bind=bind)
    assert ends.router(ControlConfig(network_is_isolated=True), bind).endpoint
    assert ends.router(ControlConfig(curve=keys()), bind).endpoint


@pytest.mark.parametrize("curve", [False, True])
@pytest.mark.parametrize(
    ("bind", "why"),
    [
        *[(bind, "bind is") for bind in ("tcp://127.0.0.1:99999", "tcp://127.0.0.1", "nonsense",
                                         "tcp://[::1", "", "tcp://localhost:x")],
        # Told so, and not of keys.
        *[(bind, "an address begins with tcp://") for bind in ("127.0.0.1:5000", "127.0.0.1",
                                                               "localhost:*", "udp://127.0.0.1:1")],
        # zmq bound 65535 for -1.
        *[(f"tcp://127.0.0.1:{port}", "the port is") for port in ("-1", "65536", "+5", "5_0", "",
                                                                  "\u0665", "0x50")],
    ],
)  # fmt: skip
def test_an_address_that_cannot_be_bound_is_a_config_error(
    ends: Ends, bind: str, why: str, curve: bool
) -> None:
    isolated = why == "bind is"  # else what is no address is refused before that is asked
    config = ControlConfig(network_is_isolated=isolated, curve=keys() if curve else None)
    threads = threading.active_count()
    for made in (ends.router, ends.dealer) if why == "the port is" else (ends.router,):
        with pytest.raises(ConfigError, match=why) as caught:
            made(**{"config": config, "bind" if made == ends.router else "address": bind})
        assert "CURVE" not in str(caught.value)
    assert threading.active_count() == threads


def test_a_path_may_end_like_a_port(ends: Ends, tmp_path: Path) -> None:
    assert ends.router(bind=f"ipc://{tmp_path}/s:70000").endpoint


def test_a_port_in_use_is_a_config_error(ends: Ends) -> None:
    taken = ends.router().endpoint
    with pytest.raises(ConfigError, match="in use"):
        ends.router(bind=taken)


@pytest.mark.parametrize(
    "address", ["nonsense", "", "tcp://", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:x"]
)
def test_an_address_that_is_none_is_a_config_error(ends: Ends, address: str) -> None:
    dealer = ends.dealer(ends.router().endpoint)
    with pytest.raises(ConfigError, match="prefill is"):
        dealer.connect(address)
    dealer.send(address, b"x")
    assert dealer.counters == {"frames_not_sent: not connected": 1}


def test_keys_that_are_none_are_a_config_error(ends: Ends) -> None:
    bad = ControlConfig(curve=CurveConfig("x" * 39 + " ", "y" * 39 + "\\"))
    with pytest.raises(ConfigError):
        ends.router(bad)
    with pytest.raises(ConfigError):
        ends.dealer("tcp://127.0.0.1:1", bad)
    no_server_key = ControlConfig(curve=keys())
    with pytest.raises(ConfigError):
        ends.dealer("tcp://127.0.0.1:1", no_server_key)


# --- keys -----------------------------------------------------------------------------------------


def keys(server_key: str = "", **allowed: str) -> CurveConfig:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return CurveConfig(public, secret, server_key, {key: name for name, key in allowed.items()})


class Guarded:
    """A prefill whose list names one client, and that client."""

    def __init__(self, ends: Ends, address: str = "") -> None:
        server = keys()
        self.known = keys(server.public_key)
        self.unknown = keys(server.public_key)
        self.server_key = server.public_key
        self.server = replace(server, allowed_clients={self.known.public_key: "decode-0"})
        self.router = ends.router(ControlConfig(curve=self.server), address or lasting_address())


@pytest.mark.parametrize(
    "who", ["unknown key", "no key", "stolen public key", "wrong server key", "null with zap"]
)
def test_no_other_key_gets_in(ends: Ends, who: str) -> None:
    guarded = Guarded(ends)
    router, known, unknown = guarded.router, guarded.known, guarded.unknown
    configs = {
        "unknown key": unknown, "no key": None,
        "wrong server key": replace(known, server_key=unknown.public_key),
    }  # fmt: skip
    sockets: dict[str, dict[str, bytes]] = {
        "stolen public key": {
            "curve_publickey": known.public_key.encode(),
            "curve_secretkey": unknown.secret_key.encode(),
            "curve_serverkey": guarded.server_key.encode(),
        },
        "null with zap": {"zap_domain": b"global"},
    }
    if who in configs:
        dealer = ends.dealer(router.endpoint, ControlConfig(curve=configs[who]))
        dealer.send(router.endpoint, b"x")
    else:
        ends.raw(zmq.DEALER, router.endpoint, **sockets[who]).send(b"x")
    assert polled(router, patience_s=0.3) == []
    friend = ends.dealer(router.endpoint, ControlConfig(curve=known))
    friend.send(router.endpoint, b"hi")
    assert [raw for _, _, raw in polled(router)] == [b"hi"]


def failures(router: RouterChannel, dealer: DealerChannel) -> tuple[ConnectFailed, ConnectFailed]:
    """The first that each end tells of a connection that keys are in the way of.

    The end that sees it first closes the connection, maybe before the other end has: so the dealer
    goes on to say Hello.
    """
    told: dict[Any, ConnectFailed] = {}

    def look() -> None:
        dealer.send(router.endpoint, b"hello")
        for end in (router, dealer):
            for got in end.poll(0.01):
                if isinstance(got, ConnectFailed):
                    told.setdefault(end, got)

    until(lambda: len(told) == 2, step=look)
    return told[router], told[dealer]


def test_both_ends_name_an_unknown_key_and_let_it_in_once_it_is_listed(ends: Ends) -> None:
    guarded = Guarded(ends)
    address, key = guarded.router.endpoint, short_key(guarded.unknown.public_key)
    dealer = ends.dealer(address, ControlConfig(curve=guarded.unknown))
    theirs, ours = failures(guarded.router, dealer)
    assert theirs.address == "127.0.0.1"
    assert f"its key {key!r} is not in our allowed_clients" in str(theirs.error)
    assert ours.address == address
    assert f"our key {key!r} is not in the allowed_clients of {address}" in str(ours.error)
    assert isinstance(ours.error, HandshakeError)
    for secret in (guarded.unknown.secret_key, guarded.unknown.public_key):
        assert secret not in f"{theirs} {ours}"
    # The worker is started again with the key in its list, and the same socket says Hello again.
    guarded.router.close()
    listed = replace(guarded.server, allowed_clients={guarded.unknown.public_key: "decode-1"})
    router = ends.router(ControlConfig(curve=listed), address)
    frames: list[Any] = []

    def hello() -> None:
        dealer.send(address, b"hello")
        dealer.poll(0.01)
        frames.extend(router.poll(0.01))

    until(lambda: bool(frames), step=hello)


def test_a_wrong_server_key_is_a_guess_of_decodes_and_known_to_prefill(ends: Ends) -> None:
    """What ends the connection may be a relay with no worker behind it yet."""
    guarded = Guarded(ends)
    address, wrong = guarded.router.endpoint, replace(guarded.known, server_key=keys().public_key)
    dealer = ends.dealer(address, ControlConfig(curve=wrong))
    told: list[Any] = []

    def guessed() -> bool:
        told.extend(guarded.router.poll(0.01))
        return any("server_key is not" in got.guess for got in heard(dealer, Unreached, 1, 0.01))

    until(guessed)
    until(lambda: any(isinstance(got, ConnectFailed) for got in told), step=guessed)
    failed = next(got for got in told if isinstance(got, ConnectFailed))
    assert short_key(guarded.server_key) in str(failed.error)


def test_a_secret_key_of_another_public_key_is_a_config_error(ends: Ends) -> None:
    one, other = keys(), keys()
    mixed = replace(one, secret_key=other.secret_key, server_key=other.public_key)
    for made in (
        lambda: ends.router(ControlConfig(curve=mixed)),
        lambda: ends.dealer("tcp://127.0.0.1:1", ControlConfig(curve=mixed)),
    ):
        with pytest.raises(ConfigError, match="secret_key") as caught:
            made()
        assert other.secret_key not in str(caught.value)


# --- closing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", [False, True])
def test_close_gives_everything_back(ends: Ends, curve: bool) -> None:
    """Descriptors, threads and the port, also with frames that were never sent."""
    address = lasting_address()  # it takes a descriptor

    def once() -> str:
        if curve:
            guarded = Guarded(ends, address)
            router, config = guarded.router, ControlConfig(curve=guarded.known)
        else:
            router, config = ends.router(bind=address), ControlConfig()
        dealer = ends.dealer(router.endpoint, config)
        dealer.connect("tcp://127.0.0.1:1")
        dealer.send("tcp://127.0.0.1:1", b"nobody will read this")
        dealer.send(router.endpoint, b"hi")
        assert polled(router)
        dealer.close()
        router.close()
        return router.endpoint

    once()  # what the first use creates for good is no leak
    gc.collect()  # nor is what earlier tests left behind
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        endpoint = once()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert ends.router(bind=endpoint).endpoint == endpoint


def test_a_closing_linger_lets_the_last_frame_leave(ends: Ends) -> None:
    router = ends.router()
    dealer = ends.dealer(router.endpoint)
    for _ in range(12):  # no more than a socket takes that is not read meanwhile
        dealer.send(router.endpoint, bytes(64 << 10))
    dealer.close(linger_s=PATIENCE_S)
    assert len(polled(router, 12)) == 12


@pytest.mark.parametrize(
    ("bind", "host", "local"),
    [
        (LOCAL, "127.0.0.1", True),
        ("tcp://*:*", "127.0.0.1", True),
        ("tcp://*:*", "this machine's other address", False),
        ("tcp://[::]:*", "127.0.0.1", True),
        ("ipc://{folder}/socket", "", True),
    ],
)
def test_a_frame_tells_whether_its_connection_leaves_this_machine(
    ends: Ends, tmp_path: Path, bind: str, host: str, local: bool
) -> None:
    """One over an address that others may have too is not known to stay."""
    if "other" in host:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect(("192.0.2.77", 9))  # sends nothing: which address would it have?
            except OSError:
                pytest.skip("there is no other address")
            host = sock.getsockname()[0]
    config = ControlConfig(network_is_isolated=True)
    router = ends.router(config, bind.format(folder=tmp_path))
    address = router.endpoint
    if host:
        address = f"tcp://{host}:{address.rpartition(':')[2]}"
    dealer = ends.dealer(address)
    dealer.send(address, b"to prefill")
    [got] = heard(router)
    assert (got.raw, got.is_local) == (b"to prefill", local)
    router.send(got.source, b"to decode")
    [back] = heard(dealer)
    assert (back.raw, back.is_local) == (b"to decode", local)
