"""What simulated runs draw and how they end, written down, so that a rewritten simulator or control
object can be held against it: it has to draw the same decisions in the same order, and rooms and
pages have to end alike.

    python -m tests.support.recording check [--runs 20] [--jobs 2] [--full DIR]
    python -m tests.support.recording write [--full DIR]

`recorded_runs.json` has one line a run: its arguments, how many decisions the simulation and its
fabric drew, digests of them, and the facts at the end (a long fact as a digest). With `--full`,
`write` keeps all decisions of each run in DIR, and `check` shows the first that differs and what
differs at the end. The two adapters below, and `start`, are all that knows the simulators.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import pathlib
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prefixkv.pages.allocator import PageState
from prefixkv.pages.manager import PageManager
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from tests.support.sim_engines import STORMS, DecodeEngine, PairSim, PrefillEngine
from tests.support.sim_rooms import RoomSim, calm_simulation, simulation

FILE = pathlib.Path(__file__).with_name("recorded_runs.json")
Facts = dict[str, Any]
NewRandom = Callable[[int], random.Random]


# --- what knows the simulators --------------------------------------------------------------------


def start(kind: str, args: dict[str, Any], new_random: NewRandom) -> PairSim | RoomSim:
    """The simulation of a run, not yet run. It gets its own randomness from `new_random` first, and
    that of its fabric second, both with its seed."""
    if kind == "mesh":
        make = calm_simulation if args["calm"] else simulation
        return make(args["seed"], new_random=new_random)
    more = {name: value for name, value in args.items() if name not in ("seed", "storm")}
    return PairSim(args["seed"], STORMS[args["storm"]], **more, new_random=new_random)


def pair_end(sim: PairSim) -> Facts:
    """What a run of two sides with schedulers ended with, as plain JSON. Lives that a restart ended
    are in it, under their incarnation."""
    facts: Facts = {
        "steps": sim.num_steps, "fabric_steps": sim.fabric.steps, "now_s": sim.now_s,
        "finished": sim.finished, "retractions": sim.retractions, "reused": sorted(sim.reused),
    }  # fmt: skip
    engines = [*sim.former, sim.prefill, sim.decode]
    lives = {_name(rank.me): rank for engine in engines for rank in engine.ranks}
    facts["ended"] = {
        name: {_key(key): poll.name for key, poll in rank.ended.items()}
        for name, rank in lives.items()
    }
    facts["counters"] = {
        _name(engine.ranks[0].me): _recorded_names(engine.scheduler.counters) for engine in engines
    }
    facts["frames"] = {name: _frames(rank.control.counters) for name, rank in lives.items()}
    facts["outcomes"] = {
        _name(engine.ranks[0].me): {rid: state.name for rid, state in engine.outcomes.items()}
        for engine in engines
        if isinstance(engine, DecodeEngine)
    }
    facts["told failed"] = {
        _name(engine.ranks[0].me): sorted(_key(key) for key in engine.failed)
        for engine in engines
        if isinstance(engine, PrefillEngine)
    }
    for name, engine in (("decode", sim.decode), ("prefill", sim.prefill)):
        pages = engine.scheduler.pages
        facts[f"pages of {name}"] = [pages.allocator.state(i).name for i in range(pages.num_pages)]
        facts[f"cached by {name}"] = _cached(pages)
        used = [i for i in range(pages.num_pages) if pages.allocator.state(i) is not PageState.FREE]
        facts[f"bytes of {name}"] = _digest(engine.ranks[0].memory.read(used))
        if pages.slots is not None:
            slots = pages.slots
            facts[f"slots of {name}"] = [slots.state(i).name for i in range(slots.num_pages)]
    ended = [(rank.me.name, poll) for rank in lives.values() for poll in rank.ended.values()]
    facts["succeeded, failed"] = {
        name: [ended.count((name, poll)) for poll in (KVPoll.SUCCESS, KVPoll.FAILED)]
        for name in ("decode-0", "prefill-0")
    }
    return facts


def mesh_end(sim: RoomSim) -> Facts:
    """What a run of two meshes without schedulers ended with, as plain JSON."""
    uses = [
        {
            "key": _key(use.key), "ticket": use.ticket, "poll": use.poll and use.poll.name,
            "drained": use.drained, "forgotten": use.forgotten,
            "sendings": [
                [
                    sending.rank.me.incarnation, sending.added, sending.poll and sending.poll.name,
                    sending.source_free, sending.aborted, sending.lost,
                ]
                for sending in use.sendings
            ],
        }
        for use in sim.every_use
    ]  # fmt: skip
    return {
        "steps": sim.num_steps, "fabric_steps": sim.fabric.steps, "now_s": sim.now_s, "uses": uses,
        "counters": dict(sim.counters), "free_dst": sorted(sim.free_dst),
        "free_src": [sorted(free) for free in sim.free_src],
        "frames": {_name(rank.me): _frames(rank.control.counters) for rank in sim.ranks},
        "threads": {_name(rank.me): _writes(rank.control.counters) for rank in sim.ranks},
        "staging": {_name(rank.me): _staging(rank.control.staging) for rank in sim.ranks},
        "succeeded, failed": [sim.counters[poll.name] for poll in (KVPoll.SUCCESS, KVPoll.FAILED)],
    }  # fmt: skip


# When the runs were recorded the control thread counted these, and its endpoint the rest.
_WRITES = ("bytes_sent", "writes_done", "writes_failed", "writes_drained_by_renewal")
_WRITES += ("peers_unreachable",)


def _recorded_names(counters: Mapping[str, int]) -> dict[str, int]:
    """Return the counters of a scheduler by the names they had when the runs were recorded."""
    renamed = {"skipped_tokens": "hit_tokens"}
    return {renamed.get(name, name): count for name, count in counters.items()}


_COUNTED_SINCE = ("never_promised",)  # the runs were recorded before it was counted


def _frames(counters: Counter[str]) -> dict[str, int]:
    others = (*_WRITES, *_COUNTED_SINCE)
    return {name: count for name, count in counters.items() if name not in others}


def _writes(counters: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in counters.items() if name in _WRITES}


def _staging(staging: Any) -> dict[str, int]:
    return {} if staging is None else dict(staging.counters)


def _name(peer: PeerId) -> str:
    return f"{peer.name} {peer.incarnation}"


def _key(key: RoomKey) -> str:
    return f"{key.room}/{key.generation}"


def _cached(pages: PageManager) -> dict[str, str]:
    """By page in the tree: a digest of all tokens up to its end. Where nodes are cut is not in
    it."""
    found: dict[str, str] = {}
    paths: dict[int, bytes] = {}
    for node in pages.cache.nodes():
        path = paths.get(id(node.parent), b"") + bytes(node.key)
        paths[id(node)] = path
        page_bytes = len(node.key) // node.num_pages
        behind = len(path) - len(node.key)
        for i in range(node.num_pages):
            page = int.from_bytes(node.pages[4 * i : 4 * i + 4], "little")
            found[str(page)] = _digest(path[: behind + (i + 1) * page_bytes])
    return found


# --- decisions ------------------------------------------------------------------------------------


class RecordedRandom(random.Random):
    """Draws what `random.Random` draws, and shows each decision to `heard` as (number of options,
    value).

    Of a `choice` the value is the index, of `randint` and `randrange` the distance from the lowest,
    of `sample` and `shuffle` the positions one by one. `random()` has 0 options.
    """

    def __init__(self, seed: int, heard: Callable[[int, float], None]) -> None:
        super().__init__(seed)
        self._heard = heard

    def random(self) -> float:
        value = super().random()
        self._heard(0, value)
        return value

    def _randbelow(self, options: int) -> int:
        """All other methods draw here, as those of `random.Random` do."""
        num_bits = options.bit_length()
        value = self.getrandbits(num_bits)
        while value >= options:
            value = self.getrandbits(num_bits)
        self._heard(options, value)
        return value


STREAMS = ("simulation", "fabric")


class Recording:
    """The decisions of one run. `keep`: also one by one, with the step and the place in the
    code."""

    def __init__(self, keep: bool = False) -> None:
        self.counts = [0, 0]
        self.kept: list[tuple[int, str, int, str, str]] | None = [] if keep else None
        self.step_of: Callable[[], int] = lambda: 0
        self._digests = [hashlib.blake2b(digest_size=8) for _ in (*STREAMS, "joined")]
        self._num_randoms = 0

    def new_random(self, seed: int) -> RecordedRandom:
        """Of the simulation when called first, of the fabric when called again."""
        stream = self._num_randoms
        self._num_randoms += 1
        return RecordedRandom(seed, partial(self._heard, stream))

    @property
    def digests(self) -> dict[str, str]:
        """Of the simulation's decisions, of the fabric's, and of both as they follow each other."""
        names = (*STREAMS, "joined")
        return {name: one.hexdigest() for name, one in zip(names, self._digests, strict=True)}

    def _heard(self, stream: int, options: int, value: float) -> None:
        word = f"{options}:{value!r};"
        self.counts[stream] += 1
        self._digests[stream].update(word.encode())
        self._digests[2].update(f"{stream}.{word}".encode())
        if self.kept is not None:
            self.kept.append((self.step_of(), STREAMS[stream], options, repr(value), _place()))


def _place() -> str:
    """Of the line outside of `random` and this file that draws."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename in (__file__, random.__file__):
        frame = frame.f_back
    path = pathlib.PurePath(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"


# --- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One simulation with its arguments. `number` counts the runs of its kind."""

    kind: str  # "pair" or "mesh"
    number: int
    args: dict[str, Any] = field(hash=False)

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number:03}"


def runs(kind: str) -> list[Run]:
    """The 200 runs of a kind; every tenth of them has every storm, page count, policy and number
    of slots in it."""
    if kind == "mesh":
        seeds = [(seed, False) for seed in range(160)] + [(seed, True) for seed in range(40)]
        return [Run(kind, i, {"seed": seed, "calm": calm}) for i, (seed, calm) in enumerate(seeds)]
    return [
        Run(
            kind,
            i,
            {
                # Of seed 75 the junk flips a bit of a first token, which no checksum guards.
                "seed": i if i != 75 else 275, "storm": list(STORMS)[i % 9],
                "decode_pages": (13, 18, 40)[i // 9 % 3],
                "prefill_pages": 14 if i % 7 == 6 else 32,
                "failure_policy": ("fail", "retry")[i // 27 % 2],
                "num_slots": (8, 3, 2)[(i + i // 9) % 3] if i // 54 % 2 else 0,
            },
        )
        for i in range(200)
    ]  # fmt: skip


@dataclass
class Played:
    """A run that was played. `line` is what is recorded of it."""

    line: dict[str, Any]
    facts: Facts
    recording: Recording
    error: str = ""  # the traceback of what it raised


def play(run: Run, keep: bool = False) -> Played:
    """Play a run. What it raises is a fact of its end."""
    recording = Recording(keep)
    facts: Facts
    raised = ""
    try:
        sim = start(run.kind, run.args, recording.new_random)
        recording.step_of = lambda: sim.num_steps
        sim.run()
        facts = pair_end(sim) if isinstance(sim, PairSim) else mesh_end(sim)
        facts = json.loads(json.dumps(facts))
    except Exception as error:
        raised = traceback.format_exc()
        facts = {"raised": f"{type(error).__name__}: {error}"[:300]}
    line = {
        "run": run.name, "args": run.args, "decisions": recording.counts,
        "digests": recording.digests, "end": _digest(json.dumps(facts, sort_keys=True).encode()),
        "facts": {name: _short(fact) for name, fact in sorted(facts.items())},
    }  # fmt: skip
    return Played(line, facts, recording, raised)


def recorded() -> dict[str, dict[str, Any]]:
    """The recorded lines by the names of their runs."""
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    return {line["run"]: line for line in lines}


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of two lines of a run is not alike, in words."""
    if before["args"] != now["args"]:
        return [f"the arguments are {now['args']}, not {before['args']}"]
    found = [
        f"decisions of the {name}: {after}, not {was}"
        for name, after, was in zip(STREAMS, now["decisions"], before["decisions"], strict=True)
        if after != was
    ]
    found += [
        f"other decisions ({name})"
        for name, digest in before["digests"].items()
        if now["digests"][name] != digest
    ]
    facts, were = now["facts"], before["facts"]
    found += [
        f"at the end, {name}: {facts.get(name)}, not {were.get(name)}"
        for name in sorted({*facts, *were})
        if facts.get(name) != were.get(name)
    ]
    if not found and before["end"] != now["end"]:
        found.append("at the end, something that the short facts do not show")
    return found


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _short(fact: Any) -> Any:
    """A long fact as a digest."""
    text = json.dumps(fact, sort_keys=True)
    return fact if len(text) <= 60 else f"#{_digest(text.encode())[:8]}"


# --- all decisions of a run -----------------------------------------------------------------------


def _keep(played: Played, folder: pathlib.Path) -> None:
    """Write all that was drawn, and the facts at the end, into a file of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / f"{played.line['run']}.gz", "wt", compresslevel=6) as file:
        print(json.dumps(played.facts), file=file)
        for decision in played.recording.kept or ():
            print(*decision, sep="\t", file=file)


def _explain(played: Played, folder: pathlib.Path) -> Iterator[str]:
    """The first decision that is not what the folder has, with the three before it, and the facts
    at the end that differ."""
    path = folder / f"{played.line['run']}.gz"
    if not path.exists():
        yield f"no {path}"
        return
    with gzip.open(path, "rt") as file:
        facts = json.loads(next(file))
        were = [tuple(line.rstrip("\n").split("\t")) for line in file]
    now = [tuple(map(str, decision)) for decision in played.recording.kept or ()]
    for i, (was, after) in enumerate(itertools.zip_longest(were, now)):
        if was is None or after is None or was[1:4] != after[1:4]:
            yield f"decision {i}, the first that differs (step, stream, options, value, place):"
            yield from (f"    as before {' '.join(now[j])}" for j in range(max(0, i - 3), i))
            yield f"    was       {'nothing' if was is None else ' '.join(was)}"
            yield f"    is        {'nothing' if after is None else ' '.join(after)}"
            break
    else:
        yield f"all {len(now)} decisions are alike"
    yield from itertools.islice(_unlike("the end", facts, played.facts), 12)
    if played.error:
        yield played.error


def _unlike(where: str, was: Any, now: Any) -> Iterator[str]:
    """The leaves of two JSON values that differ."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in sorted({*was, *now}):
            yield from _unlike(f"{where}, {name}", was.get(name), now.get(name))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for i, (one, other) in enumerate(zip(was, now, strict=True)):
            yield from _unlike(f"{where}, {i}", one, other)
    elif was != now:
        yield f"{where}: was {was}, is {now}"


# --- the commands ---------------------------------------------------------------------------------


def _write_one(run: Run, full: pathlib.Path | None) -> dict[str, Any]:
    played = play(run, keep=full is not None)
    if played.error:
        raise SystemExit(f"{run}:\n{played.error}")
    if full is not None:
        _keep(played, full)
    return played.line


def _check_one(run: Run, full: pathlib.Path | None) -> list[str]:
    """What is not as recorded."""
    before = recorded()[run.name]
    played = play(run)
    found = differences(before, played.line)
    if found and full is not None:
        found += _explain(play(run, keep=True), full)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["check", "write"])
    parser.add_argument("--runs", type=int, default=200, help="of each kind, evenly spread")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--full", type=pathlib.Path, help="folder with all decisions of each run")
    options = parser.parse_args()
    every = max(1, 200 // options.runs)
    chosen = [run for kind in ("pair", "mesh") for run in runs(kind)[::every]]
    started = time.monotonic()
    if options.command == "write" and every > 1:
        parser.error("all runs are written, or none")
    with ProcessPoolExecutor(options.jobs) as pool:
        if options.command == "write":
            lines = list(pool.map(partial(_write_one, full=options.full), chosen))
            FILE.write_text(
                "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            )
            print(f"wrote {len(lines)} runs in {time.monotonic() - started:.0f} s")
            return
        unlike = 0
        for run, found in zip(
            chosen, pool.map(partial(_check_one, full=options.full), chosen), strict=True
        ):
            if found:
                unlike += 1
                print(f"{run.name} {run.args}", *found, sep="\n    ", flush=True)
    print(f"{unlike} of {len(chosen)} runs are not as recorded; {time.monotonic() - started:.0f} s")
    raise SystemExit(unlike > 0)


if __name__ == "__main__":
    main()
