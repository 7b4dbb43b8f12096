"""The stand-in engine over a fake pair of nodes: answers and KV are the same whatever scheduling
does to them."""

import contextlib
import itertools
import os
import threading
from collections import deque
from multiprocessing import Pipe
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.stand_in.engine import END_OF_PASS, DecodeEngine, PrefillEngine
from benchmarks.stand_in.workload import Clients, arrival_times
from prefixkv.cli.chats.workload import chat
from prefixkv.errors import OutOfPagesError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.paging import pages_for
from prefixkv.protocol.ids import PeerId
from prefixkv.testing.hashing import PrefixHasher, sample
from prefixkv.testing.pattern import KVPattern
from tests.models.patience import PATIENCE_S

PAGE_SIZE = 4


class FakePair:
    """Decode and prefill nodes over two pools: pages move by a copy, `corrupt(pages)` may spoil
    what has arrived.

    Decode caches whole pages by everything up to their end; only what finished requests leave is
    cached. Every `squeeze`th `append_many` is out of pages and names the request that joined last.
    """

    def __init__(self, pages=200, cache=True, corrupt=None, squeeze=0):
        self.squeeze = squeeze
        self.lock = threading.RLock()
        self.pools = [KVPool.create(n, PAGE_SIZE, 2, 2, 8) for n in (400, pages)]
        self.cache, self.cached, self.corrupt = cache, {}, corrupt
        self.free = deque(range(pages))
        self.promised, self.asked, self.finished_tokens = {}, {}, {}
        self.prefill, self.decode = FakePrefill(self), FakeDecode(self)


class FakeNode:
    def __init__(self, pair):
        self.pair = pair
        self.event = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self):
        return self.event

    def wake(self):
        os.eventfd_write(self.event, 1)

    def take(self, queue):
        with self.pair.lock:
            out = list(queue)
            queue.clear()
            return out


class FakePrefill(FakeNode):
    def __init__(self, pair):
        super().__init__(pair)
        self.bootstrapped, self.sent, self.next_page = [], [], 0
        self.reqs = {}

    def add(self, request):
        with self.pair.lock:
            self.pair.asked[request.room, request.generation] = request
            self.match(request.room, request.generation)

    def match(self, room, generation):
        key = room, generation
        if key in self.pair.asked and key in self.pair.promised:
            request = self.pair.asked.pop(key)
            tokens = np.asarray(request.tokens)
            count = pages_for(len(tokens), PAGE_SIZE)
            pages = np.arange(self.next_page, self.next_page + count, dtype=np.int32) % 400
            self.next_page += count
            req = SimpleNamespace(
                rid=request.rid,
                request=request,
                key=key,
                pages=pages,
                prefix_len=0,
                cursor=0,
                n=len(tokens),
            )
            self.reqs[request.rid] = req
            self.bootstrapped.append(req)
            self.wake()

    def send_chunk(self, req, end, last, aux):
        with self.pair.lock:
            target = self.pair.promised[req.key]
            assert end == req.n if last else end < req.n
            whole = pages_for(end, PAGE_SIZE) if last else end // PAGE_SIZE
            span = slice(max(req.cursor, target.prefix_len // PAGE_SIZE), whole)
            ours, theirs = self.pair.pools
            theirs.write_pages(target.pages[span], ours.read_pages(req.pages[span]))
            if self.pair.corrupt:
                self.pair.corrupt(target.pages[span], theirs)
            req.cursor = max(req.cursor, whole)
            if last:
                target.aux = aux
                self.pair.decode.transferred.append(target)
                self.pair.decode.wake()
                self.sent.append(req)
                self.wake()

    def pop_bootstrapped(self):
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event)
        return self.take(self.bootstrapped)

    def pop_sent(self):
        return self.take(self.sent)

    def pop_failed(self):
        return []


class FakeDecode(FakeNode):
    peer_id = PeerId("decode", 1)

    def __init__(self, pair):
        super().__init__(pair)
        self.queued, self.transferred, self.failed, self.asks, self.running = [], [], [], [], []
        self.appends = 0

    def add(self, request):
        req = SimpleNamespace(
            rid=request.rid,
            room=request.room,
            request=request,
            generation=0,
            output=[],
            aux=b"",
            pages=None,
        )
        self.queued.append(req)

    def fill(self, req):
        return np.concatenate(
            [np.asarray(req.request.tokens), np.array(req.output[:-1], dtype=np.int32)]
        )

    def pop_preallocated(self):
        pair, out = self.pair, []
        with pair.lock:
            for req in list(self.queued):
                tokens = self.fill(req)
                hit = []
                for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE):
                    page = pair.cached.get(tokens[:end].astype(np.int32).tobytes())
                    if page is None or not pair.cache:
                        break
                    hit.append(page)
                need = pages_for(len(tokens) + bool(req.output), PAGE_SIZE) - len(hit)
                if len(pair.free) < need:
                    break
                self.queued.remove(req)
                req.prefix_len = len(hit) * PAGE_SIZE
                req.pages = np.array(
                    hit + [pair.free.popleft() for _ in range(need)], dtype=np.int32
                )
                pair.promised[req.room, req.generation] = req
                pair.prefill.match(req.room, req.generation)
                out.append(req)
        return out

    def pages_of(self, req):
        return [req.pages]

    def pop_needs_prefill(self):
        return self.take(self.asks)

    def pop_failed(self):
        return self.take(self.failed)

    def pop_transferred(self):
        return self.take(self.transferred)

    def append_many(self, reqs, tokens):
        needed = [
            len(req.request.tokens) + len(req.output) + 1 > len(req.pages) * PAGE_SIZE
            for req in reqs
        ]
        self.running = [req for req in self.running if req not in reqs] + list(reqs)
        self.appends += 1
        if self.pair.squeeze and self.appends % self.pair.squeeze == 0:
            raise OutOfPagesError(sum(needed), 0, 0, (self.running[-1].rid, "another"))
        for req, token, more in zip(reqs, tokens, needed, strict=True):
            req.output.append(token)
            if more:
                req.pages = np.append(req.pages, np.int32(self.pair.free.popleft()))

    def release(self, req):
        own = [page for page in req.pages.tolist() if page not in self.pair.cached.values()]
        self.running = [other for other in self.running if other is not req]
        self.pair.free.extend(own)

    def retract(self, rid):
        req = next(req for req in self.running if req.rid == rid)
        self.release(req)
        req.generation += 1
        req.aux = b""
        self.queued.append(req)
        known = req.output[-1] if req.output else None
        self.asks.append(
            SimpleNamespace(
                rid=rid,
                tokens=self.fill(req),
                room=req.room,
                generation=req.generation,
                decode="decode",
                known_token=known,
            )
        )

    def finish(self, req, continues):
        tokens = self.fill(req).astype(np.int32)
        self.pair.finished_tokens[req.room] = (tokens, list(req.output), continues)
        for i in range(len(tokens) // PAGE_SIZE if self.pair.cache else 0):
            self.pair.cached.setdefault(tokens[: (i + 1) * PAGE_SIZE].tobytes(), int(req.pages[i]))
        self.release(req)


WORKLOAD = chat(3, 4, 3, system_tokens=9, user_tokens=7, output_tokens=12)


def play(pair, verify=True, concurrency=4):
    """One pass over WORKLOAD; returns (measured, prefill engine)."""
    asks_in, asks_out = Pipe(duplex=False)
    kvs = [[KVPattern(pool.layout, 7, pool)] for pool in pair.pools]
    prefill = PrefillEngine(pair.prefill, kvs[0], asks_in, chunk_tokens=6)
    thread = threading.Thread(target=prefill.run)
    thread.start()
    try:
        told = []
        engine = DecodeEngine(
            node=pair.decode,
            patterns=kvs[1],
            clients=Clients(WORKLOAD, arrival_times(WORKLOAD, 1, None), concurrency),
            asks=asks_out,
            prefill="tcp://somewhere",
            step_s=0.0,
            verify=verify,
            progress=told.append,
        )
        measured = engine.run()
        assert told == sorted(set(told))
        assert told[-1] == WORKLOAD.num_requests
    finally:
        asks_out.send(END_OF_PASS)
        thread.join(PATIENCE_S)
        asks_in.close()
        asks_out.close()
        os.close(pair.prefill.event)
        os.close(pair.decode.event)
    assert not thread.is_alive()
    return measured, prefill


def by_hand():
    """What every turn's answer has to be: [(prompt, answer)] by session and turn."""
    hasher, out = PrefixHasher(), {}
    for session, turns in enumerate(WORKLOAD.sessions):
        said = np.empty(0, dtype=np.int32)
        for number, turn in enumerate(turns):
            said = np.concatenate([said, *(run.tokens() for run in turn.text)])
            prompt = said
            for _ in range(turn.output_len):
                said = np.append(said, sample(hasher.prefixes(said)[-1:]))
            out[session, number] = prompt, said[len(prompt) :].tolist()
    return out


@pytest.fixture(scope="module")
def expected():
    return by_hand()


def answers(pair):
    """(prompt and answer as bytes) of every finished request."""
    return sorted(
        (tokens.tobytes(), tuple(output)) for tokens, output, _ in pair.finished_tokens.values()
    )


def answers_by_hand(expected):
    return sorted(
        (
            np.concatenate([prompt, np.array(out[:-1], dtype=np.int32)]).astype(np.int32).tobytes(),
            tuple(out),
        )
        for prompt, out in expected.values()
    )


@pytest.mark.parametrize("cache", [True, False])
def test_answers_and_bytes_are_right_with_the_cache_on_and_off(cache, expected):
    pair = FakePair(cache=cache)
    measured, prefill = play(pair)
    assert answers(pair) == answers_by_hand(expected)
    assert (measured.requests, measured.failed, measured.pages_mismatched) == (12, 0, 0)
    prompts = [prompt for prompt, _ in expected.values()]
    assert measured.prompt_tokens == prefill.prompt_tokens == sum(map(len, prompts))
    assert measured.pages_verified == sum(pages_for(len(p), PAGE_SIZE) for p in prompts)
    assert len(measured.ttft_s) == 12
    assert len(measured.itl_s) == sum(len(out) - 1 for _, out in expected.values())
    assert measured.hit_tokens > 0 if cache else measured.hit_tokens == 0
    assert sum(continues for _, _, continues in pair.finished_tokens.values()) == 8


@pytest.mark.slow
@pytest.mark.parametrize("squeeze", [2, 3, 7])
def test_retraction_changes_no_answer(squeeze, expected):
    pair = FakePair(cache=False, squeeze=squeeze)
    measured, prefill = play(pair)
    assert measured.retractions > 4
    assert answers(pair) == answers_by_hand(expected)
    assert (measured.failed, measured.pages_mismatched) == (0, 0)
    assert len(measured.ttft_s) == 12
    assert (
        measured.prompt_tokens == prefill.prompt_tokens
    )  # what was computed again is not counted again


def test_a_wrong_byte_in_a_transferred_page_is_counted():
    spoiled = itertools.count()

    def corrupt(pages, pool):
        if len(pages) and next(spoiled) == 5:
            pool.v(1)[int(pages[0]), 2, 1].view(torch.uint8)[3] ^= 64

    measured, _ = play(FakePair(cache=False, corrupt=corrupt))
    assert measured.pages_mismatched == 1
    measured, _ = play(FakePair(cache=False, corrupt=corrupt), verify=False)
    assert measured.pages_verified == 0


def test_another_requests_payload_is_counted():
    pair = FakePair()
    transferred = pair.decode.pop_transferred

    def swapped():
        out = transferred()
        for req in out:
            if req.room == 3:
                req.aux = bytes(4)
        return out

    pair.decode.pop_transferred = swapped
    measured, _ = play(pair)
    assert measured.pages_mismatched == 1


def test_a_failed_request_ends_its_session():
    pair = FakePair()
    prealloc = pair.decode.pop_preallocated

    def failing():
        for req in list(pair.decode.queued):
            if req.room == 2:
                pair.decode.queued.remove(req)
                pair.decode.failed.append(req)
        return prealloc()

    pair.decode.pop_preallocated = failing

    def drop():
        with pair.lock:
            gone = [key for key in pair.asked if key[0] == 2]
            for key in gone:
                del pair.asked[key]
        return [SimpleNamespace(rid="2") for _ in gone]

    pair.prefill.pop_failed = drop
    measured, _ = play(pair)
    assert (measured.failed, measured.requests) == (3, 12)
    assert len(measured.ttft_s) == 9
