"""A decode worker whose NIXL metadata has been changed, opposite a real prefill node that serves
another one."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec
import pytest
import zmq

from prefixkv.config import DecodeConfig, TransportConfig
from prefixkv.errors import HandshakeError
from prefixkv.protocol import messages
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import Hello, HelloReply, HelloWanted
from prefixkv.request import Request
from prefixkv.runtime.decode_node import DecodeNode
from prefixkv.runtime.fragments import Joiner, cut
from prefixkv.transport.metadata import trial as trial_module
from tests.models.node_pair import NodePair, make_pool, tokens_of
from tests.models.patience import PATIENCE_S, until
from tests.models.ucx_packed import address_of, keys_of, with_address
from tests.models.ucx_shapes import shaped
from tests.runtime.conftest import MakePair
from tests.runtime.test_node_faults import end_of, raw_socket


def send(sock: zmq.Socket[bytes], raw: bytes) -> None:
    """As a channel sends a frame."""
    for message in cut(raw):
        sock.send(message)


class Attacker:
    """Says Hellos in the name of `node`, a real decode node that never speaks to the prefill node
    itself. It has to live, since UCX looks for the memory that its address names."""

    def __init__(self, prefill: str, sock: zmq.Socket[bytes], node: DecodeNode) -> None:
        with raw_socket(zmq.ROUTER) as listener:
            port = listener.bind_to_random_port("tcp://127.0.0.1")
            address = f"tcp://127.0.0.1:{port}"
            node.add(Request("r", [1, 2, 3], max_new_tokens=1, room=1, prefill=address))
            node.pop_preallocated()
            assert listener.poll(PATIENCE_S * 1000)
            frame = messages.decode(listener.recv_multipart()[1])
            node.abort("r")
        assert isinstance(frame.body, Hello)
        self.me, self.hello = frame.sender, frame.body
        self.sock = sock
        self.joiner: Joiner[str] = Joiner()
        sock.connect(prefill)
        self.seq = count(10)

    def introduce(self, metadata: bytes, me: PeerId | None = None) -> None:
        """A Hello with this metadata, and again with what prefill wants to hear in it."""
        me = me or self.me
        hello = msgspec.structs.replace(self.hello, agent_metadata=metadata, worker=me)
        send(self.sock, messages.encode(me, next(self.seq), hello))
        wanted = self.hear()
        assert isinstance(wanted, HelloWanted)
        hello = msgspec.structs.replace(hello, nonce=wanted.nonce)
        send(self.sock, messages.encode(me, next(self.seq), hello))

    def hear(self) -> Any:
        while True:
            assert self.sock.poll(PATIENCE_S * 1000)
            raw = self.joiner.join("", self.sock.recv())
            body = messages.Heartbeat() if raw is None else messages.decode(raw).body
            if not isinstance(body, messages.Heartbeat):
                return body

    def reply_to(self, metadata: bytes, me: PeerId | None = None) -> HelloReply:
        """What prefill answers to a Hello with this metadata."""
        self.introduce(metadata, me)
        reply = self.hear()
        assert isinstance(reply, HelloReply)
        return reply

    def life(self, number: int) -> tuple[PeerId, bytearray]:
        """It, started again, and the metadata of that life: one that was taken is not tried
        again."""
        me = self.me._replace(incarnation=self.me.incarnation + number)
        former, later = (str(peer.incarnation).encode() for peer in (self.me, me))
        assert len(former) == len(later)
        return me, bytearray(self.hello.agent_metadata.replace(b"#" + former, b"#" + later))

    @property
    def address_at(self) -> int:
        """Where the UCX address begins."""
        return self.hello.agent_metadata.index(b"|c") + 10

    @property
    def ff(self) -> bytes:
        changed = bytearray(self.hello.agent_metadata)
        changed[self.address_at] = 0xFF
        return bytes(changed)


@pytest.fixture
def pair(make_pair: MakePair) -> NodePair:
    return make_pair(prefill={"transport": TransportConfig()})


@pytest.fixture
def attacker(pair: NodePair) -> Iterator[Attacker]:
    with raw_socket(zmq.DEALER) as sock, DecodeNode(make_pool(), DecodeConfig("other")) as node:
        yield Attacker(pair.prefill.endpoint, sock, node)


def serve(pair: NodePair, rid: str, seed: int) -> None:
    pair.submit(rid, tokens_of(seed, 10))
    pair.run(rid)
    assert pair.d.ended[rid] is None


@pytest.mark.slow
@pytest.mark.parametrize("checked", [True, False], ids=["checked first", "in the child alone"])
def test_a_changed_ucx_address_is_refused_by_name_and_others_are_served(
    pair: NodePair, attacker: Attacker, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not checked:
        monkeypatch.setattr(trial_module, "check_metadata", lambda *_: None)
    serve(pair, "before", 1)
    for attempt in range(2):
        refused = attacker.reply_to(attacker.ff).refused
        assert "NIXL metadata is refused" in refused
        assert ("begins with ff" if checked else "SIGABRT") in refused
        serve(pair, f"after {attempt}", 2 + attempt)
    assert pair.prefill.stats()["handshakes_refused"] == 2
    assert pair.prefill.peers() == {pair.decode.peer_id: "ready"}


@pytest.mark.slow
@pytest.mark.parametrize("memory_type", [10, 94, 127, 141, 164, 255])
def test_a_key_for_memory_of_no_known_type_is_refused_by_the_form(
    pair: NodePair, attacker: Attacker, memory_type: int
) -> None:
    """UCX looks it up beyond the end of a table of its own. Whether a process dies of what is there
    differs from process to process, so the trial could not tell."""
    changed = bytearray(attacker.hello.agent_metadata)
    changed[keys_of(bytes(changed))[-1].start + 8] = memory_type
    assert f"memory of type {memory_type}" in attacker.reply_to(bytes(changed)).refused
    serve(pair, "r", 1)


@pytest.mark.slow
@pytest.mark.parametrize("end", [0x22, 0x07, 0x97])
def test_an_address_that_does_not_end_is_refused_by_the_form(
    pair: NodePair, attacker: Attacker, end: int
) -> None:
    """UCX is not told how long an address is, and reads on behind it: there too each process has
    something else."""
    metadata = attacker.hello.agent_metadata
    address = address_of(metadata)
    changed = with_address(metadata, address[:-2] + bytes([end]) + address[-1:])
    assert "in the UCX address" in attacker.reply_to(changed).refused
    serve(pair, "r", 1)


@pytest.mark.slow
def test_random_changes_end_nothing_and_others_are_served(
    pair: NodePair, attacker: Attacker
) -> None:
    """`fuzz/metadata.py` runs many more."""
    rng = random.Random(1)
    refusals = []
    for number in range(60):
        me, changed = attacker.life(number)
        if number % 2:
            for _ in range(rng.choice((1, 1, 2, 4))):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
        else:  # where only the child can tell
            changed = bytearray(shaped(bytes(changed), rng))
        refusals.append(attacker.reply_to(bytes(changed), me).refused)
    assert "" in refusals, "some changes mean nothing"
    assert any("its trial" in refused for refused in refusals), "some only the child finds"
    serve(pair, "r", 1)


def test_a_decode_worker_that_is_refused_learns_why(
    pair: NodePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_module, "_TRIAL_LIMIT_S", -1.0)
    with DecodeNode(make_pool()) as node:
        node.add(Request("r", [1, 2], max_new_tokens=1, room=1, prefill=pair.prefill.endpoint))
        error = end_of(node, "r")
    assert isinstance(error, HandshakeError)
    assert "NIXL metadata is refused" in str(error)


def test_a_trial_under_way_holds_up_no_transfer(pair: NodePair, attacker: Attacker) -> None:
    """The child stands still, with a peer on trial; a peer that is known goes on."""
    serve(pair, "before", 1)
    trial = pair.prefill.transfers.thread.trial
    assert trial is not None
    until(lambda: trial.child_pid is not None)
    assert trial.child_pid is not None
    os.kill(trial.child_pid, signal.SIGSTOP)
    attacker.introduce(attacker.hello.agent_metadata)
    for seed in range(2, 6):
        serve(pair, f"r{seed}", seed)
    assert not attacker.sock.poll(0)
    os.kill(trial.child_pid, signal.SIGCONT)
    assert attacker.sock.poll(PATIENCE_S * 1000)


def test_the_trial_can_be_turned_off(make_pair: MakePair) -> None:
    pair = make_pair(prefill={"transport": TransportConfig(trial_peers=False)})
    serve(pair, "r", 1)
    trial = pair.prefill.transfers.thread.trial
    assert trial is not None
    assert trial.child_pid is None
