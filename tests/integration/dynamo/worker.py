"""A decode worker in a process of its own: a real scheduler, tree and publisher; the control plane
is played by hand. Takes orders as JSON lines, and answers each with one.

    run    so many operations: requests of chats that go on, aborts, now and then a flush
    match  how many tokens of each prompt the tree has, and how many pages it has in all
    close  the publisher says that nothing is held, and the process ends
"""

import json
import random
import sys
import time
from typing import Any

from prefixkv import KVEventsConfig, Namespace, Request
from prefixkv.kv_events import publisher as publisher_module
from prefixkv.kv_events.publisher import KVEventPublisher
from prefixkv.pages.manager import PageManager
from prefixkv.protocol.commands import OpenRoom
from prefixkv.protocol.events import RoomEnded
from prefixkv.protocol.ids import KVPoll, PeerId
from tests.support.schedulers import decode_scheduler

PAGE_SIZE = 16
NUM_PAGES = 1500
MAX_NEW_TOKENS = 64


def namespace_of(lora: str | None, salt: str | None) -> Namespace | None:
    return Namespace(lora, salt) if lora or salt else None


class Worker:
    def __init__(self, name: str, chats: list[dict[str, Any]], config: KVEventsConfig) -> None:
        self._chats = chats
        self._num_requests = 0
        self.pages = PageManager(NUM_PAGES, PAGE_SIZE, 8, NUM_PAGES)
        self.scheduler = decode_scheduler(self.pages, reserve_tokens=PAGE_SIZE)
        life = random.SystemRandom().getrandbits(60)
        self.publisher = KVEventPublisher(config, PeerId(name, life), "model", PAGE_SIZE)
        self.publisher.tiers[0].listen(self.pages.cache)

    def run(self, num_operations: int, seed: int, per_second: float, flushes: float) -> int:
        """At most so many a second, of which so many are flushes. Returns how many pages were
        evicted meanwhile."""
        chance, evicted = random.Random(seed), self.pages.evicted_pages
        begun_s = time.monotonic()
        for number in range(num_operations):
            if chance.random() < flushes:
                self.scheduler.flush()
            else:
                self._serve(chance)
            self.publisher.tiers[0].pass_on()
            ahead_s = begun_s + number / per_second - time.monotonic()
            if ahead_s > 0:
                time.sleep(ahead_s)
        return self.pages.evicted_pages - evicted

    def _serve(self, chance: random.Random) -> None:
        """A turn of a chat, from its arrival to its end; or an abort."""
        chat = chance.choice(self._chats)
        tokens = chat["tokens"][: chance.randrange(1, len(chat["tokens"]))]
        self._num_requests += 1
        self.scheduler.now_s += 0.1
        request = Request(
            str(self._num_requests), tokens, MAX_NEW_TOKENS, room=self._num_requests,
            prefill="tcp://127.0.0.1:1", namespace=namespace_of(chat["lora"], chat["salt"]),
        )  # fmt: skip
        self.publisher.blocks.check(request.key.namespace)
        self.scheduler.add(request)
        [req] = self.scheduler.pop_preallocated()
        assert any(isinstance(command, OpenRoom) for command in self.scheduler.take_commands())
        self.scheduler.hear(RoomEnded(req.room_key, KVPoll.SUCCESS), self.scheduler.now_s)
        [req] = self.scheduler.pop_transferred()
        # What the chat goes on with is in its tokens already, so that its next turn hits.
        for token in chat["tokens"][len(tokens) : len(tokens) + chance.randrange(1, 40)]:
            self.scheduler.append_many([req], [token])
        if chance.random() < 0.05:
            self.scheduler.abort(req.rid)
            self.scheduler.pop_failed()
        else:
            self.scheduler.finish(req)

    def match(self, prompts: list[dict[str, Any]]) -> list[int]:
        cache = self.pages.cache
        return [
            cache.match_prefix(one["tokens"], namespace_of(one["lora"], one["salt"])).prefix_len
            for one in prompts
        ]


def main() -> None:
    start = json.loads(sys.stdin.readline())
    publisher_module._QUEUE_BATCHES = start["queue_batches"]
    worker = Worker(start["name"], start["chats"], KVEventsConfig(**start["config"]))
    publisher = worker.publisher
    answer: Any = {
        "endpoint": publisher.endpoint,
        "replay": publisher.replay_endpoint,
        "snapshot": publisher.snapshot_endpoint,
    }
    while True:
        print(json.dumps(answer), flush=True)
        order = json.loads(sys.stdin.readline() or '{"do": "close"}')
        match order.pop("do"):
            case "run":
                answer = worker.run(**order)
            case "match":
                worker.scheduler.check_invariants()
                found = worker.match(order["prompts"])
                answer = {"found": found, "pages": worker.pages.cache.num_pages}
            case "stats":
                answer = publisher.stats()
            case "close":
                publisher.close()
                return


if __name__ == "__main__":
    main()
