"""Two ranks in two processes whose clocks differ by 10 ms: with the time that rank 0 sends their
trees are equal after 100,000 operations, and with their own they are not."""

import hashlib
import pickle
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from prefixkv.engines.sglang.waiting import RankClock
from prefixkv.spi import RadixCache

ROOT = Path(__file__).parents[3]
OPERATIONS = 100_000
SKEW_S = 0.010


def rank(number: int, shared: bool, operations: int, source: BinaryIO, sink: BinaryIO) -> str:
    """Work through the requests; rank 0 makes them up and hands them on. What its tree is then."""
    skewed = random.Random(f"clock {number}")
    rng, clock = random.Random(11), RankClock()
    tree = RadixCache(page_size=4, policy="adaptive", pool_pages=4096)
    free, digest, own_s, locks = list(range(4096)), hashlib.sha256(), 0.0, []
    known: list[list[int]] = [[]]
    for _ in range(operations // 100):
        requests: Any = None
        if number == 0:
            requests = [_prompt(rng, known) for _ in range(17)]
            requests = clock.mark(requests, own_s)
            blob = pickle.dumps(requests)
            sink.write(struct.pack("<I", len(blob)) + blob)
            sink.flush()
        else:
            (size,) = struct.unpack("<I", source.read(4))
            requests = pickle.loads(source.read(size))
        for prompt in clock.take(requests):  # six operations each
            # Time goes on, and no two processes see it at the same moment.
            own_s += 0.4 + skewed.uniform(0, SKEW_S)
            now_s = clock.now_s if shared else own_s + number * SKEW_S
            lock = tree.lock(tree.match_prefix(prompt), now_s)
            need = len(prompt) // 4 - lock.prefix_len // 4
            if len(free) < need:
                free += sorted(tree.evict(need + 32, now_s).tolist())
            pages = [free.pop() for _ in range(need)]
            result = tree.insert(prompt, pages, now_s=now_s, lock=lock)
            locks.append(tree.lock(result, now_s))
            tree.unlock(lock)
            if len(locks) > 10:
                tree.unlock(locks.pop(0))
            digest.update(struct.pack("<II", lock.prefix_len, len(free)))
    digest.update(b"".join(bytes(node.pages) + bytes(node.key) for node in tree.nodes()))
    tree.check_invariants()
    return f"{digest.hexdigest()} {tree.tick} {tree.evicted_pages}"


def _prompt(rng: random.Random, known: list[list[int]]) -> list[int]:
    base = rng.choice(known[-40:])
    prompt = base[: rng.randrange(len(base) + 1)]
    prompt = prompt + [rng.randrange(50) for _ in range(rng.randrange(4, 400))]
    known.append(prompt[:1200])
    return prompt[:1200]


def run_ranks(shared: bool, operations: int) -> list[list[str]]:
    def start(number: int, **pipes: Any) -> subprocess.Popen[bytes]:
        program = (
            "import sys; from tests.integration.sglang.test_ranks import rank; print(rank("
            f"{number}, {shared}, {operations}, sys.stdin.buffer, sys.stdout.buffer), "
            "file=sys.stderr)"
        )
        command = [sys.executable, "-c", program]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, **pipes)

    told = []
    with start(0, stdout=subprocess.PIPE) as first, start(1, stdin=first.stdout) as second:
        for process in (first, second):
            assert process.stderr is not None
            text = process.stderr.read().decode()
            assert process.wait() == 0, text
            told.append(text.split())
    return told


@pytest.mark.parametrize(("shared", "operations"), [(True, OPERATIONS), (False, OPERATIONS // 5)])
def test_trees_of_two_ranks(shared: bool, operations: int) -> None:
    first, second = run_ranks(shared, operations)
    assert int(first[1]) >= operations // 2  # uses, beside matches, unlocks and evictions
    assert int(first[2]) > operations // 3
    assert (first == second) is shared
