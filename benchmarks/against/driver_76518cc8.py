"""The old side of `sched --against`: measures the parts that it is told, with the code of 76518cc8.

Frozen. It runs as a file with PYTHONPATH set to the old tree, and imports only that tree's names
and what lies beside it (`today.py`, `full_hit.py`), so it works whatever is renamed in this one. It
serves every commit that has no `benchmarks/against/today.py` of its own. It answers each order with
the seconds of single calls, by name; the names are those of `today.py`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

Seconds = dict[str, list[float]]

MATCHES = 100
EVICTED_PAGES = 16  # with one call
BATCHES = (1, 8, 64, 256)  # of running requests
LEAVES = 100_000
POLICIES = ("lru", "adaptive")
BLOCKS = (1000, 3000)  # of the pool, of 512 tokens


sys.path.append(str(Path(__file__).parent))
today: Any = importlib.import_module("today")
Order: TypeAlias = Any  # of `today`


def own(module: str) -> Any:
    """Import a module of the tree's own benchmarks."""
    return importlib.import_module(f"benchmarks.{module}")


# --- calls of one thread --------------------------------------------------------------------------


def life(order: Order) -> Seconds:
    """Measure a request's calls on decode: arrival, admission, commit, end."""
    return warm_and_cold(order, lambda bench: bench.life(), "")


def full_pool(order: Order) -> Seconds:
    """Measure the same where each admission evicts what it takes."""
    return warm_and_cold(order, lambda bench: bench.life(full=True), ", pool full")


def append_many(order: Order) -> Seconds:
    """Measure steps of batches that need no page then; of the largest also those in which each
    request needs one, and evicts it."""
    found: Seconds = {}
    for size in BATCHES:
        inside, cross, evicting = steps(order, size, full=False, num_steps=320)
        found[f"append_many, {size}"] = inside
    found["append_many, all cross"] = cross
    *_, evicting = steps(order, size, full=True, num_steps=160)
    return found | {"append_many, all cross, evicting": evicting}


def steps(order: Order, size: int, full: bool, num_steps: int) -> list[list[float]]:
    """Return what the steps of a batch took that lie inside a page, that each take a page, and that
    evict it for that."""
    sched, yardsticks = own("sched"), own("yardsticks")
    inside, cross, evicting = times = [sched.Samples() for _ in range(3)]
    worker, _ = filled(order)
    if full:
        worker.leave_free(size)
    prompts = [worker.tokens(4) for _ in range(size)]
    reqs = worker.run([worker.request(prompt, 2 * num_steps) for prompt in prompts])
    with yardsticks.no_collector():
        for _ in range(num_steps):
            free, now_s = worker.pages.allocator.free_pages, worker.now_s
            crosses = len(reqs[0].tokens) % sched.PAGE_SIZE == 0
            kind = inside if not crosses else cross if free >= size else evicting
            kind.take(worker.scheduler.append_many, reqs, [7] * size, now_s)
    return [seconds_of(order, one) for one in times]


def match(order: Order) -> Seconds:
    """Measure the walk of a prompt whose past is cached."""
    sched, yardsticks = own("sched"), own("yardsticks")
    found: Seconds = {}
    worker, pasts = filled(order)
    ends = worker.tokens(sched.PROMPT_TOKENS - sched.CACHED_TOKENS)
    prompts = [sched.RadixKey(sched.np.concatenate([past, ends])) for past in pasts]
    for name, cold in (("match", False), ("match, cold", True)):
        times = sched.Samples()
        with yardsticks.no_collector(), caches(cold):
            for number in range(MATCHES):
                hit = times.take(worker.pages.match, prompts[number % len(prompts)])
                assert hit.prefix_len == sched.CACHED_TOKENS
        found[name] = seconds_of(order, times)
    return found


def evict(order: Order) -> Seconds:
    """Measure evictions of a few pages each, from a tree of conversations."""
    sched, yardsticks = own("sched"), own("yardsticks")
    found: Seconds = {}
    for name, cold in (("evict", False), ("evict, cold", True)):
        worker, _ = filled(order)
        times = sched.Samples()
        with yardsticks.no_collector(), caches(cold):
            for _ in range(order.calls):
                pages = times.take(worker.pages.cache.evict, EVICTED_PAGES)
                assert len(pages) == EVICTED_PAGES
                worker.pages.allocator.uncache(pages)
                worker.pages.allocator.free(pages)
        found[name] = seconds_of(order, times)
    return found


def prefill(order: Order) -> Seconds:
    """Measure `send_chunk`, and the `pop_bootstrapped` that takes a prompt's pages."""
    sched, module, yardsticks = own("sched"), own("sched_prefill"), own("yardsticks")
    random = sched.np.random.default_rng(order.seed)
    prompt = random.integers(0, sched.VOCABULARY, sched.PROMPT_TOKENS, sched.np.int32)
    requests = min(order.calls, 60)  # beyond that the pool is full
    found: Seconds = {}
    for more, cold in (("", False), (", cold", True)):
        with yardsticks.no_collector(), caches(cold):
            chunks = module.chunks(prompt, sched.CACHED_TOKENS, sched.PAGE_SIZE, requests)
            popped = pops(module, prompt, sched.CACHED_TOKENS, sched.PAGE_SIZE, requests)
        found[f"pop_bootstrapped{more}"] = seconds_of(order, popped)
        for which in ("inner", "last"):
            found[f"send_chunk, {which}{more}"] = seconds_of(order, chunks[which])
    return found


def pops(module: Any, prompt: Any, decode_tokens: int, page_size: int, requests: int) -> Any:
    """Return the times of `pop_bootstrapped` for this many requests, decode played by hand."""
    books = module.PageManager(module.NUM_PAGES, page_size, module.MOST_ROWS)
    scheduler = module.PrefillScheduler(books, max_aux_bytes=64)
    times = module.Samples()
    for room in range(1, requests + 1):
        tokens = (prompt + room) % (1 << 30)
        req = scheduler.add(module.Request(f"r{room}", tokens, room=room, decode="d"), 0.0)
        scheduler.room_bootstrapped(req.room_key, decode_tokens, "", 0.0)
        assert times.take(scheduler.pop_bootstrapped, 0.0) == [req]
        scheduler.send_chunk(req, len(tokens), 0.0, last=True, aux=b"token")
        scheduler.take_commands()
        scheduler.room_ended(req.room_key, module.KVPoll.SUCCESS, None, 0.0)
        scheduler.source_free(req.room_key, 0.0)
        assert scheduler.pop_sent(0.0) == [req]
    return times


def evict_all(order: Order) -> Seconds:
    """Measure the eviction of all pages but one of a tree with many leaves, so that the policy's
    order counts; a leaf's share of it."""
    radix, yardsticks = own("radix"), own("yardsticks")
    leaves = LEAVES // 10 if order.quick else LEAVES
    found: Seconds = {}
    for policy in POLICIES:
        tree, times = radix._bushy(leaves, policy), own("samples").Samples()
        with yardsticks.no_collector():
            times.take(tree.evict, tree.num_pages - 1)
        found[f"evict all, {policy}"] = [one / leaves for one in seconds_of(order, times)]
    return found


def policies(order: Order) -> Seconds:
    """Measure replays of generated agents under two policies; a request's share of it."""
    replay = own("replay")
    entries = replay.generate("agents")[: 500 if order.quick else None]
    trace = replay.make_trace("agents", entries)
    found: Seconds = {}
    for blocks in BLOCKS:
        for policy in POLICIES:
            times = own("samples").Samples()
            times.take(partial(replay.replay_policy, trace, policy, blocks))
            share = [one / len(entries) for one in seconds_of(order, times)]
            found[f"replay, {policy}, {blocks}"] = share
    return found


def host_admission(order: Order) -> Seconds:
    """Measure admissions without host memory, and with it by what of the prompt only it has."""
    module, yardsticks = own("host_admission"), own("yardsticks")
    chance = module.np.random.default_rng(order.seed)

    def tokens(count: int) -> Any:
        return chance.integers(0, 99_000, count, dtype=module.np.int32)

    others = [tokens(2048) for _ in range(module.OTHERS)]
    ways = {name: lost for name, lost in module.WAYS.items() if name != "no host again"}
    desks = {name: module._Desk(name != "no host") for name in ways}
    times = {name: own("samples").Samples() for name in ways}
    for desk in desks.values():
        desk.others = []
        for other in others:
            desk.serve(other)
        desk.others = others
    with yardsticks.no_collector():
        for at in range(order.calls):
            prompt, names = tokens(module.PROMPT), list(ways)
            # Each takes its turn first.
            for name in names[at % len(names) :] + names[: at % len(names)]:
                desk = desks[name]
                scheduler = desk.scheduler
                desk.serve(prompt[: module.CACHED], ways[name])
                scheduler.pop_preallocated = partial(times[name].take, scheduler.pop_preallocated)
                desk.serve(prompt)
                del scheduler.pop_preallocated  # the class's again
                # Of what was measured nothing stays.
                freed = desk.pages.cache.evict(module.POOL, desk.now_s)
                desk.pages.allocator.uncache(freed)
                desk.pages.allocator.free(freed)
                for other in others if at % 20 == 0 else ():
                    desk.serve(other)
    return {f"admission, host: {name}": seconds_of(order, one) for name, one in times.items()}


def crowd(order: Order) -> Seconds:
    """Measure admissions of requests that fit, each beside 2,000 that wait and do not."""
    sched, yardsticks, times = own("sched"), own("yardsticks"), own("sched").Samples()
    worker, pasts = filled(order)
    worker.leave_free(200)
    most = sched.MOST_PAGES * sched.PAGE_SIZE - sched.CACHED_TOKENS
    for number in range(2_000):
        key = sched.RadixKey(pasts[number % len(pasts)])
        worker.scheduler.add(worker.request(key, most), worker.now_s)
    assert not worker.scheduler.pop_preallocated(worker.now_s)
    with yardsticks.no_collector():
        for number in range(order.calls):
            tail, now_s = worker.tokens(sched.PROMPT_TOKENS - sched.CACHED_TOKENS), worker.now_s
            req = worker.add(sched.np.concatenate([pasts[number % len(pasts)], tail]), now_s)
            admitted, _ = times.take(worker.admit, now_s)
            assert admitted == [req]
            worker.succeed(req)
            worker.scheduler.pop_transferred(now_s)
            worker.generate([req], sched.OUTPUT_TOKENS)
            left = (req.kv_len - sched.CACHED_TOKENS) // sched.PAGE_SIZE
            worker.scheduler.finish(req, now_s)
            worker.drop_cached(left)
    return {"admission, 2,000 wait": seconds_of(order, times)}


def filled(order: Order) -> tuple[Any, list[Any]]:
    """Return a worker with conversations in its cache, and these."""
    sched = own("sched")
    worker = sched.Worker(order.seed, bench_of(order, lambda row: None)._config)
    return worker, worker.fill_cache()


def warm_and_cold(order: Order, measure: Callable[[Any], Any], more: str) -> Seconds:
    """Measure cases of the tree's own benchmark, with warm caches and with cold ones."""
    names = {"admit": "admission"}
    found: Seconds = {}
    for cold in (False, True):
        with caches(cold):
            rows = rows_of(order, measure, rounds=order.calls)
        for row in rows:
            if row["name"] in ("add", "admit", "commit", "finish"):
                name = names.get(row["name"], row["name"])
                found[f"{name}{more}{', cold' * cold}"] = row["seconds"]
    return found


def rows_of(order: Order, measure: Callable[[Any], Any], rounds: int) -> list[dict[str, Any]]:
    """Return the rows of the tree's own benchmark, each with the seconds of its single calls."""
    shared = own("samples").Samples
    figures = shared.figures
    shared.figures = lambda self: {**figures(self), "seconds": seconds_of(order, self)}
    try:
        rows: list[dict[str, Any]] = []
        bench = bench_of(order, rows.append)
        bench._rounds = lambda many: rounds
        measure(bench)
        return rows
    finally:
        shared.figures = figures


def bench_of(order: Order, tell: Callable[[Any], None]) -> Any:
    sched = own("sched")
    return sched.Bench(order.seed, False, order.policy or sched.DEFAULT_POLICY, tell)


def seconds_of(order: Order, times: Any) -> list[float]:
    return [ns * 1e-9 for ns in (times._thread if order.cpu else times._wall)]


@contextmanager
def caches(cold: bool) -> Iterator[None]:
    """Copy much before each call that is measured, if `cold`."""
    if cold:
        with own("samples").Samples.all_cold():
            yield
    else:
        yield


# --- pairs of processes ---------------------------------------------------------------------------


def full_hit(order: Order) -> Seconds:
    """Measure a prompt that both sides have, over NIXL, from decode's `add` to its commit."""
    result: Seconds = importlib.import_module("full_hit").measure(own("pair").run_pair, order.quick)
    return result


CALLS = {
    one.__name__: one
    for one in (
        life, full_pool, match, evict, append_many, prefill, evict_all, policies, host_admission,
        crowd,
    )
}  # fmt: skip
PAIRS: dict[str, Callable[[Order], Seconds]] = {"full_hit": full_hit, "goodput": today.goodput}

if __name__ == "__main__":
    today.main(lambda order: {**CALLS, **PAIRS}[order.part](order))
