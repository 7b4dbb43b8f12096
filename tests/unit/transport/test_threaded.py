"""A transport whose thread does not start leaves nothing behind."""

from __future__ import annotations

import os
import threading

import pytest

from prefixkv.errors import TransferTimeoutError
from prefixkv.protocol.ids import PeerId
from prefixkv.transport import loop as transport_loop
from prefixkv.transport.base import RankMemory
from prefixkv.transport.nixl.loop import NixlTransport
from prefixkv.transport.shm.loop import ShmTransport
from tests.support.patience import until
from tests.support.transport_pools import make_pool, shared_zeros


@pytest.mark.parametrize("kind", [NixlTransport, ShmTransport])
def test_a_thread_that_cannot_be_made_leaves_no_descriptor(
    kind: type[NixlTransport | ShmTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool("layer_major", 4, zeros=shared_zeros)

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="new thread"):
        kind(PeerId("threadless", 1), RankMemory(pool.layout), lambda event: None)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_nixl_thread_that_starts_too_late_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool("layer_major", 4)
    monkeypatch.setattr(transport_loop, "_START_TIMEOUT_S", 0.0)
    with pytest.raises(TransferTimeoutError, match="did not start"):
        NixlTransport(PeerId("late", 1), RankMemory(pool.layout), lambda event: None)
    until(lambda: not [one for one in threading.enumerate() if one.name.endswith("-late")])
