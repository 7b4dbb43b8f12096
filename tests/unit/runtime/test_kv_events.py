"""Both nodes publish what their caches do; a follower of the sockets knows the trees."""

from contextlib import closing
from typing import Any

import pytest

from prefixkv.cache.events import page_keys
from prefixkv.cache.radix_key import Namespace, RadixKey
from prefixkv.config import HostConfig, KVEventsConfig
from prefixkv.errors import RequestError
from prefixkv.request import Request
from prefixkv.serving.router import WorkerIndex
from tests.support.node_pair import tokens_of
from tests.support.patience import until
from tests.unit.kv_events.follower import Subscriber
from tests.unit.runtime.conftest import MakePair

FREE = "tcp://127.0.0.1:*"
EVENTS = KVEventsConfig(FREE, FREE, FREE, heartbeat_s=0.05)
PAGE_SIZE = 4


def agrees(node: Any, namespace: Namespace | None = None) -> int:
    """What a router that comes now knows is what the node's tree has; how many pages that is."""
    node.stats()
    until(lambda: node.kv_events.idle)
    cache = node.pages.cache
    with closing(Subscriber(node.kv_events, PAGE_SIZE)) as subscriber:
        subscriber.follow_until(node.kv_events._stream.next_seq)
        assert len(subscriber.follower.blocks) == cache.num_pages
        for seed in range(1, 8):
            prompt = tokens_of(seed, 60)
            for name in (None, namespace):
                held = cache.match_prefix(prompt, name).prefix_len
                assert subscriber.follower.matched(prompt, name) == held
    return int(cache.num_pages)


def test_routers_know_both_trees(make_pair: MakePair) -> None:
    pair = make_pair(decode={"kv_events": EVENTS}, prefill={"kv_events": EVENTS})
    assert pair.decode.kv_events.topic == f"kv@{pair.decode.peer_id.name}@unnamed"
    for seed in range(1, 8):  # more than the pools have pages
        pair.submit(f"r{seed}", tokens_of(seed, 50), max_new_tokens=2)
        pair.run(f"r{seed}")
    for node in (pair.decode, pair.prefill):
        assert node.stats()["evicted_pages"]
        assert agrees(node) > 20
    pair.decode.flush()
    assert agrees(pair.decode) == 0


def test_routers_know_what_is_in_host_memory(make_pair: MakePair) -> None:
    host = HostConfig(num_pages=200, policy="lru")
    decode = {"kv_events": EVENTS, "host_memory": host, "reserve_tokens": 0}
    pair = make_pair(pool={"num_pages": 40}, decode=decode)
    node, index = pair.decode, WorkerIndex(1000)
    caches = {"GPU": node.pages.cache, "CPU": node.tier.cache}
    prompts = [tokens_of(seed, 50) for seed in range(1, 8)]  # more than the pool has pages

    def all_agree() -> None:
        assert index.apply(node.take_cache_events())
        until(lambda: node.kv_events is not None and node.kv_events.idle)
        with closing(Subscriber(node.kv_events, PAGE_SIZE, media=("GPU", "CPU"))) as subscriber:
            subscriber.follow_until(node.kv_events._stream.next_seq)
            follower = subscriber.follower
        for medium, cache in caches.items():
            assert len(follower.held[medium]) == cache.num_pages
        for prompt in prompts:
            depths = {medium: cache.match_prefix(prompt).depth for medium, cache in caches.items()}
            for medium, depth in depths.items():
                assert follower.matched(prompt, medium=medium) == depth * PAGE_SIZE
            keys = page_keys(RadixKey(prompt).data, PAGE_SIZE)
            assert index.depth(None, keys) == max(depths.values())

    all_agree()
    for number, prompt in enumerate(prompts):
        pair.submit(f"r{number}", prompt, max_new_tokens=2)
        pair.run(f"r{number}")
    pair.until(lambda: not node.stats()["host_copies"])
    assert caches["GPU"].match_prefix(prompts[0]).depth == 0
    assert caches["CPU"].match_prefix(prompts[0]).depth == 12
    all_agree()
    node.flush()
    assert caches["CPU"].num_pages == 0
    all_agree()


def test_a_node_tells_without_being_asked_for_anything_else(make_pair: MakePair) -> None:
    """The end of a call is enough: an engine without requests does not call again."""
    pair = make_pair(decode={"kv_events": EVENTS})
    publisher = pair.decode.kv_events
    assert publisher is not None
    with closing(Subscriber(publisher, PAGE_SIZE)) as subscriber:
        pair.submit("a", tokens_of(1, 40), max_new_tokens=2)
        pair.run("a")
        cache = pair.decode.pages.cache
        assert cache.num_pages >= 10
        while len(subscriber.follower.blocks) < cache.num_pages:
            subscriber.follow()
        pair.decode.flush()
        while subscriber.follower.blocks:
            subscriber.follow()


def test_a_namespace_that_has_no_words_is_refused_on_both_sides(make_pair: MakePair) -> None:
    pair = make_pair(decode={"kv_events": EVENTS}, prefill={"kv_events": EVENTS})
    prompt = tokens_of(1, 40)
    before = pair.decode.stats()
    with pytest.raises(RequestError, match="no words"):
        pair.decode.add(Request("a", prompt, room=1, prefill="tcp://127.0.0.1:1", namespace="l"))
    assert pair.decode.stats() == before
    with pytest.raises(RequestError, match="no words"):
        pair.prefill.add(Request("a", prompt, room=1, decode="decode-0", namespace="l"))
    # One that is not cached is not told of.
    where = {"prefill": "tcp://127.0.0.1:1", "namespace": "l"}
    pair.decode._check_new(Request("b", prompt, room=2, cacheable=False, **where), 1, "")


def test_a_namespace_with_words_travels_to_both(make_pair: MakePair) -> None:
    pair = make_pair(decode={"kv_events": EVENTS}, prefill={"kv_events": EVENTS})
    named = Namespace(lora="legal", salt="tenant", images=[("cat", 0, 3)])
    pair.submit("a", RadixKey(tokens_of(1, 40), named), max_new_tokens=2)
    pair.run("a")
    for node in (pair.decode, pair.prefill):
        assert agrees(node, named) >= 10
