"""A burst behind one new prefix, on real nodes: prefill computes it once, those that wait for it
are woken, and it is sent once, whatever becomes of the first."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkv.errors import TransferError
from tests.support.node_pair import NodePair, tokens_of
from tests.unit.runtime.conftest import MakePair

PAGE_SIZE = 4
SYSTEM_TOKENS, SUFFIX_TOKENS = 32, 7
RIDS = [f"r{at}" for at in range(8)]


def submit_burst(pair: NodePair) -> None:
    system = tokens_of(1, SYSTEM_TOKENS)
    for at, rid in enumerate(RIDS):
        pair.submit(rid, np.concatenate([system, tokens_of(100 + at, SUFFIX_TOKENS)]))


def computed(pair: NodePair) -> int:
    """Tokens, of the requests that prefill's engine was handed."""
    stats = pair.prefill.stats()
    return stats["prompt_tokens"] - stats["hit_tokens"]


@pytest.fixture
def pair(make_pair: MakePair) -> NodePair:
    """Prefill's engine has the first of the burst, and computes nothing yet."""
    pair = make_pair(pool={"num_pages": 256}, prefill={"follow_s": 600.0})
    pair.p.hold = True
    submit_burst(pair)
    pair.until(lambda: pair.prefill.stats()["followed"] == len(RIDS) - 1)
    assert list(pair.p.computing) == ["r0"]
    return pair


def test_a_burst_is_computed_once(pair: NodePair) -> None:
    pair.p.hold = False
    pair.run(*RIDS)
    assert all(pair.d.ended[rid] is None for rid in RIDS)
    assert computed(pair) == SYSTEM_TOKENS + len(RIDS) * SUFFIX_TOKENS
    assert pair.prefill.stats()["overtaken"] == 0


# --- sent once ------------------------------------------------------------------------------------

SYSTEM_PAGES = SYSTEM_TOKENS // PAGE_SIZE
SUFFIX_PAGES = 2  # the second one is not full


@pytest.fixture
def burst(make_pair: MakePair) -> NodePair:
    """All of the requests are admitted, and prefill has computed two pages of the first."""
    # With the engine all at once: prefill does not compute the common part once either.
    pair = make_pair(pool={"num_pages": 256}, decode={"reserve_tokens": 0}, prefill={"follow_s": 0})
    pair.p.hold = True
    submit_burst(pair)
    pair.until(lambda: all(rid in pair.p.computing for rid in RIDS))
    assert pair.decode.stats()["shared_flights"] == len(RIDS) - 1
    assert pair.decode.stats()["shared_tokens"] == (len(RIDS) - 1) * SYSTEM_TOKENS
    pair.p.compute(pair.p.computing["r0"])
    pair.until(lambda: sent_pages(pair) == 2)
    return pair


def sent_pages(pair: NodePair) -> int:
    return pair.prefill.stats()["bytes_sent"] // pair.prefill.pool.layout.page_bytes


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
    assert all(burst.d.prefix_lens[rid] == [SYSTEM_TOKENS] for rid in RIDS[1:])


@pytest.mark.usefixtures("_any_wire")
def test_if_the_first_fails_another_brings_what_all_lack(burst: NodePair) -> None:
    assert burst.prefill.abort("r0")
    # It would go on with the first attempts, on a machine that is slow to tell.
    burst.until(lambda: burst.p.failed.keys() >= set(RIDS))
    go_on(burst)
    assert isinstance(burst.d.ended["r0"], TransferError)
    assert all(burst.d.ended[rid] is None for rid in RIDS[1:])
    assert sent_pages(burst) == 2 + SYSTEM_PAGES + (len(RIDS) - 1) * SUFFIX_PAGES
    assert burst.decode.stats()["flight_fallbacks"] == len(RIDS) - 1
