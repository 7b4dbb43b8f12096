"""Protects what is around the control objects: threads, sockets, nodes, ranks, copies, over real
transports. The decisions themselves: tests/unit/{decode,prefill,control}. Pairs of real nodes are
audited here, and have given everything back, when the test ends."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import ControlConfig, DecodeConfig, PrefillConfig
from tests.support.node_pair import NodePair, make_pool
from tests.support.node_process import NodeProcess, node_processes
from tests.support.patience import NEVER_S, SkippableClock
from tests.support.wires import WIRES, choose, wired

# What is said again is said soon; no deadline comes by itself, however slow the machine: see
# SkippableClock.
QUICK = ControlConfig(
    heartbeat_s=0.1, suspect_after_s=NEVER_S, forget_after_s=2 * NEVER_S, resend_s=0.05,
    fence_settle_s=0.05, connect_timeout_s=NEVER_S, bootstrap_timeout_s=NEVER_S,
    waiting_timeout_s=NEVER_S, transfer_timeout_s=NEVER_S, ack_timeout_s=NEVER_S,
    drain_timeout_s=NEVER_S, parked_timeout_s=NEVER_S,
)  # fmt: skip


def node_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefixkv-")]


def open_descriptors() -> int:
    gc.collect()  # what earlier tests left behind is not to vanish in between
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(params=WIRES[:2])
def _wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of UCX's ways between two agents: copies inside the post, and writes that go on after
    it."""
    choose(request.param, monkeypatch)


@pytest.fixture(params=WIRES)
def _any_wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shm transport too: for tests whose nodes are all made by `make_pair`, or are `wired`."""
    choose(request.param, monkeypatch)


@pytest.fixture
def clock() -> Iterator[SkippableClock]:
    """The time of all nodes in this process. Ask for it before the nodes."""
    with pytest.MonkeyPatch.context() as patch:
        made = SkippableClock()
        made.install(patch.setattr)
        yield made


MakePair = Callable[..., NodePair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    """make_pair(pool={...}, decode={...}, prefill={...}, control=...): options of pools and
    configs.

    At the end of the test each pair is settled and audited, closed, and nothing of it is left.
    """
    made: list[NodePair] = []

    def make(
        pool: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        prefill: dict[str, Any] | None = None,
        control: ControlConfig = QUICK,
    ) -> NodePair:
        options = {"control": control} | (prefill or {})
        prefill_node = PrefillNode(make_pool(**(pool or {})), wired(PrefillConfig(**options)))
        try:
            config = DecodeConfig(**{"control": control} | (decode or {}))
            decode_node = DecodeNode(make_pool(**(pool or {})), wired(config))
        except BaseException:
            prefill_node.close()
            raise
        made.append(NodePair(decode_node, prefill_node))
        return made[-1]

    failed = True
    try:
        yield make
        for pair in made:
            pair.check_at_rest()
        failed = False
    finally:
        for pair in made:
            pair.decode.close()
            pair.prefill.close()
    assert failed or not node_threads()


@pytest.fixture
def pair(make_pair: MakePair) -> NodePair:
    return make_pair()


@pytest.fixture
def start() -> Iterator[Callable[..., NodeProcess]]:
    with node_processes() as starter:
        yield starter


@pytest.fixture
def stack(clock: SkippableClock) -> Iterator[ExitStack]:
    """What the test's own process opens."""
    with ExitStack() as opened:
        yield opened
    assert not node_threads()
