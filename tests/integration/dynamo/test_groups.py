"""A worker with checkpoints publishes to Dynamo's indexer and its selection service, with
`checkpoint_blocks`: these count the pages of the first group, as without. What becomes of a
checkpoint, which is a block with the hash of a page, is not taken for what becomes of the page. See
`test_fleet.py`."""

import json
import os
import random
import struct
import subprocess
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from prefixkv.cache.checkpoints import NO_SLOT, Checkpoints
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.config import KVEventsConfig
from prefixkv.kv_events.publisher import KVEventPublisher
from prefixkv.pages.groups import TailGroups
from prefixkv.protocol.ids import PeerId
from tests.integration.dynamo.services import Indexer, NotStartedError, Selector
from tests.support.patience import PATIENCE_S, until

PYTHON = os.environ.get("PREFIXKV_ENGINE_PYTHON", "")
FREE = "tcp://127.0.0.1:*"
NO_WINDOWS = TailGroups()
PAGE_SIZE, POOL, ROUNDS = 16, 120, 12


def test_services_count_pages_beside_checkpoints(tmp_path: Path) -> None:
    if not PYTHON:
        pytest.skip("PREFIXKV_ENGINE_PYTHON names no environment of Dynamo's")
    chance = random.Random(4)
    system = [chance.randrange(1000) for _ in range(5 * PAGE_SIZE)]
    prompts = [
        system[: chance.randrange(6) * PAGE_SIZE]
        + [chance.randrange(1000) for _ in range(chance.randrange(1, 8) * PAGE_SIZE)]
        for _ in range(30)
    ]
    cache = RadixCache(page_size=PAGE_SIZE, policy="lru", pool_pages=POOL)
    points = Checkpoints(cache, POOL, 4, NO_WINDOWS)
    free, saved = list(range(POOL)), 0
    worker = PeerId("prefill-0", 7)
    config = KVEventsConfig(FREE, FREE, FREE, heartbeat_s=0.1, checkpoint_blocks=True)
    with ExitStack() as stack:
        publisher = stack.enter_context(
            closing(KVEventPublisher(config, worker, "model", PAGE_SIZE))
        )
        [tier] = publisher.tiers
        tier.listen(cache)
        where = {"endpoint": publisher.endpoint, "replay": publisher.replay_endpoint}

        def started() -> list[Indexer | Selector]:
            try:
                both = [stack.enter_context(kind(PYTHON, tmp_path)) for kind in (Indexer, Selector)]
            except NotStartedError as error:
                pytest.skip(f"a service did not start: {error}")
            for service in both:
                service.register(1, where, PAGE_SIZE)
            return both

        def agree(services: list[Indexer | Selector]) -> None:
            tier.pass_on()
            for tokens in prompts:
                held = cache.match_prefix(tokens).prefix_len
                asked = {"tokens": tokens, "lora": None, "salt": None}
                for service in services:
                    expected = {"1": held} if held else {}
                    until(lambda s=service, a=asked, e=expected: s.found(a) == e)  # type: ignore[misc]

        services = started()
        for _ in range(ROUNDS):
            for _ in range(20):
                tokens = chance.choice(prompts)
                match = cache.match_prefix(tokens)
                missing = len(tokens) // PAGE_SIZE - match.depth
                if missing > len(free) or chance.random() < 0.2:
                    pages = cache.evict(8)
                    points.dropped(pages)
                    free += pages.tolist()
                    continue
                new, free = free[:missing], free[missing:]
                cache.insert(tokens, np.array([*match.pages.tolist(), *new], np.int32))
                match = cache.match_prefix(tokens)
                depth = chance.randrange(match.depth) + 1
                slot = points.take()
                if slot != NO_SLOT:
                    points.save(int(match.pages[depth - 1]), depth, slot)
                    saved += 1
                tier.pass_on()
            agree(services)
        assert saved > 50
        assert points.evicted > 10
        # Those that come later get a snapshot, with checkpoints behind the pages.
        assert len(points)
        agree(started())
        # A flush ends both.
        cache.reset()
        points.reset()
        agree(services)
        published = list(publisher._stream._kept.values())
    # vLLM's own decoder reads them too.
    done = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("vllm_decoder.py"))],
        input=b"".join(struct.pack(">I", len(one)) + one for one in published),
        capture_output=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr.decode()[-2000:]
    counts = json.loads(done.stdout)
    assert counts["group 1"] > saved
    assert counts["group 0"] > 50
