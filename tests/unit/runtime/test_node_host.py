"""Real nodes of which decode keeps in host memory what its pool forgets: every byte is checked."""

import threading
from typing import Any

import numpy as np
import pytest

from prefixkv import ComputeConfig, DecodeConfig, DecodeNode, HostConfig, Mesh
from prefixkv.cache.eviction.plain import LeastRecentlyUsed
from prefixkv.decode.host_tier import HostTier, make_host
from prefixkv.errors import ConfigError
from prefixkv.memory.host_pool import HostPool
from prefixkv.protocol.ids import PeerId
from prefixkv.ranks.row_log import RankLog
from prefixkv.runtime.host_copies import HostCopies
from prefixkv.spi import DecodeRank
from prefixkv.threads import Inbox
from prefixkv.transfer import DecodeTransfers
from tests.support.mesh_workers import MeshPair
from tests.support.node_pair import NodePair, make_pool, tokens_of
from tests.unit.runtime.conftest import MakePair

HOST = HostConfig(num_pages=512, policy="lru")


@pytest.fixture(autouse=True)
def _loads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a load takes is never known: on a busy machine prefill's stand-in may be quicker than
    threads that wait for a processor."""
    monkeypatch.setattr(HostTier, "load_s", lambda *_: 0.0)


def chats(pair: NodePair, num_chats: int, num_turns: int) -> dict[str, list[int]]:
    """Conversations that take turns, each too long to stay in the pool until its next one. Returns
    the prefixes that each turn found."""
    histories = [tokens_of(chat, 50) for chat in range(num_chats)]
    found: dict[str, list[int]] = {}
    for turn in range(num_turns):
        for chat, history in enumerate(histories):
            rid = f"c{chat}.{turn}"
            req = pair.submit(rid, history)
            pair.run(rid)
            # The first copies on a GPU wait for their kernels to be compiled.
            pair.until(lambda: not pair.decode.stats()["host_copies"])
            found[rid] = pair.d.prefix_lens[rid]
            more = tokens_of(1000 * chat + turn, 9)
            histories[chat] = np.concatenate([req.tokens, more])
    return found


@pytest.mark.usefixtures("_any_wire")
def test_next_turns_find_in_host_memory_what_the_pool_forgot(make_pair: MakePair) -> None:
    pair = make_pair(pool={"num_pages": 64}, decode={"reserve_tokens": 0, "host_memory": HOST})
    found = chats(pair, 6, 3)
    stats = pair.decode.stats()
    assert stats["host_hit_tokens"] > 500, stats
    assert stats["evicted_pages"] > 0
    # A later turn lacks what is new, and the page that the last answer ended in.
    for rid, (prefix_len,) in found.items():
        turn = int(rid[-1])
        assert prefix_len >= (0, 48, 60)[turn], found
    pair.check_at_rest()
    pair.until(lambda: not pair.decode.stats()["host_copies"])
    assert pair.decode.stats()["host_pages_cached"] <= stats["host_pages"] == 512


@pytest.mark.parametrize("page_sizes", [(4, 4), (8, 4)], ids=["whole", "parts of pages"])
def test_every_rank_copies_its_own_part(page_sizes: tuple[int, int]) -> None:
    """Two ranks of decode, each with half of the heads: all bytes of both are checked."""
    one, two = (Mesh(2, 4, tp_size=tp) for tp in (1, 2))
    host = HostConfig(num_pages=256, policy="lru")
    pair = MeshPair(
        one, two, page_sizes=page_sizes, num_pages=48, decode_config=DecodeConfig(host_memory=host)
    )
    with pair:
        prompts = [tokens_of(chat, 50) for chat in range(5)]
        for turn in range(3):
            for chat, prompt in enumerate(prompts):
                room = 100 * turn + chat + 1
                pair.serve(room, {f"c{chat}.{turn}": prompt[: 40 + 5 * turn]})
                pair.until(lambda: not pair.decode.stats()["host_copies"])
        stats = pair.decode.stats()
        assert stats["host_hit_tokens"] > 200, stats
        assert not pair.failed
        assert stats["host_copies_failed"] == 0
        pair.check_at_rest()


def test_a_rank_with_other_host_memory_is_refused() -> None:
    config = DecodeConfig(host_memory=HostConfig(num_pages=8, policy="lru"))
    other = DecodeConfig(host_memory=HostConfig(num_pages=9, policy="lru"))
    mesh = Mesh(2, 2, tp_size=2)
    with (
        DecodeNode(make_pool(16, num_kv_heads=1), config, RankLog(), mesh) as node,
        DecodeRank(make_pool(16, num_kv_heads=1), config, mesh, 1, node.peer_id) as alike,
        DecodeRank(make_pool(16, num_kv_heads=1), other, mesh, 1, node.peer_id) as unlike,
    ):
        message = node.take_log()
        alike.apply(message)
        with pytest.raises(ConfigError, match="host_pages is 9 on this rank, 8 on rank 0"):
            unlike.apply(message)


def test_a_rank_without_the_part_for_host_memory_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DecodeNode, "make_tier", lambda *_: None)
    config = DecodeConfig(host_memory=HostConfig(num_pages=8))
    with pytest.raises(ConfigError, match="host_memory: this installation has no part"):
        DecodeRank(make_pool(16, num_kv_heads=1), config, Mesh(2, 2, tp_size=2), 1, PeerId("d", 1))


def test_an_inbox_is_closed_once_no_copy_writes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[str] = []
    close = Inbox.close

    def look(inbox: Inbox[Any]) -> None:
        beside.extend(one.name for one in threading.enumerate() if "host-copy" in one.name)
        close(inbox)

    monkeypatch.setattr(Inbox, "close", look)
    config = DecodeConfig(host_memory=HostConfig(num_pages=8, policy="lru"))
    mesh = Mesh(2, 2, tp_size=2)
    node = DecodeNode(make_pool(16, num_kv_heads=1), config, RankLog(), mesh)
    rank = DecodeRank(make_pool(16, num_kv_heads=1), config, mesh, 1, node.peer_id)
    rank.close()
    assert not [name for name in beside if name.startswith(f"prefixkv-host-copy-{config.name}/1-")]
    beside.clear()
    node.close()
    assert not beside


@pytest.mark.parametrize(("num_pages", "is_told"), [(127, True), (128, False)])
def test_a_node_says_so_where_host_memory_is_below_twice_the_pool(
    num_pages: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = DecodeConfig(name="d7", host_memory=HostConfig(num_pages=num_pages))
    with DecodeNode(make_pool(64), config):
        told = [one.getMessage() for one in caplog.records if one.name == "prefixkv.host"]
    wanted = f"d7: host memory has {num_pages} pages and the pool 64: less than twice the pool is"
    assert [one.partition(" of little use")[0] for one in told] == [wanted] * is_told


def test_host_memory_has_the_size_that_is_asked_for() -> None:
    assert HostConfig().pages_of(pool_pages=100, page_bytes=1024) == 400
    assert HostConfig(times=0.001).pages_of(100, 1024) == 1
    assert HostConfig(num_bytes=5000).pages_of(100, 1024) == 4
    assert HostConfig(num_pages=7).pages_of(100, 1024) == 7
    with pytest.raises(ConfigError, match="give one of them"):
        HostConfig(num_pages=4, num_bytes=4096)


def test_a_node_that_cannot_be_made_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part fails, policy objects serve the next node, and host memory is given back."""
    closed: list[HostPool] = []
    close = HostPool.close
    monkeypatch.setattr(HostPool, "close", lambda pool: (closed.append(pool), close(pool)))
    pools, hosts = LeastRecentlyUsed(), LeastRecentlyUsed()
    before = set(threading.enumerate())

    def node(host_policy: LeastRecentlyUsed) -> DecodeNode:
        host = HostConfig(num_pages=128, policy=host_policy)
        return DecodeNode(make_pool(64), DecodeConfig(policy=pools, host_memory=host))

    # 1. The scheduler, after the pages: one object cannot serve two caches.
    with pytest.raises(ConfigError, match="serves a cache already"):
        node(pools)
    assert len(closed) == 1
    # 2. The transfer side, and the threads that copy: the last part, when all others are there.
    for kind, name in ((DecodeTransfers, "__init__"), (HostCopies, "__init__")):
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, _fail)
            with pytest.raises(OSError, match="no more threads"):
                node(hosts)
        assert set(threading.enumerate()) <= before
    assert len(closed) == 3
    # 3. The scheduler, after the host's tree: a part that is asked for and left out.
    with monkeypatch.context() as patch:
        patch.setattr(DecodeNode, "source_makers", [make_host])
        host = HostConfig(num_pages=128, policy=hosts)
        with pytest.raises(ConfigError, match="compute: this installation"):
            DecodeNode(make_pool(64), DecodeConfig(host_memory=host, compute=ComputeConfig()))
    node(hosts).close()


def _fail(*_: Any, **__: Any) -> None:
    raise OSError("no more threads")
