"""prefixkv's connector beside vLLM's own, in real vLLM servers on one machine's CPU.

    python -m benchmarks env vllm --folder .venv-vllm
    python -m benchmarks vllm --python .venv-vllm/bin/python --out benchmarks/results/vllm.json

Systems: `pull` (NixlConnector), `push` (NixlPushConnector), `ours`, `governed` (ours, with a policy
that names decode's victims), `drawn` (ours, asked as `pull` is: prefill draws the room), `computes`
(ours, decode may compute a few tokens itself), and with `--before CHECKOUT` also `before` (`ours`,
as it is in another checkout). A run starts a prefill and
a decode server of one system, which is not counted, and puts one part through them; the systems
take turns, `--repeat` times. What is in the file already is not run again, so it can be cut off and
gone on with; `--minutes` begins no run after so long, and `--part` takes some parts alone.

Parts:

- `turns`: conversations whose prompts grow, one request at a time; then a burst: requests with one
  new prompt and a few tokens of their own, all at once.
- `long`: one prompt of 8,192 tokens at a time.
- `crowd`: requests without a common prompt, all at once, three times as many as decode's pool
  takes: what it costs that prefill computes nothing for requests that decode has not admitted.
- `steps`: decode's step time.
- `live`, `pool`: working sets 1.5 times as large as decode's pool: the block hit ratio. `live` is
  on two servers, as fast as they answer; `pool` is vLLM's block manager and our scheduler's side
  without a model, on the workload's own clock; `recorded`, the same with recorded traces.
- `kills`: prefill is killed.
- `chaos`: both servers are killed, stopped and reset under clients of `prefixkv proxy`.

TTFT is from the first HTTP request to decode's first token. `after prefill` is TTFT less the time
in which prefill had answered, from the same start: what the connector adds. Where the connector
pushes while prefill computes it is near zero, or below. `less a step` is what is left of it without
the step in which decode computes the first token: the mean step of the same answer is taken off.

Tokens are greedy; in bfloat16 they may differ by the batch they were computed in, so `differ`
counts answers that differ from the first system's, and is no error of itself.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks import vllm_chaos, vllm_kills, vllm_steps
from benchmarks.vllm_pair import (
    BEFORE,
    BLOCK,
    COMPUTES,
    DRAWN,
    LARGE,
    POLICY,
    SYSTEMS,
    Pair,
    Shape,
)
from benchmarks.vllm_servers import REPOSITORY, TINY, NotStartedError, Sizes, make_model
from benchmarks.vllm_sets import KINDS, drawn, pool_blocks, workload
from prefixkv.errors import ConfigError

NAMES: Final = (*SYSTEMS, DRAWN, COMPUTES, BEFORE)
POOL_POLICIES: Final = ("", "gated", POLICY)
KILLS_A_RUN: Final = 4
TURNS_S: Final = 240.0
COUNTED_S: Final = 2.0
"""Until the counters of a step can be read."""


@dataclass(frozen=True)
class Load:
    """The sizes of the parts, in tokens where nothing else is said."""

    sizes: Sizes = LARGE
    conversations: int = 8
    turns: int = 5
    first: int = 1000
    more: int = 200
    out: int = 16
    chunk: int = 256
    burst: int = 16  # requests
    head: int = 1024
    long: int = 8192
    long_chunk: int = 512
    long_prompts: int = 3
    live_requests: int = 400
    pool_requests: int = 4000
    kills: int = 20
    rounds: int = 8  # of step times
    busy_rounds: int = 4
    steps: int = 160
    busy_steps: int = 100
    chaos_rounds: int = 10
    crowd: int = 18  # requests
    crowd_out: int = 48


QUICK: Final = Load(
    TINY, 2, 2, 200, 64, 4, 64, 4, 128, 600, 128, 1, 60, 300, 4, 1, 1, 100, 100, 2, 6, 8
)  # fmt: skip


# --- parts ----------------------------------------------------------------------------------------


def turns(pair: Pair, load: Load) -> dict[str, Any]:
    """Cut off after TURNS_S, in which most systems are through many times over."""
    prompts = [drawn(i, load.first) for i in range(load.conversations)]
    before, rows, answers, steps = pair.bytes_moved(), [], [], []
    end_s = time.monotonic() + TURNS_S
    for turn, i in product(range(load.turns), range(load.conversations)):
        if time.monotonic() > end_s:
            break
        prompt = prompts[i]
        answer = pair.ask(prompt, load.out).result()
        answers.append(answer.tokens)
        rows.append([turn, answer.ttft_s, answer.after_prefill_s])
        steps.append(answer.step_s)
        prompts[i] = prompt + answer.tokens + drawn(1000 * turn + i + 100, load.more)
    time.sleep(COUNTED_S)
    figures: dict[str, Any] = {}
    for name, of in (("", rows), ("_first", [row for row in rows if not row[0]])):
        figures |= {
            f"ttft{name}_s": statistics.median(row[1] for row in of),
            f"after_prefill{name}_s": statistics.median(row[2] for row in of),
            f"prefill{name}_s": statistics.median(row[1] - row[2] for row in of),
        }
    cut_off = len(rows) < load.turns * load.conversations
    figures |= {
        "step_s": statistics.median(steps),
        "less_a_step_s": statistics.median(
            row[2] - step_s for row, step_s in zip(rows, steps, strict=True)
        ),
    }
    return figures | {
        "bytes": pair.bytes_moved() - before, "requests": len(rows), "cut_off": cut_off,
        "rows": rows, "answers": answers,
    }  # fmt: skip


def burst(pair: Pair, load: Load) -> dict[str, Any]:
    head = drawn(50_000, load.head)
    before, begun_s = pair.bytes_moved(), time.perf_counter()
    asked = [pair.ask(head + drawn(60_000 + i, 20), load.out) for i in range(load.burst)]
    done = [one.result() for one in asked]
    took_s = time.perf_counter() - begun_s
    time.sleep(COUNTED_S)
    return {
        "all_s": took_s,
        "ttft_s": statistics.median(one.ttft_s for one in done),
        "bytes": pair.bytes_moved() - before,
        "answers": [one.tokens for one in done],
    }


def crowd(pair: Pair, load: Load) -> dict[str, Any]:
    begun_s = time.perf_counter()
    asked = [pair.ask(drawn(90_000 + i, load.first), load.crowd_out) for i in range(load.crowd)]
    done = [one.result() for one in asked]
    return {
        "all_s": time.perf_counter() - begun_s,
        "ttft_s": statistics.median(one.ttft_s for one in done),
        "ttft_last_s": max(one.ttft_s for one in done),
        "answers": [one.tokens for one in done],
    }


def long(pair: Pair, load: Load) -> dict[str, Any]:
    done = [pair.ask(drawn(80_000 + i, load.long), 4).result() for i in range(load.long_prompts)]
    return {
        "ttft_s": statistics.median(one.ttft_s for one in done),
        "prefill_s": statistics.median(one.prefill_s for one in done),
        "after_prefill_s": statistics.median(one.after_prefill_s for one in done),
        "answers": [one.tokens for one in done],
    }


def live(pair: Pair, kind: str, requests: int, seed: int) -> dict[str, Any]:
    """The second half of the requests counts. A block that decode had is one not sent."""
    asks = workload(kind, requests, seed)
    asked, loaded, half = 0, 0, requests // 2
    for i, ask in enumerate(asks):
        if i == half:
            time.sleep(COUNTED_S)
            loaded = pair.bytes_moved()
        asks.answered(ask, pair.ask(ask.prompt, ask.num_tokens).result().tokens)
        asked += -(-len(ask.prompt) // BLOCK) if i >= half else 0
    time.sleep(COUNTED_S)
    sent = (pair.bytes_moved() - loaded) // pair.shape.sizes.kv_bytes(BLOCK)
    return {
        "blocks": pair.shape.decode_blocks, "asked": asked, "sent": sent,
        "hit_ratio": 1 - sent / asked,
    }  # fmt: skip


# --- runs -----------------------------------------------------------------------------------------


class Bench:
    """What a run needs: an interpreter, models, sizes."""

    def __init__(
        self, python: str, load: Load, folder: Path, traces: list[Path], before: Path | None
    ) -> None:
        self.python, self.load, self._folder, self._traces = python, load, folder, traces
        self._before = before
        self._models: dict[Sizes, Path] = {}

    def pair(self, system: str, shape: Shape) -> Pair:
        if shape.sizes not in self._models:
            place = self._folder / f"model-{len(self._models)}"
            self._models[shape.sizes] = make_model(self.python, place, shape.sizes)
        if system == BEFORE:
            shape = replace(shape, around={**shape.around, "PYTHONPATH": str(self._before)})
        return Pair(system, self.python, self._models[shape.sizes], shape)

    def turns(self, system: str, number: int) -> dict[str, Any]:
        load = self.load
        with self.pair(system, Shape(load.sizes, load.chunk)) as pair:
            pair.ask(drawn(70_000, 64), 2).result()  # the servers have met
            return {"turns": turns(pair, load), "burst": burst(pair, load)}

    def long(self, system: str, number: int) -> dict[str, Any]:
        load = self.load
        shape = Shape(load.sizes, load.long_chunk, max_len=load.long + 512)
        with self.pair(system, shape) as pair:
            pair.ask(drawn(70_000, 64), 2).result()
            return {"long": long(pair, load)}

    def crowd(self, system: str, number: int) -> dict[str, Any]:
        load = self.load
        blocks = load.crowd // 3 * -(-(load.first + load.crowd_out) // BLOCK) + 1
        shape = Shape(load.sizes, load.chunk, decode_blocks=blocks, max_len=BLOCK * (blocks - 1))
        with self.pair(system, shape) as pair:
            pair.ask(drawn(70_000, 64), 2).result()
            return {"crowd": crowd(pair, load)}

    def live(self, system: str, number: int) -> dict[str, Any]:
        """The kinds take turns with the runs."""
        kind, load = [*KINDS][number % len(KINDS)], self.load
        seed = number // len(KINDS)
        blocks = pool_blocks(workload(kind, load.live_requests, seed), BLOCK)
        max_len = min(8192, BLOCK * blocks)  # or vLLM does not start
        shape = Shape(TINY, blocks=2048, decode_blocks=blocks + 1, max_len=max_len)
        with self.pair(system, shape) as pair:
            return {f"live {kind}": live(pair, kind, load.live_requests, seed)}

    def pool(self, system: str, number: int) -> dict[str, Any]:
        """`system` is a policy. Each run has seeds of its own."""
        requests = self.load.pool_requests
        return {
            f"pool {kind}": self._replay(kind, requests, BLOCK, number, system) for kind in KINDS
        }

    def recorded(self, system: str, number: int) -> dict[str, Any]:
        return {
            f"recorded {trace.stem}": self._replay(str(trace), 1 << 20, 16, 0, system)
            for trace in self._traces
        }

    def _replay(self, kind: str, requests: int, block: int, seed: int, policy: str) -> Any:
        command = [
            self.python, "-m", "benchmarks.vllm_pool", kind, str(requests), str(block), str(seed),
            "" if policy == "own" else policy,
        ]  # fmt: skip
        around = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        out = subprocess.check_output(command, env=around, cwd=REPOSITORY, text=True)
        return json.loads(out.splitlines()[-1])

    def kills(self, system: str, number: int) -> dict[str, Any]:
        """Each run has its share of the moments."""
        runs = max(1, self.load.kills // KILLS_A_RUN)
        moments = [(number + runs * i + 0.5) / (runs * KILLS_A_RUN) for i in range(KILLS_A_RUN)]
        with self.pair(system, Shape(TINY, chunk=64, blocks=512, decode_blocks=512)) as pair:
            return {"kills": vllm_kills.kills(pair, moments, number)}

    def chaos(self, system: str, number: int) -> dict[str, Any]:
        around = {"VLLM_SERVER_DEV_MODE": "1"}  # for the route that resets the cache
        shape = Shape(TINY, chunk=64, blocks=512, decode_blocks=400, around=around)
        with self.pair(system, shape) as pair:
            rounds = vllm_chaos.chaos(pair, self.load.chaos_rounds, 1000 * (number + 1))
            return {"chaos": rounds}

    def steps(self, system: str, number: int) -> dict[str, Any]:
        load = self.load
        shape = Shape(load.sizes, decode_blocks=400)
        if system == "idle":
            with self.pair("ours", replace(shape, plain_prefill=True)) as pair:
                return {"idle": vllm_steps.idle(pair, load.rounds, load.steps)}
        with self.pair("ours", shape) as pair:
            return {"busy": vllm_steps.busy(pair, load.busy_rounds, load.busy_steps)}


@dataclass(frozen=True)
class Part:
    work: Callable[[Bench, str, int], dict[str, Any]]
    systems: tuple[str, ...]
    runs: Callable[[int, Load], int]  # of `--repeat`


PARTS: Final = {
    "turns": Part(Bench.turns, NAMES, lambda repeat, load: repeat),
    "long": Part(Bench.long, NAMES, lambda repeat, load: repeat),
    "crowd": Part(Bench.crowd, ("ours", DRAWN, BEFORE), lambda repeat, load: repeat),
    "steps": Part(Bench.steps, ("idle", "busy"), lambda repeat, load: repeat),
    "live": Part(Bench.live, ("ours", "governed"), lambda repeat, load: len(KINDS) * repeat),
    "pool": Part(Bench.pool, ("own", *POOL_POLICIES[1:]), lambda repeat, load: repeat),
    "kills": Part(Bench.kills, SYSTEMS[:3], lambda repeat, load: max(1, load.kills // KILLS_A_RUN)),
    "chaos": Part(Bench.chaos, ("governed",), lambda repeat, load: 1),
}


def missing(
    found: dict[str, Any], parts: list[str], systems: list[str], repeat: int, load: Load
) -> Iterator[tuple[str, str, int]]:
    """What is still to be run, the systems turn about."""
    for name in parts:
        part = PARTS[name]
        for i in range(part.runs(repeat, load)):
            for system in part.systems:
                known = f"{name} {system} {i}" in found
                if not known and (system in systems or system not in NAMES):
                    yield name, system, i


def summary(runs: dict[str, Any]) -> dict[str, Any]:
    """By workload and system, the median over runs of each figure, and how many answers differ from
    the first system's."""
    by: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, run in runs.items():
        part, system, _ = name.split(" ")
        if part in ("turns", "long", "crowd", "live", "pool", "recorded"):
            for workload_, figures in run.items():
                by.setdefault(workload_, {}).setdefault(system, []).append(figures)
    out: dict[str, Any] = {}
    for workload_, by_system in by.items():
        first = next(iter(by_system.values()))[0].get("answers", [])
        out[workload_] = {
            system: {
                **{
                    key: statistics.median(one[key] for one in of)
                    for key, value in of[0].items()
                    if isinstance(value, (int, float)) and all(key in one for one in of)
                },
                "runs": len(of),
                **({"differ": _differ(of, first)} if first else {}),
            }
            for system, of in by_system.items()
        }
    return out


def _differ(of: list[dict[str, Any]], first: list[list[int]]) -> int:
    return sum(a != b for run in of for a, b in zip(run["answers"], first, strict=False))


def vllm(
    python: Annotated[str, typer.Option(help="The interpreter of `env vllm`.")] = "",
    out: Annotated[Path, typer.Option(help="Where the figures go; gone on with.")] = Path(
        "vllm.json"
    ),
    systems: Annotated[str, typer.Option(help="Of these alone, by commas.")] = ",".join(SYSTEMS),
    part: Annotated[str, typer.Option(help="Of these parts alone.")] = ",".join(PARTS),
    repeat: Annotated[int, typer.Option(help="Runs of each, turn about.")] = 3,
    trace: Annotated[
        list[Path] | None, typer.Option(help="Of requests, for `recorded`; more than once.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Begin no run after so long.")] = 1e9,
    before: Annotated[
        Path | None, typer.Option(help="A checkout of another commit, for `before`.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Tiny sizes, to try it.")] = False,
) -> None:
    """vLLM's own connectors and ours: TTFT, bytes, hits, step times, and what a kill costs."""
    if not Path(python).is_file():
        raise ConfigError(f"--python is {python!r}, an interpreter that has vLLM is needed")
    for option, said, known in (("systems", systems, NAMES), ("part", part, PARTS)):
        if unknown := set(said.split(",")) - {*known}:
            raise ConfigError(f"--{option} has {', '.join(unknown)}; known: {', '.join(known)}")
    if (BEFORE in systems.split(",")) != (before is not None):
        raise ConfigError(f"--before CHECKOUT and --systems {BEFORE} go together")
    load = QUICK if quick else Load()
    recipe = {
        "command": f"python -m benchmarks vllm --repeat {repeat}",
        "load": asdict(load),
        "policy": POLICY,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": "one to compute with in each server; every core allowed",
    }
    data: dict[str, Any] = {"recipe": recipe, "runs": {}}
    if out.exists():
        data = json.loads(out.read_text(encoding="utf-8"))
    end_s = time.monotonic() + 60 * minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers are ended
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            str(Path(python).absolute()),
            load,
            Path(folder),
            trace or [],
            before and before.absolute(),
        )
        parts = [one for one in part.split(",") if trace or one != "recorded"]
        left = [*missing(data["runs"], parts, systems.split(","), repeat, load)]
        for name, system, i in left:
            if time.monotonic() > end_s:
                break
            load_average = os.getloadavg()[0]
            try:
                run = PARTS[name].work(bench, system, i)
            except NotStartedError as error:
                print(f"{system} did not start: {error}", file=sys.stderr)
                continue
            data["runs"][f"{name} {system} {i}"] = run
            data.setdefault("load_average_before", {})[f"{name} {system} {i}"] = round(
                load_average, 2
            )
            data["summary"] = summary(data["runs"])
            out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
            shown = {key: data["summary"].get(key, {}).get(system) for key in run}
            print(name, system, i, json.dumps(shown), flush=True)
        else:
            print("nothing is left to run")
