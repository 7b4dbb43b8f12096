"""Aborts from either side, at every point of a request's life, and rooms that are used again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixkv.errors import AbortedError, TransferError
from tests.support.node_pair import NodePair, left, tokens_of
from tests.support.node_stages import (
    STAGES,
    Proceed,
    arrived,
    computing,
    full_hit,
    promised,
    queued,
    running,
    transferring,
)


@pytest.mark.parametrize("stage", STAGES)
def test_decode_aborts(pair: NodePair, stage: Callable[[NodePair], Proceed]) -> None:
    proceed = stage(pair)
    assert pair.decode.abort("r")
    assert not pair.decode.abort("r")
    pair.until(lambda: "r" in pair.d.ended)
    assert isinstance(pair.d.ended["r"], AbortedError)
    if stage in (computing, transferring):  # else prefill may be done before it hears of it
        pair.until(lambda: "r" in pair.p.failed)
        assert "aborted" in str(pair.p.failed["r"])
    proceed()
    if stage is queued:
        pair.until(lambda: "big" in pair.d.ended)
        pair.until(lambda: "r" in pair.p.failed)  # which has never been promised anything
        assert "aborted" in str(pair.p.failed["r"])
    pair.settle()
    pair.d.hold_running = pair.p.hold = False
    if stage in (promised, full_hit):  # prefill's engine comes late, and hears of it at once
        pair.p.add("r", tokens_of(1, 28 if stage is full_hit else 30), 5)
        pair.until(lambda: "r" in pair.p.failed)
        assert isinstance(pair.p.failed["r"], AbortedError)
    pair.submit("next", tokens_of(1, 34))  # and life goes on
    pair.run("next")
    assert pair.d.ended["next"] is None


@pytest.mark.parametrize("stage", [queued, computing, transferring, arrived, running])
def test_prefill_aborts(pair: NodePair, stage: Callable[[NodePair], Proceed]) -> None:
    proceed = stage(pair)
    too_late = stage in (arrived, running)
    if stage is running:
        pair.until(lambda: not left(pair.prefill))
    assert pair.prefill.abort("r") is (stage is not running) or too_late
    proceed()
    pair.d.hold_running = pair.p.hold = False
    pair.until(lambda: "r" in pair.d.ended)
    if too_late:
        assert pair.d.ended["r"] is None
    else:
        assert isinstance(pair.d.ended["r"], TransferError)
        assert "aborted" in str(pair.d.ended["r"]), "also where decode had promised nothing yet"
    if stage is queued:
        pair.until(lambda: pair.d.ended.get("big", True) is None)
    pair.settle()


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_what_was_not_posted_yet_is_not_waited_for(pair: NodePair, side: str) -> None:
    """The device is never done with the second chunk: an abort is drained all the same."""
    transferring(pair)
    getattr(pair, side).abort("r")
    pair.until(lambda: "r" in pair.d.ended)
    pair.settle()
