"""The thread of a transport: where it does not start, what its sink does, and how it ends."""

from __future__ import annotations

import os
import threading
from typing import Any

import msgspec
import pytest

from prefixkv.errors import (
    CallerError,
    ConfigError,
    InternalError,
    TransferError,
    TransferTimeoutError,
)
from prefixkv.memory.kv_layout import RelayArea
from prefixkv.memory.state_layout import StateLayout
from prefixkv.protocol.ids import PeerId
from prefixkv.transport import loop as transport_loop
from prefixkv.transport.base import RankMemory, Settled
from prefixkv.transport.nixl.loop import NixlTransport
from prefixkv.transport.shm.loop import ShmTransport
from tests.support.patience import PATIENCE_S, until
from tests.support.transport_pools import make_pool, shared_zeros

Kind = type[NixlTransport | ShmTransport]
kinds = pytest.mark.parametrize("kind", [NixlTransport, ShmTransport])


def a_memory() -> RankMemory:
    pool = make_pool("layer_major", 4, zeros=shared_zeros)
    memories.append(pool)  # a layout is addresses only
    return RankMemory(pool.layout)


memories: list[Any] = []


@kinds
def test_a_sink_that_raises_hears_what_comes_later_and_may_not_close(kind: Kind) -> None:
    errors: list[Exception] = []
    heard: list[Any] = []

    def careless(event: Any) -> None:
        heard.append(event)
        try:
            transport.close()
        except CallerError as error:
            errors.append(error)
        raise SystemExit("a broken sink")

    transport = kind(PeerId("careless", 1), a_memory(), careless)
    for token in "ab":
        transport.settle(token, 0.0)
        until(lambda token=token: Settled(token) in heard)
    assert len(errors) == 2
    transport.close()


def test_a_thread_that_does_not_end_is_said_and_closed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport_loop, "CLOSE_TIMEOUT_S", 0.05)
    inside, go_on = threading.Event(), threading.Event()

    def sink(event: Any) -> None:
        inside.set()
        go_on.wait(PATIENCE_S)

    transport = ShmTransport(PeerId("slow", 1), a_memory(), sink)
    transport.settle("a", 0.0)
    assert inside.wait(PATIENCE_S)
    with pytest.raises(InternalError, match="has not ended"):
        transport.close()
    go_on.set()
    monkeypatch.setattr(transport_loop, "CLOSE_TIMEOUT_S", PATIENCE_S)
    transport.close()


@kinds
@pytest.mark.parametrize("what", ["layout", "relay", "state"])
def test_memory_that_breaks_its_laws_is_refused(kind: Kind, what: str) -> None:
    good = a_memory()
    wrong: dict[str, Any] = {
        "layout": msgspec.structs.replace(good.layout, num_pages=5),
        "relay": RelayArea(4096, 4096, 4097),
        "state": StateLayout(0, (), ()),
    }
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError):
        kind(PeerId("d", 1), good._replace(**{what: wrong[what]}), lambda event: None)
    assert set(os.listdir("/proc/self/fd")) == before


@kinds
def test_a_thread_that_cannot_be_made_leaves_no_descriptor(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = a_memory()

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="new thread"):
        kind(PeerId("threadless", 1), memory, lambda event: None)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_nixl_thread_that_starts_too_late_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_loop, "_START_TIMEOUT_S", 0.0)
    with pytest.raises(TransferTimeoutError, match="did not start"):
        NixlTransport(PeerId("late", 1), a_memory(), lambda event: None)
    until(lambda: not [one for one in threading.enumerate() if one.name.endswith("-late")])


def test_a_start_that_is_interrupted_ends_at_once_and_its_thread_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(transport_loop.Future[bytes]):
        def result(self, timeout: float | None = None) -> bytes:
            super().result(timeout)
            raise KeyboardInterrupt

    monkeypatch.setattr(transport_loop, "CLOSE_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(transport_loop, "Future", Interrupted)
    memory, before = a_memory(), set(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        ShmTransport(PeerId("stopped", 1), memory, lambda event: None)
    assert not [one for one in threading.enumerate() if one.name.endswith("-stopped")]
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_loop_that_says_a_timeout_has_not_started_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(*args: Any) -> Any:
        raise TimeoutError("the card does not answer")

    monkeypatch.setattr(ShmTransport, "loop_type", late)
    memory, before = a_memory(), set(os.listdir("/proc/self/fd"))
    with pytest.raises(TransferError, match="TimeoutError: the card"):
        ShmTransport(PeerId("d", 1), memory, lambda event: None)
    assert set(os.listdir("/proc/self/fd")) == before
