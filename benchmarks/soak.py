"""100,000 rooms with random failures leave memory, descriptors, threads and every table where they
were.

    nice -n 10 python -m benchmarks soak --json benchmarks/results/soak.json

A decode and a prefill node with tiny pools live through all of it in this process, over real NIXL;
a third of the rooms goes to or comes from the two nodes of a second process, which is killed or
closed, and started anew under the same names, all along. Rooms end well, are aborted by either side
at any moment, refused, asked for on one side only, of unequal lengths, or left unsent until they
expire. Each so many rooms everything is let come to rest, the caches are emptied, and what is left
is counted: resident memory, descriptors, threads, the objects of each class of the project, and the
length of every container that hangs on the two nodes and their transports, found by walking them.
Flat means: none of them more than after the warm-up, but for a few, and a slope of memory within
`MOST_BYTES_A_ROOM`. The last line is the verdict; exit status 1 if it is not flat.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import Counter
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from benchmarks.report import JsonFile, check_outputs, write
from benchmarks.soak_engine import Engine, Second, instances, lengths_below

MOST_BYTES_A_ROOM = 20.0  # 2 MB in 100,000 rooms
SLACK = 24  # of a count: what is at rest is still a peer more or less, or a few entries
# by peer, of which a Tally keeps 64 by name: here one more a restart
BOUNDED = "decode.journal.transfers"
WARM_UP = 0.3  # of the samples
OPEN = 48  # rooms at a time
PATIENCE_S = 120.0
PLANS = {
    "well": 70, "decode aborts": 8, "prefill aborts": 6, "refused": 4, "decode alone": 2,
    "prefill alone": 2, "unequal lengths": 4, "left unsent": 2, "aborted at once": 2,
}  # fmt: skip


class Soak:
    """One run; `samples` grows as it goes on."""

    def __init__(self, rooms: int, every: int, restart_every: int, seed: int) -> None:
        self.rooms = rooms
        self.every = every  # rooms between two counts
        self.restart_every = restart_every
        self.chance = np.random.default_rng(seed)
        self.engine = Engine("first", seed)
        self.second = Second(seed)
        self.samples: list[dict[str, Any]] = []
        self.plans: Counter[str] = Counter()
        self.began_s = time.monotonic()

    def run(self) -> None:
        names, weights = list(PLANS), np.array(list(PLANS.values()), float)
        rooms = 0
        self.second.start()
        try:
            while rooms < self.rooms:
                self.engine.step()
                self.second.step(self.engine)
                until = min(self.rooms, self.every * (len(self.samples) + 1))
                while self.engine.num_open < OPEN and rooms < until:
                    rooms += 1
                    plan = str(self.chance.choice(names, p=weights / weights.sum()))
                    self.plans[plan] += 1
                    self.open(rooms, plan)
                    if rooms % self.restart_every == 0:
                        self.second.restart(
                            self.engine, killed=rooms // self.restart_every % 2 == 0
                        )
                if rooms == until:
                    self.rest()
                    self.sample(rooms)
                self.engine.wait()
        finally:
            self.second.stop(self.engine)
            self.engine.close()

    def open(self, room: int, plan: str) -> None:
        """Give the room's request to both sides, or to those that the plan names."""
        engine, second, chance = self.engine, self.second, self.chance
        length = int(chance.integers(1, 100))
        tokens = np.concatenate(
            [np.arange(16 * int(chance.integers(0, 3))), chance.integers(0, 50_000, length)]
        )
        tokens = tokens.astype(np.int32)
        theirs = tokens[: max(1, len(tokens) - 5)] if plan == "unequal lengths" else tokens
        where = str(
            chance.choice(["both here", "prefill there", "decode there"], p=[0.66, 0.17, 0.17])
        )
        if where != "both here" and not second.up:
            where = "both here"
        prefill = second.endpoint if where == "prefill there" else engine.prefill.endpoint
        if plan != "prefill alone":
            ask = (room, tokens, prefill, plan)
            second.send("decode", ask) if where == "decode there" else engine.add_decode(*ask)
        if plan != "decode alone":
            decode = "decode-second" if where == "decode there" else "decode-first"
            add = (room, theirs, plan, decode)
            second.send("prefill", add) if where == "prefill there" else engine.add_prefill(*add)

    def rest(self) -> None:
        """Until no request lives and no room is open or undrained in this process."""
        end_s = time.monotonic() + PATIENCE_S
        while not self.engine.at_rest():
            if time.monotonic() > end_s:
                raise SystemExit(f"not at rest after {PATIENCE_S:g} s: {self.engine.left()}")
            self.engine.step()
            self.second.step(self.engine)
            self.engine.wait()
        for node in (self.engine.decode, self.engine.prefill):
            node.audit()
            node.flush()

    def sample(self, rooms: int) -> None:
        gc.collect()
        process = psutil.Process()
        found = {
            "rooms": rooms,
            "seconds": round(time.monotonic() - self.began_s, 1),
            "rss_bytes": process.memory_info().rss,
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "containers": lengths_below(
                {"decode": self.engine.decode, "prefill": self.engine.prefill}
            ),
            "objects": instances(),
        }
        self.samples.append(found)
        brief = {name: value for name, value in found.items() if not isinstance(value, dict)}
        print(
            json.dumps({**brief, "entries": sum(found["containers"].values())}),
            file=sys.stderr,
            flush=True,
        )


def verdict(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """What has grown since the warm-up. Needs three samples after it for a slope."""
    after = samples[int(WARM_UP * len(samples)) :]
    rooms = np.array([sample["rooms"] for sample in after], float)
    memory = np.array([sample["rss_bytes"] for sample in after], float)
    slope = float(np.polyfit(rooms, memory, 1)[0]) if len(after) > 2 else 0.0
    first, last = after[0], after[-1]
    grown = {
        name: [first[name], last[name]]
        for name in ("descriptors", "threads")
        if last[name] > first[name] + SLACK
    }
    for kind in ("containers", "objects"):
        for name, size in last[kind].items():
            if size > first[kind].get(name, 0) + SLACK and not name.startswith(BOUNDED):
                grown[name] = [first[kind].get(name, 0), size]
    return {
        "bytes_a_room": round(slope, 2),
        "most_bytes_a_room": MOST_BYTES_A_ROOM,
        "rss_mib": [round(sample["rss_bytes"] / 2**20, 1) for sample in (samples[0], first, last)],
        "descriptors": [sample["descriptors"] for sample in (samples[0], first, last)],
        "threads": [sample["threads"] for sample in (samples[0], first, last)],
        "grown": grown,
        "flat": slope <= MOST_BYTES_A_ROOM and not grown,
    }


def soak(
    rooms: Annotated[int, typer.Option(help="Opened in all.")] = 100_000,
    every: Annotated[int, typer.Option(help="Rooms between two counts.")] = 4000,
    restart_every: Annotated[
        int, typer.Option(help="Rooms between two ends of the second process.")
    ] = 1500,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 1,
    json_file: JsonFile = None,
) -> int:
    """Whether memory, descriptors, threads and tables stay flat through many failing rooms."""
    check_outputs(json_file)
    run = Soak(rooms, every, restart_every, seed)
    run.run()
    found = verdict(run.samples)
    write(
        json_file,
        f"soak --rooms {rooms} --every {every} --restart-every {restart_every} --seed {seed}",
        run.samples, verdict=found, plans=dict(run.plans), second_process=dict(run.second.counts),
        outcomes_here=dict(sorted(run.engine.outcomes.items())),
        ucx_tls=os.environ.get("UCX_TLS", "default"),
    )  # fmt: skip
    print(json.dumps(found))
    print("flat" if found["flat"] else "NOT FLAT")
    return 0 if found["flat"] else 1
