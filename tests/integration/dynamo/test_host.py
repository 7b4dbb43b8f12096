"""A worker with host memory publishes to Dynamo's indexer and its selection service: both know of a
prompt what the pool has, and what host memory has. See `test_fleet.py`."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from prefixkv.cache.radix_cache import RadixCache
from prefixkv.config import KVEventsConfig
from prefixkv.kv_events.publisher import KVEventPublisher
from prefixkv.protocol.ids import PeerId
from tests.integration.dynamo.services import Indexer, NotStartedError, Selector
from tests.support.patience import until

PYTHON = os.environ.get("PREFIXKV_ENGINE_PYTHON", "")
FREE = "tcp://127.0.0.1:*"
PAGE_SIZE = 16
ONE, TWO = list(range(64)), list(range(1000, 1064))


class Worker:
    """Both trees of one worker, their publisher, and the services that hear it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.pool, self.host = RadixCache(page_size=PAGE_SIZE), RadixCache(page_size=PAGE_SIZE)
        config = KVEventsConfig(FREE, FREE, FREE, heartbeat_s=0.1)
        worker = PeerId("decode-0", 7)
        self.publisher = KVEventPublisher(config, worker, "model", PAGE_SIZE, has_host=True)
        stack.enter_context(closing(self.publisher))
        self.publisher.tiers[0].listen(self.pool)
        self.publisher.tiers[1].listen(self.host)
        self.indexer = stack.enter_context(Indexer(PYTHON, folder))
        self.selector = stack.enter_context(Selector(PYTHON, folder))
        where = {"endpoint": self.publisher.endpoint, "replay": self.publisher.replay_endpoint}
        for service in (self.indexer, self.selector):
            service.register(1, where, PAGE_SIZE)

    def found(self, tokens: list[int]) -> list[tuple[int, int]]:
        """Tokens of a prompt by the indexer and by the service: in the pool, in either."""
        asked = {"token_ids": tokens, "model_name": "model"}
        known = self.indexer.post("/query", asked)["instances"].get("1", {"gpu": 0, "cpu": 0})
        [one] = self.selector.post("/overlap_scores", asked)["workers"]
        blocks = one["device_blocks"], one["host_pinned_blocks"]
        return [(known["gpu"], known["cpu"]), (blocks[0] * PAGE_SIZE, blocks[1] * PAGE_SIZE)]

    def agrees(self) -> None:
        """What the services say comes to be what the trees have."""
        self.publisher.tiers[0].pass_on()
        self.publisher.tiers[1].pass_on()
        for tokens in (ONE, TWO):
            depths = [cache.match_prefix(tokens).prefix_len for cache in (self.pool, self.host)]
            expected = [(depths[0], max(depths))] * 2
            until(lambda tokens=tokens, expected=expected: self.found(tokens) == expected)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    if not PYTHON:
        pytest.skip("PREFIXKV_ENGINE_PYTHON names no environment of Dynamo's")
    with ExitStack() as stack:
        try:
            started = Worker(tmp_path, stack)
        except NotStartedError as error:
            pytest.skip(f"a service did not start: {error}")
        yield started


def test_services_know_both_kinds_of_memory(worker: Worker) -> None:
    worker.pool.insert(ONE, [0, 1, 2, 3])
    worker.agrees()
    worker.host.insert(ONE, [10, 11, 12, 13])
    worker.host.insert(TWO, [14, 15, 16, 17])
    worker.agrees()
    # What leaves the pool is in host memory still.
    worker.pool.evict(4)
    worker.agrees()
    worker.host.evict(2)
    worker.agrees()
    worker.pool.insert(ONE, [0, 1, 2, 3])
    worker.agrees()
    # The end of all that one of both has is not that of the other.
    worker.pool.reset()
    worker.agrees()
    worker.pool.insert(TWO, [4, 5, 6, 7])
    worker.host.reset()
    worker.agrees()
    worker.pool.reset()
    worker.agrees()
