"""A decode worker that says more than it may have held for it, opposite a real prefill node in a
process of its own: that node's memory, and the requests of another worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.protocol import messages
from prefixkv.protocol.messages import MAX_FRAME_BYTES, MAX_METADATA_BYTES, Outcome, Promise
from prefixkv.runtime.decode_node import DecodeNode
from tests.models.node_pair import make_pool, tokens_of
from tests.models.node_process import NodeProcess, node_processes
from tests.models.patience import until
from tests.runtime.conftest import QUICK
from tests.runtime.test_hostile_metadata import Attacker, send
from tests.runtime.test_node_faults import raw_socket

MIB = 1 << 20
MOST_BYTES = 64 * MIB  # that the node may grow by
FACTOR = 1024  # of the attacker's page size to ours
FRAMES = 40
LARGE_FRAMES = 60


class Served:
    """A prefill and a decode node in processes of their own, with requests between them."""

    def __init__(self, prefill: NodeProcess, decode: NodeProcess) -> None:
        self.prefill, self.decode = prefill, decode
        self._numbers = count()

    def one(self) -> None:
        """A request that ends well, with every byte right."""
        number = next(self._numbers)
        rid, tokens = f"r{number}", tokens_of(number, 20)
        self.decode.call("submit", rid, tokens, self.prefill.endpoint, room=number)
        self.prefill.call("add", rid, tokens, number)
        ended: dict[str, Any] = {}
        until(lambda: ended.update(self.decode.call("take_ended")) or rid in ended)
        assert ended[rid] is None
        assert self.prefill.call("get", "mismatches") == 0

    def held_bytes(self) -> int:
        with open(f"/proc/{self.prefill.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def serving() -> Iterator[Served]:
    """Two nodes that work; at the end prefill is at rest."""
    with node_processes() as start:
        prefill = start("prefill", PrefillConfig(control=QUICK), {})
        decode = start("decode", DecodeConfig(control=QUICK), {})
        served = Served(prefill, decode)
        for _ in range(3):
            served.one()
        yield served
        prefill.call("check_at_rest")


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture
def attacker(served: Served) -> Iterator[Attacker]:
    """It has passed the handshake, with 16 pages `FACTOR` times as large as prefill's."""
    pool = make_pool(16, 4 * FACTOR)
    with raw_socket(zmq.DEALER) as sock, DecodeNode(pool, DecodeConfig("other")) as node:
        attacker = Attacker(served.prefill.endpoint, sock, node)
        assert not attacker.reply_to(attacker.hello.agent_metadata).refused
        yield attacker


def refusals(attacker: Attacker, num_pages: int, num_frames: int) -> set[str]:
    """What is answered to promises of so many pages, one after the other."""
    pages = np.arange(num_pages, dtype="<i4").tobytes()
    said = set()
    for room in range(num_frames):
        promise = Promise(room, 0, num_pages * 4 * FACTOR % 2**31, 0, pages, room + 1)
        send(attacker.sock, messages.encode(attacker.me, next(attacker.seq), promise))
        outcome = attacker.hear()
        assert isinstance(outcome, Outcome)
        said.add(outcome.error)
    return said


@pytest.mark.slow
def test_promises_of_more_pages_than_it_has_cost_a_prefill_node_nothing(
    served: Served, attacker: Attacker
) -> None:
    before = served.held_bytes()
    for num_pages, num_frames in ((20_000, FRAMES), (MAX_FRAME_BYTES // 4 - 1024, LARGE_FRAMES)):
        [error] = refusals(attacker, num_pages, num_frames)
        assert f"{num_pages} more are, the pool has 16" in error
        served.one()
    assert served.held_bytes() - before < MOST_BYTES
    assert served.prefill.call("stats")["dropped: BudgetError"] == FRAMES + LARGE_FRAMES


@pytest.mark.slow
def test_introductions_that_are_too_large_cost_a_prefill_node_nothing(
    served: Served, attacker: Attacker
) -> None:
    """Those larger than a frame end their connection; those of a megabyte fail their trial."""
    before = served.held_bytes()
    for number in range(LARGE_FRAMES):
        with raw_socket(zmq.DEALER) as sock:
            sock.connect(served.prefill.endpoint)
            hello = msgspec.structs.replace(attacker.hello, agent_metadata=bytes(15 * MIB))
            send(sock, messages.encode(attacker.me, number, hello))
            assert not sock.poll(20)
    served.one()
    for number in range(1, LARGE_FRAMES + 1):
        me, _ = attacker.life(number)
        assert "metadata" in attacker.reply_to(bytes(MAX_METADATA_BYTES), me).refused
    served.one()
    assert served.held_bytes() - before < MOST_BYTES
