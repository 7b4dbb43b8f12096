"""One tensor-parallel decode rank in a process of its own; torch.distributed carries the log among
them.

Rank 0 runs `SchedulerSim`s and broadcasts a message a pass, with digests of all its books; the
others apply what they receive, each as late as its own chance has it. At each end rank 0 broadcasts
a whole dump of its books too.

    python -m tests.models.rank_process RANK WORLD RENDEZVOUS RUNS
"""

from __future__ import annotations

import json
import random
import sys
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist

from prefixkv.config import DecodeConfig, HostConfig
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.pages.manager import PageManager
from prefixkv.ranks.replica import DecodeReplica, RankLog
from tests.models.scheduler_machine import ROWS, Engine, SchedulerSim
from tests.models.sim_engines import PAGE_SIZE

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


def dump(pages: PageManager) -> bytes:
    """Tree, page table, allocator and free lists, all of them."""
    nodes = sorted(
        (
            node.start,
            bytes(node.pages).hex(),
            bytes(node.key).hex(),
            node.lock_ref,
            repr(node.mark),
            repr(node.steps),
        )
        for node in pages.cache.nodes()
    )
    owners = [
        (owner, pages.allocator.held_by(owner).tolist()) for owner in pages.allocator.owners()
    ]
    return json.dumps(
        [nodes, pages.table.array.tolist(), pages.allocator.free_runs(), owners]
    ).encode()


class BroadcastSim(SchedulerSim):
    """Rank 0: its replicas are other processes. `num_sent` counts over its restarts."""

    num_sent = 0
    has_ranks_elsewhere = True

    def new_decode(self) -> Engine:
        self.num_ranks, self.digest_every = 1, 1
        return super().new_decode()

    def decode_scheduler(self, log: RankLog) -> DecodeScheduler:
        scheduler = super().decode_scheduler(log)
        config = self.config
        settings = [
            self.decode_pages,
            config.policy,
            config.evict_reserve,
            config.cache,
            self.num_slots,
            self.host_pages,
        ]
        broadcast(BEGIN, json.dumps(settings).encode())
        return scheduler

    def _publish(self) -> None:
        self.num_sent += 1
        broadcast(BATCH, self.log.take(self.decode.scheduler.pages))

    def _compare_ranks(self) -> None:
        self._publish()
        broadcast(COMPARE, dump(self.decode.scheduler.pages))


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
    replica: DecodeReplica | None = None
    unread: deque[bytes] = deque()
    applied = compared = latest = 0
    while True:
        kind, raw = receive()
        if kind == BATCH:
            unread.append(raw)
        lag = chance.randrange(12) if kind == BATCH else 0
        while len(unread) > lag:
            assert replica is not None
            replica.apply(unread.popleft())
            applied += 1
        latest = max(latest, len(unread))
        if kind == BEGIN:
            num_pages, policy, evict_reserve, cache, num_slots, host_pages = json.loads(raw)
            # The copies are rank 0's alone here; the books of the other ranks follow it.
            host = HostConfig(num_pages=host_pages) if host_pages else None
            config = DecodeConfig(
                max_running=ROWS,
                policy=policy,
                evict_reserve=evict_reserve,
                cache=cache,
                host_memory=host,
            )
            replica = DecodeReplica(num_pages, PAGE_SIZE, config, num_slots)
        elif kind == COMPARE:
            assert replica is not None
            replica.audit()
            ours = dump(replica.page_manager)
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
