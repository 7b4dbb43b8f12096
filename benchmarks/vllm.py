"""prefixkv's connector beside vLLM's own, in real vLLM servers on one machine's CPU.

    python -m benchmarks env vllm --folder .venv-vllm
    python -m benchmarks vllm --python .venv-vllm/bin/python --json benchmarks/results/vllm.json
    python -m benchmarks vllm --python .venv-vllm/bin/python --part host --json \\
        benchmarks/results/vllm_host.json

Systems: `pull` (NixlConnector), `push` (NixlPushConnector), `ours`,
`computes` (ours, decode may compute a few tokens itself). A run
starts a prefill and a decode server of one system, which is not counted, and puts one part through
them; the systems take turns, `--repeat` times. What is in the file already is not run again, so it
can be cut off and gone on with.

Parts:

- `turns`: conversations whose prompts grow, one request at a time; then a burst: requests with one
  new prompt and a few tokens of their own, all at once.
- `host`: conversations that come back, with host memory and own compute (`vllm_host.py`). Only if
  it is named.

TTFT is from the first HTTP request to decode's first token. `after prefill` is TTFT less the time
in which prefill had answered, from the same start: what the connector adds. Where the connector
pushes while prefill computes it is near zero, or below.

Tokens are greedy; in bfloat16 they may differ by the batch they were computed in, so `differ`
counts answers that differ from the first system's, and is no error of itself.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.report import JsonFile, check_outputs, write
from benchmarks.servers import NotStartedError
from benchmarks.vllm_pair import LARGE, SYSTEMS, Pair, Shape
from benchmarks.vllm_servers import TINY, Sizes, make_model
from prefixkv.errors import ConfigError

PARTS: Final = ("turns", "host")
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


QUICK: Final = Load(TINY, 2, 2, 200, 64, 4, 64, 4, 128)


def drawn(seed: int, number: int) -> list[int]:
    """Tokens of a prompt."""
    random_ = random.Random(seed)
    return [random_.randrange(10, 2000) for _ in range(number)]


# --- parts ----------------------------------------------------------------------------------------


def turns(pair: Pair, load: Load) -> dict[str, Any]:
    """Cut off after TURNS_S, in which most systems are through many times over."""
    prompts = [drawn(i, load.first) for i in range(load.conversations)]
    before, rows, answers = pair.bytes_moved(), [], []
    end_s = time.monotonic() + TURNS_S
    for turn, i in product(range(load.turns), range(load.conversations)):
        if time.monotonic() > end_s:
            break
        prompt = prompts[i]
        answer = pair.ask(prompt, load.out).result()
        answers.append(answer.tokens)
        rows.append((turn, answer.ttft_s, answer.after_prefill_s))
        prompts[i] = prompt + answer.tokens + drawn(1000 * turn + i + 100, load.more)
    time.sleep(COUNTED_S)
    figures: dict[str, Any] = {}
    for name, of in (("", rows), ("_first", [row for row in rows if not row[0]])):
        figures |= {
            f"ttft{name}_s": statistics.median(row[1] for row in of),
            f"after_prefill{name}_s": statistics.median(row[2] for row in of),
        }
    return figures | {
        "bytes": pair.bytes_moved() - before, "requests": len(rows), "answers": answers,
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


# --- runs -----------------------------------------------------------------------------------------


def run(system: str, python: str, model: Path, load: Load) -> dict[str, Any]:
    with Pair(system, python, model, Shape(load.sizes, load.chunk)) as pair:
        pair.ask(drawn(70_000, 64), 2).result()  # the servers have met
        return {"turns": turns(pair, load), "burst": burst(pair, load)}


def summary(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """By workload and system, the median over runs of each figure, and how many answers differ from
    the first system's."""
    by: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, run in runs.items():
        for workload, figures in run.items():
            by.setdefault(workload, {}).setdefault(name.split(" ")[1], []).append(figures)
    rows = []
    for workload, by_system in by.items():
        first = next(iter(by_system.values()))[0].get("answers", [])
        for system, of in by_system.items():
            row: dict[str, Any] = {"workload": workload, "system": system, "runs": len(of)} | {
                key: statistics.median(one[key] for one in of)
                for key, value in of[0].items()
                if isinstance(value, (int, float)) and all(key in one for one in of)
            }
            if first:
                row["differ"] = sum(
                    a != b for run in of for a, b in zip(run["answers"], first, strict=False)
                )
            rows.append(row)
    return rows


def vllm(
    python: Annotated[str, typer.Option(help="The interpreter of `env vllm`.")] = "",
    json_file: JsonFile = None,
    systems: Annotated[str, typer.Option(help="Of these alone, by commas.")] = ",".join(SYSTEMS),
    part: Annotated[str, typer.Option(help=f"One of {', '.join(PARTS)}.")] = PARTS[0],
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each, turn about.")] = 3,
    quick: Annotated[bool, typer.Option(help="Tiny sizes, to try it.")] = False,
) -> int:
    """vLLM's own connectors and ours: TTFT and bytes; conversations with host memory."""
    if not Path(python).is_file():
        raise ConfigError(f"--python is {python!r}, an interpreter that has vLLM is needed")
    said = {"systems": (systems.split(","), SYSTEMS), "part": ([part], PARTS)}
    for option, (names, known) in said.items():
        if unknown := set(names) - {*known}:
            raise ConfigError(f"--{option} has {', '.join(unknown)}; known: {', '.join(known)}")
    check_outputs(json_file)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers are ended
    python = str(Path(python).absolute())
    if part == "host":
        from benchmarks.vllm_host import measure

        row, recipe = measure(python, 1 if quick else repeat, 4 if quick else 12)
        print(json.dumps(row, indent=1))
        write(json_file, f"vllm --part host --repeat {repeat}", [row], **recipe)
        return 0 if row["tokens_equal"] else 1
    load, runs = QUICK if quick else Load(), {}
    if json_file is not None and json_file.exists():
        runs = json.loads(json_file.read_text(encoding="utf-8"))["recipe"].get("runs", {})
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(python, Path(folder) / "model", load.sizes)
        for i, system in product(range(repeat), systems.split(",")):
            if (name := f"turns {system} {i}") in runs:
                continue
            try:
                runs[name] = run(system, python, model, load)
            except NotStartedError as error:
                print(f"{system} did not start: {error}", file=sys.stderr)
                continue
            rows = summary(runs)
            print(name, *(row for row in rows if row["system"] == system), flush=True)
            write(
                json_file, f"vllm --repeat {repeat}", rows, load=asdict(load),
                threads="one to compute with in each server; every core allowed", runs=runs,
            )  # fmt: skip
    return 0
