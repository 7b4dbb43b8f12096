"""One tensor-parallel decode rank in a process of its own; torch.distributed carries the log among
them.

Rank 0 runs `SchedulerSim`s and broadcasts a message a pass; the others apply what they receive,
each as late as its own chance has it. At each end rank 0 broadcasts its whole page table too.

    python -m tests.support.rank_process RANK WORLD RENDEZVOUS RUNS
"""

from __future__ import annotations

import json
import random
import sys
from collections import deque
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from prefixkv.decode import DecodeScheduler
from prefixkv.ranks.row_log import RankSizes, RowFollower
from tests.laws.scheduler_machine import ROWS, Engine, SchedulerSim
from tests.support.sim_engines import PAGE_SIZE

PATIENCE = timedelta(seconds=300)
BATCH, BEGIN, COMPARE, END = range(4)


def broadcast(kind: int, raw: bytes = b"") -> None:
    """What an engine would do with its own."""
    dist.broadcast(torch.tensor([kind, len(raw)]), src=0)
    if raw:
        dist.broadcast(torch.frombuffer(bytearray(raw), dtype=torch.uint8), src=0)


def receive() -> tuple[int, bytes]:
    head = torch.empty(2, dtype=torch.int64)
    dist.broadcast(head, src=0)
    kind, size = head.tolist()
    body = torch.empty(size, dtype=torch.uint8)
    if size:
        dist.broadcast(body, src=0)
    return kind, body.numpy().tobytes()


def dump(table: np.ndarray) -> bytes:
    """All rows that requests may have."""
    return json.dumps(table[:ROWS].tolist()).encode()


class BroadcastSim(SchedulerSim):
    """Rank 0: the other ranks are processes. `num_sent` counts over its restarts."""

    num_sent = 0
    has_ranks_elsewhere = True

    def new_decode(self) -> Engine:
        self.num_ranks = 1
        return super().new_decode()

    def decode_scheduler(self) -> DecodeScheduler:
        scheduler = super().decode_scheduler()
        broadcast(BEGIN, json.dumps([self.decode_pages, self.num_slots]).encode())
        return scheduler

    def _publish(self) -> None:
        self.num_sent += 1
        broadcast(BATCH, self.log.take(self.decode.pages))

    def _compare_ranks(self) -> None:
        self._publish()
        broadcast(COMPARE, dump(self.decode.pages.table.array))


def lead(runs: int) -> None:
    batches = 0
    for setup in range(runs):  # 0, the first of every choice, is gated-quick with retries off
        chance = random.Random(setup)
        sim = BroadcastSim(setup and chance.getrandbits(48))
        for _ in range(250):
            sim.spell(chance.getrandbits(32))
        sim.settle()
        batches += sim.num_sent
    broadcast(END)
    print(f"rank 0 sent {batches} batches")


def follow(rank: int) -> None:
    chance = random.Random(rank)
    follower: RowFollower | None = None
    unread: deque[bytes] = deque()
    applied = compared = latest = 0
    while True:
        kind, raw = receive()
        if kind == BATCH:
            unread.append(raw)
        lag = chance.randrange(12) if kind == BATCH else 0
        while len(unread) > lag:
            assert follower is not None
            follower.apply(unread.popleft())
            applied += 1
        latest = max(latest, len(unread))
        if kind == BEGIN:
            num_pages, num_slots = json.loads(raw)
            follower = RowFollower(RankSizes("decode", num_pages, PAGE_SIZE, ROWS, num_slots))
        elif kind == COMPARE:
            assert follower is not None
            ours = dump(follower.page_table)
            assert ours == raw, f"rank {rank}\n{ours!r}\nrank 0\n{raw!r}"
            compared += 1
        elif kind == END:
            print(
                f"rank {rank} applied {applied} batches, up to {latest} late, {compared} dumps "
                "equal"
            )
            return


def main(rank: int, world: int, rendezvous: str, runs: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=PATIENCE
    )  # fmt: skip
    try:
        if rank:
            follow(rank)
        else:
            lead(runs)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
