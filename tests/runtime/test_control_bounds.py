"""What a stranger, or a peer, can make a prefill node hold through its control port. A real node
in a process of its own is attacked, its memory is read, and another decode worker is served."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count

import numpy as np
import pytest
import zmq

from prefixkv.config import ControlConfig, CurveConfig, DecodeConfig, PrefillConfig
from prefixkv.protocol import messages
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import HelloWanted, Promise
from prefixkv.request import Request
from prefixkv.runtime.decode_node import DecodeNode
from prefixkv.runtime.fragments import cut
from tests.models.node_pair import make_pool
from tests.models.node_process import node_processes
from tests.models.patience import PATIENCE_S, until
from tests.models.strangers import (
    EMPTY_PART,
    GREETING,
    Memory,
    connected,
    flood,
    many_descriptors,
    part,
    shaken,
    stranger,
)
from tests.runtime.conftest import QUICK
from tests.runtime.test_hostile_metadata import Attacker, send
from tests.runtime.test_node_budgets import Served, serving
from tests.runtime.test_node_faults import raw_socket

MIB = 1 << 20
MOST_BYTES = 160 * MIB
MANY_SENDERS_BYTES = 1024 * MIB  # what came before it was seen, in parts of 2 bytes that take 64
ATTACK_S = 1.5
UNFINISHED = "connections_cut: an unfinished message beyond its bound"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


def attacked(served: Served, seconds: float = ATTACK_S) -> None:
    """Others are served all the while."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        before_s = time.monotonic()
        served.one()
        assert time.monotonic() - before_s < PATIENCE_S / 4


def withstands(served: Served, chunk: bytes) -> None:
    """A stranger who sends this again and again is cut, and costs little."""
    memory, before = Memory(served.prefill.pid), cuts(served)
    with flood(lambda: stranger(served.prefill.endpoint), chunk) as attack:
        attacked(served)
        # How soon a bound is reached depends on what else the machine does.
        until(lambda: attack.num_cut and cuts(served) > before, pause_s=0.05)
    assert memory.grown() < MOST_BYTES
    assert is_open(served.prefill.endpoint)


def cuts(served: Served) -> int:
    stats = served.prefill.call("stats")
    return sum(number for name, number in stats.items() if name.startswith("connections_cut"))


def is_cut(stats: dict[str, int]) -> bool:
    return any(name.startswith("connections_cut") for name in stats)


def is_open(endpoint: str) -> bool:
    """Whether one that comes new is answered."""
    with raw_socket(zmq.DEALER) as sock:
        sock.connect(endpoint)
        sock.send(messages.encode(PeerId("new", time.time_ns()), 1, messages.Heartbeat()))
        if not sock.poll(PATIENCE_S * 1000):
            return False
        return isinstance(messages.decode(sock.recv()).body, HelloWanted)


ENDLESS = {
    "large parts": part(60_000),
    "empty parts": EMPTY_PART * 50_000,
    "parts of a byte": part(1) * 30_000,
    "parts of 34 bytes": part(34) * 3_000,
}


@pytest.mark.parametrize(
    "what",
    [
        "empty parts",
        *(pytest.param(what, marks=pytest.mark.slow) for what in ENDLESS if what != "empty parts"),
    ],
)
def test_a_message_that_never_ends(served: Served, what: str) -> None:
    withstands(served, ENDLESS[what])


@pytest.mark.slow
def test_a_message_that_never_ends_behind_good_ones(served: Served) -> None:
    good = messages.encode(PeerId("s", 1), 1, messages.Heartbeat())
    memory = Memory(served.prefill.pid)

    def begin():
        sock = stranger(served.prefill.endpoint)
        sock.sendall((bytes([0, len(good)]) + good) * 100)
        return sock

    with flood(begin, EMPTY_PART * 50_000) as attack:
        attacked(served)
        until(lambda: attack.num_cut, pause_s=0.05)
    assert memory.grown() < MOST_BYTES


@pytest.mark.slow
def test_many_unfinished_messages_that_are_small(served: Served) -> None:
    """Each below its bound; the sum of them is not. All of it would take 3 GB: on a busy machine
    much has come before it is seen."""
    many_descriptors(4096)
    memory, before = Memory(served.prefill.pid), cuts(served)
    with ExitStack() as stack:
        for _ in range(1000):
            with suppress(OSError):  # it is cut, or was before it had shaken hands
                sock = stack.enter_context(stranger(served.prefill.endpoint))
                sock.sendall(EMPTY_PART * 50_000)
        until(lambda: cuts(served) > before)
        attacked(served)
        assert memory.grown() < MANY_SENDERS_BYTES


@pytest.mark.slow
def test_whole_messages_of_many_parts(served: Served) -> None:
    """Each costs the control thread some time, so its sender is ended after the first, and others
    are served meanwhile."""
    withstands(served, EMPTY_PART * 50_000 + part(0, more=False))


@pytest.mark.slow
def test_whole_messages_of_many_parts_by_many(served: Served) -> None:
    """Each brings what the kernel holds of it before it is cut. While that is read none comes, so
    others wait; it does not grow as long as the attack lasts."""
    chunk = EMPTY_PART * 50_000 + part(0, more=False)
    memory = Memory(served.prefill.pid)
    with flood(lambda: stranger(served.prefill.endpoint), chunk, num=32):
        until(lambda: served.prefill.call("stats").get("listening_paused", 0) > 1)
        assert memory.grown() < MANY_SENDERS_BYTES
    assert is_open(served.prefill.endpoint)
    served.one()


@pytest.mark.slow
def test_whole_messages_that_come_faster_than_they_are_read(served: Served) -> None:
    chunk = part(60_000, more=False)
    memory = Memory(served.prefill.pid)
    with flood(lambda: stranger(served.prefill.endpoint), chunk) as attack:
        until(lambda: attack.num_bytes)
        attacked(served)
    assert memory.grown() < MOST_BYTES


@pytest.mark.parametrize(
    "half",
    [
        pytest.param(b"", id="mute"),
        pytest.param(GREETING[:11], id="half", marks=pytest.mark.slow),
        pytest.param(GREETING, id="greeting", marks=pytest.mark.slow),
    ],
)
def test_connections_that_never_shake_hands(served: Served, half: bytes) -> None:
    """Those that came first make room."""
    many_descriptors(4096)
    memory = Memory(served.prefill.pid)
    with ExitStack() as stack:
        for _ in range(1500):
            sock = stack.enter_context(connected(served.prefill.endpoint))
            sock.sendall(half)
        attacked(served)
        assert is_open(served.prefill.endpoint)
        assert memory.grown() < MOST_BYTES
        assert cuts(served)


def test_frames_in_fragments_that_never_end(served: Served) -> None:
    memory = Memory(served.prefill.pid)
    *begun, _ = cut(bytes(messages.MAX_FRAME_BYTES))
    with ExitStack() as stack:
        for _ in range(12):
            sock = stack.enter_context(raw_socket(zmq.DEALER))
            sock.connect(served.prefill.endpoint)
            for message in begun:
                sock.send(message)
        attacked(served)
        assert memory.grown() < MOST_BYTES


def test_answers_that_are_not_read(served: Served) -> None:
    memory, numbers = Memory(served.prefill.pid), count(1)
    frames = b""
    for _ in range(300):
        raw = messages.encode(PeerId("x" * 250, next(numbers)), 1, messages.Heartbeat())
        frames += bytes([2]) + len(raw).to_bytes(8) + raw
    with flood(lambda: stranger(served.prefill.endpoint), frames, num=4):
        attacked(served)
    assert memory.grown() < MOST_BYTES


@pytest.mark.slow
def test_promises_of_the_most_pages_keep_no_other_waiting(served: Served) -> None:
    """A decode worker that says it has two million pages, over shared memory, and promises them."""
    num_pages = messages.MAX_PAGES
    with ExitStack() as stack:
        pool = make_pool(16, 4)
        node = stack.enter_context(DecodeNode(pool, DecodeConfig("other", control=QUICK)))
        sock = stack.enter_context(raw_socket(zmq.DEALER))
        attacker = Attacker(served.prefill.endpoint, sock, node)
        assert not attacker.reply_to(attacker.hello.agent_metadata).refused
        memory = Memory(served.prefill.pid)
        pages = np.arange(num_pages, dtype="<i4").tobytes()
        for room in range(60):
            promise = Promise(room, 0, num_pages * 4 % 2**31, 0, pages, room + 1)
            send(sock, messages.encode(attacker.me, next(attacker.seq), promise))
        attacked(served)
        assert memory.grown() < MOST_BYTES


def test_a_prefill_worker_whose_message_never_ends() -> None:
    """To the decode node that has connected to it, here in this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"

        def begin() -> socket.socket:
            return shaken(listener.accept()[0], b"ROUTER")

        with DecodeNode(make_pool(16, 4), DecodeConfig("d", control=QUICK)) as node:
            memory = Memory(os.getpid())
            with flood(begin, EMPTY_PART * 50_000, num=1):
                node.add(Request("r", [1, 2, 3], 1, room=1, prefill=address))
                node.pop_preallocated()
                until(lambda: node.stats().get(UNFINISHED, 0) > 2)  # it connects again each time
            assert memory.grown() < MOST_BYTES


def curve_keys() -> tuple[CurveConfig, CurveConfig]:
    (public, secret), (client, own) = (
        [key.decode() for key in zmq.curve_keypair()] for _ in range(2)
    )
    return CurveConfig(public, secret, "", {client: "decode-0"}), CurveConfig(client, own, public)


@pytest.mark.slow
def test_an_allowed_client_under_keys_is_bounded_too() -> None:
    ours, theirs = curve_keys()
    control = ControlConfig(curve=ours)
    with node_processes() as start, raw_socket(zmq.DEALER) as sock:
        prefill = start("prefill", PrefillConfig(control=control), {})
        memory = Memory(prefill.pid)
        sock.curve_publickey, sock.curve_secretkey = (
            theirs.public_key.encode(), theirs.secret_key.encode()
        )  # fmt: skip
        sock.curve_serverkey = theirs.server_key.encode()
        sock.connect(prefill.endpoint)
        for _ in range(300_000):
            sock.send(b"x" * 1000, zmq.SNDMORE)
        sock.send(b"")
        until(lambda: is_cut(prefill.call("stats")), pause_s=0.05)
        assert memory.grown() < MOST_BYTES
