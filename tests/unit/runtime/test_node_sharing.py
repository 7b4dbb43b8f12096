"""A burst of requests with one new system prompt, over real NIXL: it is sent once, whatever becomes
of the first."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkv.errors import TransferError
from tests.support.node_pair import NodePair, tokens_of
from tests.unit.runtime.conftest import MakePair

PAGE_SIZE = 4
SYSTEM_PAGES = 8
SUFFIX_PAGES = 2  # the second one is not full
RIDS = [f"r{at}" for at in range(12)]


@pytest.fixture
def burst(make_pair: MakePair) -> NodePair:
    """All of the requests are admitted, and prefill has computed two pages of the first."""
    # With the engine all at once: prefill does not compute the common part once either.
    pair = make_pair(pool={"num_pages": 256}, decode={"reserve_tokens": 0}, prefill={"follow_s": 0})
    pair.p.hold = True
    system = tokens_of(1, SYSTEM_PAGES * PAGE_SIZE)
    for at, rid in enumerate(RIDS):
        pair.submit(
            rid, np.concatenate([system, tokens_of(100 + at, SUFFIX_PAGES * PAGE_SIZE - 1)])
        )
    pair.until(lambda: all(rid in pair.p.computing for rid in RIDS))
    assert pair.decode.stats()["shared_flights"] == len(RIDS) - 1
    assert pair.decode.stats()["shared_tokens"] == (len(RIDS) - 1) * SYSTEM_PAGES * PAGE_SIZE
    pair.p.compute(pair.p.computing["r0"])
    pair.until(lambda: sent_pages(pair) == 2)
    return pair


def sent_pages(pair: NodePair) -> int:
    return pair.prefill.stats()["bytes_sent"] // pair.prefill.pool.layout.page_bytes


def prefill_has_heard(pair: NodePair, rids: list[str]) -> None:
    """That the first attempts at these are over: it would go on with them, on a machine that is
    slow to tell."""
    pair.until(lambda: all(rid in pair.p.failed for rid in rids))


def go_on(pair: NodePair) -> None:
    pair.p.hold = False
    pair.run(*RIDS)


@pytest.mark.usefixtures("_any_wire")
def test_the_system_prompt_is_sent_once(burst: NodePair) -> None:
    go_on(burst)
    assert all(burst.d.ended[rid] is None for rid in RIDS)
    assert sent_pages(burst) == SYSTEM_PAGES + len(RIDS) * SUFFIX_PAGES
    stats = burst.decode.stats()
    assert stats["skipped_tokens"] == stats["shared_tokens"] > 0
    assert "hit_tokens" not in stats
    assert [burst.d.prefix_lens[rid] for rid in RIDS[1:]] == [[SYSTEM_PAGES * PAGE_SIZE]] * (
        len(RIDS) - 1
    )


@pytest.mark.usefixtures("_any_wire")
def test_if_the_first_fails_another_brings_what_all_lack(burst: NodePair) -> None:
    assert burst.prefill.abort("r0")
    prefill_has_heard(burst, RIDS)
    go_on(burst)
    assert isinstance(burst.d.ended["r0"], TransferError)
    assert all(burst.d.ended[rid] is None for rid in RIDS[1:])
    assert sent_pages(burst) == 2 + SYSTEM_PAGES + (len(RIDS) - 1) * SUFFIX_PAGES
    assert burst.decode.stats()["flight_fallbacks"] == len(RIDS) - 1
