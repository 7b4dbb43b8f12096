"""A transport that says that a write is done, and has posted none of it or a part: decode counts
what it is notified of, and does not believe it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from prefixkv import DecodeConfig, PrefillConfig
from prefixkv.errors import TransferError
from prefixkv.runtime.decode_node import DecodeNode
from prefixkv.runtime.prefill_node import PrefillNode
from prefixkv.transport.base import RankMemory, WriteDone, WriteJob
from prefixkv.transport.nixl.loop import NixlTransport
from tests.support.node_pair import NodePair, make_pool, tokens_of
from tests.support.patience import NEVER_S, SkippableClock
from tests.unit.runtime.conftest import QUICK


class Liar:
    """A real transport, and what it makes of the next writes."""

    def __init__(self) -> None:
        self.how = "honest"
        self.inner: Any = None
        self.sink: Any = None
        self.lied = 0

    def make(self, me: Any, layout: Any, sink: Any, *more: Any) -> Any:
        self.inner, self.sink = NixlTransport(me, RankMemory(layout), sink, *more), sink
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, job: WriteJob) -> None:
        half = len(job.src_pages) // 2
        if self.how == "honest" or not half:
            self.inner.write(job)
            return
        self.lied += 1
        if self.how == "nothing":
            self.sink(WriteDone(job.job_id, 4096))
            return
        some = slice(half) if self.how == "first half" else slice(half, None)
        src, dst = (ids[some].copy() for ids in (job.src_pages, job.dst_pages))
        self.inner.write(dataclasses.replace(job, src_pages=src, dst_pages=dst))


@pytest.fixture
def lies(clock: SkippableClock) -> Iterator[tuple[NodePair, Liar]]:
    liar = Liar()
    with (
        DecodeNode(make_pool(64), DecodeConfig(control=QUICK)) as decode,
        PrefillNode(make_pool(64), PrefillConfig(control=QUICK), transport=liar.make) as prefill,
    ):
        pair = NodePair(decode, prefill)
        pair.p.chunk = 16
        yield pair, liar


@pytest.mark.slow
@pytest.mark.parametrize("how", ["nothing", "first half", "second half"])
def test_what_was_not_written_is_not_believed(
    lies: tuple[NodePair, Liar], how: str, clock: SkippableClock
) -> None:
    """The notifications that are missing may be on their way, until time is up."""
    pair, liar = lies
    rooms = pair.decode.transfers.control.rooms
    tokens = tokens_of(5, 32)
    liar.how = how
    pair.submit("a", tokens, max_new_tokens=2)
    pair.until(lambda: "a" in pair.d.ended or any(room.awaits_notifications for room in rooms()))
    clock.skip(2 * NEVER_S, [pair.decode, pair.prefill])
    pair.until(lambda: "a" in pair.d.ended)
    assert liar.lied
    error = pair.d.ended["a"]
    assert isinstance(error, TransferError)
    assert "unit pages are written, the notifications that came are of" in str(error)

    # Nothing of it is in the cache, and its pages are free again.
    liar.how = "honest"
    pair.submit("b", np.concatenate([tokens, tokens_of(6, 8)]), max_new_tokens=2)
    pair.until(lambda: "b" in pair.d.ended)
    assert pair.d.ended["b"] is None
    assert pair.d.prefix_lens["b"] == [0]
    assert pair.d.mismatches == 0
    pair.check_at_rest()
