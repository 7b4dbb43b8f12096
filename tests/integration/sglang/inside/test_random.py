"""Thousands of random steps: beside SGLang's own tree while nothing is evicted, and by themselves
under pressure. After each, every token of the pool is free, cached or a request's."""

import random
from array import array
from collections import Counter

import pytest

import benchmarks.policies.gated  # noqa: F401  makes it known by name
from tests.integration.sglang.inside import gpu
from tests.integration.sglang.inside.desk import Desk, Request

NAMESPACES = [(None, None)] * 6 + [("lora", None), (None, "tenant"), ("lora", "tenant")]


class Load:
    """Prompts that share beginnings, and requests that come, run, wait and go, by chance."""

    def __init__(self, seed: int, desks: list[Desk], longest: int) -> None:
        self.rng = random.Random(seed)
        self.desks = desks
        self.longest = longest
        self.known = [[self.rng.randrange(50) for _ in range(longest // 2)] for _ in range(4)]
        self.waiting: list[list[Request]] = []
        self.seen: Counter[str] = Counter()
        self._number = 0

    def arrive(self) -> None:
        rng = self.rng
        base = rng.choice(self.known)
        tokens = base[: rng.randrange(len(base) + 1)]
        tokens += [rng.randrange(50) for _ in range(rng.randrange(1, self.longest // 3))]
        tokens = tokens[: self.longest]
        self.known.append(tokens)
        del self.known[:-30]
        extra_key, salt = rng.choice(NAMESPACES)
        self._number += 1
        self.waiting.append([
            Request(
                f"r{self._number}", array("q", tokens), extra_key, salt, priority=rng.randrange(3)
            )
            for _ in self.desks
        ])  # fmt: skip

    def step(self) -> None:
        rng = self.rng
        what = rng.choices(
            ("arrive", "admit", "look", "extend", "decode", "finish", "retract", "touch", "evict"),
            (4, 5, 3, 3, 10, 3, 1, 1, 1),
        )[0]
        getattr(self, f"_{what}")()
        for desk in self.desks:
            desk.clock.now_s += rng.random()

    def _arrive(self) -> None:
        if len(self.waiting) < 8:
            self.arrive()

    def _admit(self) -> None:
        if not self.waiting:
            return
        reqs = self.waiting[self.rng.randrange(len(self.waiting))]
        chunk = self.rng.choice((None, None, self.rng.randrange(1, 40)))
        admitted = [desk.admit(req, chunk) for desk, req in zip(self.desks, reqs, strict=True)]
        assert len(set(admitted)) == 1
        self.seen["admitted" if admitted[0] else "blocked"] += 1
        self.seen["hit"] += reqs[0].prefix_len
        if admitted[0]:
            self.waiting.remove(reqs)
            assert len({req.prefix_len for req in reqs}) == 1
            if self.rng.random() < 0.8:
                self._each(reqs[0].rid, "checkpoint")

    def _look(self) -> None:
        if self.waiting:
            reqs = self.rng.choice(self.waiting)
            for desk, req in zip(self.desks, reqs, strict=True):
                desk.blocked(req)
            assert len({req.prefix_len for req in reqs}) == 1

    def _extend(self) -> None:
        self._running("extend", self.rng.randrange(1, 40), then="checkpoint")

    def _decode(self) -> None:
        self._running("decode", self.rng.randrange(50))

    def _finish(self) -> None:
        self._running("finish")

    def _retract(self) -> None:
        rid = self._any()
        if rid:
            reqs = [desk.running[rid] for desk in self.desks]
            self._each(rid, "retract")
            self.waiting.append(reqs)
            self.seen["retracted"] += 1

    def _touch(self) -> None:
        self._running("checkpoint")

    def _evict(self) -> None:
        if len(self.desks) == 1:
            self.seen["evicted"] += self.desks[0].evict(self.rng.randrange(200))

    def _any(self) -> str:
        rids = sorted(self.desks[0].running)
        return self.rng.choice(rids) if rids else ""

    def _running(self, what: str, *arguments: int, then: str = "") -> None:
        rid = self._any()
        if not rid:
            return
        if what == "decode" and self._unfinished(rid):
            return
        done = self._each(rid, what, *arguments)
        assert len(set(done)) == 1
        if then and done[0]:
            self._each(rid, then)

    def _unfinished(self, rid: str) -> bool:
        req = self.desks[0].running[rid]
        return req.extend_end < len(req.full_untruncated_fill_ids)

    def _each(self, rid: str, what: str, *arguments: int) -> list[object]:
        return [getattr(desk, what)(desk.running[rid], *arguments) for desk in self.desks]


def run(load: Load, steps: int) -> None:
    for _ in range(steps):
        load.step()
        for desk in load.desks:
            desk.check()
    for desk in load.desks:
        for rid in list(desk.running):
            desk.finish(desk.running[rid])
            desk.check()
        assert desk.cache.protected_size() == 0


@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_match_is_as_long_as_in_sglangs_own_tree(page_size: int, eagle: bool) -> None:
    """The pool is never short, so neither tree evicts."""
    desks = [Desk(kind, page_size, 1 << 16, eagle=eagle) for kind in ("prefixkv", "unified-rust")]
    load = Load(page_size + eagle, desks, 160)
    run(load, 3000)
    assert desks[0].cache.counters["evicted_tokens"] == 0
    assert load.seen["admitted"] > 300
    assert load.seen["hit"] > 4_000
    assert load.seen["retracted"] > 40


@pytest.mark.parametrize("policy", ["lru", "adaptive", "gated"])
@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_under_pressure_nothing_is_lost_and_no_slot_holds_anothers_kv(
    page_size: int, eagle: bool, policy: str
) -> None:
    desk = Desk("prefixkv", page_size, 1024, eagle=eagle, policy=policy)
    load = Load(7 * page_size + eagle, [desk], 200)
    run(load, 2000)
    assert load.seen["blocked"] > 3
    assert load.seen["retracted"] > 10
    assert desk.cache.counters["evicted_tokens"] > 2_000
    assert desk.cache.counters["duplicate_tokens"] > 20
    assert load.seen["hit"] > 500


@pytest.mark.parametrize(("page_size", "eagle"), [(1, False), (4, True), (16, False)])
def test_on_a_device_all_is_as_on_a_cpu(page_size: int, eagle: bool) -> None:
    """And only a checkpoint waits for it: what is written to it waits for nothing."""
    with gpu.Device() as device:
        there, here = (
            Desk("prefixkv", page_size, 1024, eagle=eagle, device=name)
            for name in (gpu.NAME, "cpu")
        )
        reads: list[int] = []
        called = there.cache.checkpoint

        def checkpoint(req: Request, **named: int) -> None:
            before = device.reads
            called(req, **named)
            reads.append(device.reads - before)

        there.cache.checkpoint = checkpoint
        load = Load(page_size + eagle, [there, here], 200)
        for _ in range(700):
            load.step()
            there.check()
            assert there.cache.tree.dump() == here.cache.tree.dump()
        assert set(reads) == {0, 1}
        assert load.seen["retracted"] > 10
        assert there.cache.counters["evicted_tokens"] > 1000
        assert there.cache.counters["duplicate_tokens"] > 0


def test_the_desk_itself_on_sglangs_tree_under_pressure() -> None:
    """The control: what holds for ours here holds for SGLang's."""
    desk = Desk("unified-rust", 16, 1024)
    load = Load(1, [desk], 200)
    run(load, 2000)
    assert load.seen["blocked"] > 3
