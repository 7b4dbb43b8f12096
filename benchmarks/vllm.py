"""prefixkv's connector beside vLLM's own, in real vLLM servers on one machine's CPU.

    python -m benchmarks env vllm --folder .venv-vllm
    python -m benchmarks vllm --python .venv-vllm/bin/python --out benchmarks/results/vllm.json

Systems: `pull` (NixlConnector), `push` (NixlPushConnector), `ours`, `governed` (ours, with a policy
that names decode's victims). A run starts a prefill and a decode server of one system, which is not
counted, and puts each workload through them; the systems take turns, `--repeat` times. What is in
the file already is not run again, so a run can be cut off and gone on with.

Workloads: `turns`, conversations whose prompts grow, one request at a time; `burst`, requests with
one new prompt and a few tokens of their own, all at once.

TTFT is from the first HTTP request to decode's first token. `after prefill` is TTFT less the time
in which prefill had answered, from the same start: what the connector adds. Where the connector
pushes while prefill computes it is near zero, or below. On CPUs NixlConnector moves its worker's
thread to cores that the OMP binding leaves free, where prefill itself may run many times slower:
then only `after prefill` compares.

Tokens are greedy; in bfloat16 they may differ by the batch they were computed in, so `differ`
counts answers that differ from the first system's, and is no error of itself.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.vllm_servers import (
    MODEL,
    TINY,
    NotStartedError,
    Server,
    Sizes,
    free_port,
    make_model,
    transfer_config,
)
from prefixkv.errors import ConfigError

SYSTEMS: Final = ("pull", "push", "ours", "governed")
LARGE: Final = Sizes(1024, 12, 16, 8, 64, "bfloat16")  # 121 M parameters
BLOCK: Final = 32
VOCABULARY: Final = 2000


@dataclass(frozen=True)
class Load:
    """The sizes of the workloads, in tokens where nothing else is said."""

    conversations: int
    turns: int
    first: int
    more: int
    out: int
    chunk: int
    burst: int  # requests
    head: int


FULL: Final = Load(8, 5, 1000, 200, 16, 256, 16, 1024)
QUICK: Final = Load(2, 2, 200, 64, 4, 64, 4, 128)


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    ttft_s: float
    prefill_s: float


class Pair:
    """A prefill and a decode server of one system, and what a proxy does with them."""

    def __init__(self, system: str, python: str, model: Path, sizes: Sizes, load: Load) -> None:
        self.system = system
        self._folder = tempfile.TemporaryDirectory()
        self._threads = ThreadPoolExecutor(64)
        self._rooms = itertools.count(1)
        self._kv_port = free_port()

        def server(name: str, transfer: dict[str, Any]) -> Server:
            around = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "UCX_TLS": "sysv,posix,cma,tcp,self",
                "UCX_NET_DEVICES": "lo",
            }
            log = Path(self._folder.name) / f"{name}.log"
            return Server(
                python, model, log, transfer, blocks=2048, block_size=BLOCK, chunk=load.chunk,
                dtype=sizes.dtype, environment=around if system in ("pull", "push") else None,
            )  # fmt: skip

        self.prefill = server("prefill", self._transfer("kv_producer", "prefill-0"))
        self.decode = server("decode", self._transfer("kv_consumer", "decode-0"))

    def _transfer(self, role: str, name: str) -> dict[str, Any]:
        if self.system in ("pull", "push"):
            kind = "NixlConnector" if self.system == "pull" else "NixlPushConnector"
            return {"kv_connector": kind, "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        port = self._kv_port if role == "kv_producer" else free_port()
        policy = "gated" if (self.system, role) == ("governed", "kv_consumer") else ""
        return transfer_config(role, name, port, policy=policy)

    def __enter__(self) -> Pair:
        try:
            self.prefill.wait()
            self.decode.wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.decode.kill()
        self.prefill.kill()
        self._threads.shutdown(wait=False)
        self._folder.cleanup()

    # --- requests ---------------------------------------------------------------------------------

    def ask(self, prompt: list[int], num_tokens: int) -> Future[Answer]:
        ask = self._ask_nixl if self.system in ("pull", "push") else self._ask_ours
        return self._threads.submit(ask, prompt, num_tokens)

    def _ask_ours(self, prompt: list[int], num_tokens: int) -> Answer:
        room, begun_s = next(self._rooms), time.perf_counter()
        send = {"do_remote_decode": True, "room": room, "decode": "decode-0"}
        where = f"tcp://127.0.0.1:{self._kv_port}"
        load = {"do_remote_prefill": True, "room": room, "prefill": where}

        def prefill() -> float:
            self.prefill.complete(prompt, 1, send)
            return time.perf_counter() - begun_s

        answered = self._threads.submit(prefill)
        tokens, ttft_s = streamed(self.decode, prompt, num_tokens, load, begun_s)
        return Answer(tokens, ttft_s, answered.result())

    def _ask_nixl(self, prompt: list[int], num_tokens: int) -> Answer:
        name, begun_s = f"request-{next(self._rooms)}", time.perf_counter()
        ask = {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
            "remote_block_ids": None, "remote_host": None, "remote_port": None,
        }  # fmt: skip
        answer = self.prefill.complete(prompt, 1, ask, request_id=name)
        prefill_s = time.perf_counter() - begun_s
        params = answer["kv_transfer_params"]
        tokens, ttft_s = streamed(self.decode, prompt, num_tokens, params, begun_s, request_id=name)
        return Answer(tokens, ttft_s, prefill_s)

    def bytes_moved(self) -> int:
        """KV that came to decode since the servers started."""
        if self.system in ("ours", "governed"):
            return self.prefill.counter("bytes_sent")
        name = "vllm:nixl_bytes_transferred_sum"
        return int(sum(one.metrics().get(name, 0) for one in (self.prefill, self.decode)))


def streamed(
    server: Server,
    prompt: list[int],
    num_tokens: int,
    params: dict[str, Any],
    begun_s: float,
    **more: Any,
) -> tuple[list[int], float]:
    """The tokens, and when the first came."""
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
        "stream": True, "ignore_eos": True, "return_token_ids": True,
        "kv_transfer_params": params, **more,
    }  # fmt: skip
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    headers = {"content-type": "application/json"}
    client.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = client.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read().decode())
    tokens: list[int] = []
    first_s = 0.0
    for line in answer:
        if line.startswith(b"data: {"):
            said = json.loads(line[6:])
            for choice in said.get("choices", ()):
                tokens += choice.get("token_ids") or []
                first_s = first_s or (time.perf_counter() - begun_s if tokens else 0.0)
    client.close()
    if len(tokens) != num_tokens:
        raise RuntimeError(f"{len(tokens)} tokens of {num_tokens}")
    return tokens, first_s


# --- workloads ------------------------------------------------------------------------------------


def tokens_of(seed: int, number: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(10, VOCABULARY) for _ in range(number)]


def turns(pair: Pair, load: Load) -> dict[str, Any]:
    prompts = [tokens_of(i, load.first) for i in range(load.conversations)]
    before, rows, answers = pair.bytes_moved(), [], []
    for turn in range(load.turns):
        for i, prompt in enumerate(prompts):
            answer = pair.ask(prompt, load.out).result()
            answers.append(answer.tokens)
            rows.append((turn, answer.ttft_s, answer.ttft_s - answer.prefill_s))
            prompts[i] = prompt + answer.tokens + tokens_of(1000 * turn + i + 100, load.more)
    time.sleep(2.0)  # the counters come with a step
    late = [row for row in rows if row[0]]
    return {
        "ttft_first_s": statistics.median(row[1] for row in rows if not row[0]),
        "ttft_later_s": statistics.median(row[1] for row in late),
        "after_prefill_first_s": statistics.median(row[2] for row in rows if not row[0]),
        "after_prefill_later_s": statistics.median(row[2] for row in late),
        "bytes": pair.bytes_moved() - before,
        "answers": answers,
    }


def burst(pair: Pair, load: Load) -> dict[str, Any]:
    head = tokens_of(50_000, load.head)
    before, begun_s = pair.bytes_moved(), time.perf_counter()
    asked = [pair.ask(head + tokens_of(60_000 + i, 20), load.out) for i in range(load.burst)]
    done = [one.result() for one in asked]
    took_s = time.perf_counter() - begun_s
    time.sleep(2.0)
    return {
        "all_s": took_s,
        "ttft_s": statistics.median(one.ttft_s for one in done),
        "bytes": pair.bytes_moved() - before,
        "answers": [one.tokens for one in done],
    }


WORKLOADS: Final[dict[str, Callable[[Pair, Load], dict[str, Any]]]] = {
    "turns": turns,
    "burst": burst,
}


# --- the run --------------------------------------------------------------------------------------


def missing(found: dict[str, Any], systems: list[str], repeat: int) -> Iterator[tuple[int, str]]:
    """What is still to be run, the systems turn about."""
    for i in range(repeat):
        for system in systems:
            if f"{system} {i}" not in found:
                yield i, system


def summary(runs: dict[str, Any]) -> dict[str, Any]:
    """By workload and system, the median over repetitions of each figure, and how many answers
    differ from the first system's."""
    out: dict[str, Any] = {}
    for workload in WORKLOADS:
        by_system: dict[str, list[dict[str, Any]]] = {}
        for name, run in runs.items():
            if workload in run:
                by_system.setdefault(name.partition(" ")[0], []).append(run[workload])
        if not by_system:
            continue
        first = next(iter(by_system.values()))[0]["answers"]
        out[workload] = {
            system: {
                **{
                    key: statistics.median(run[key] for run in of)
                    for key in of[0]
                    if key != "answers"
                },
                "differ": sum(
                    a != b for run in of for a, b in zip(run["answers"], first, strict=True)
                ),
            }
            for system, of in by_system.items()
        }
    return out


def vllm(
    python: Annotated[str, typer.Option(help="The interpreter of `env vllm`.")] = "",
    out: Annotated[Path, typer.Option(help="Where the figures go; gone on with.")] = Path(
        "vllm.json"
    ),
    systems: Annotated[str, typer.Option()] = ",".join(SYSTEMS),
    repeat: Annotated[int, typer.Option()] = 3,
    quick: Annotated[bool, typer.Option(help="Tiny sizes, to try it.")] = False,
) -> None:
    """vLLM's own connectors and ours: TTFT, what comes after prefill, bytes."""
    if not Path(python).is_file():
        raise ConfigError(f"--python is {python!r}, an interpreter that has vLLM is needed")
    if unknown := set(systems.split(",")) - {*SYSTEMS}:
        raise ConfigError(f"--systems has {', '.join(unknown)}; known are {', '.join(SYSTEMS)}")
    load, sizes = (QUICK, TINY) if quick else (FULL, LARGE)
    recipe = {
        "command": " ".join(sys.argv[1:]),
        "model": asdict(sizes),
        "load": asdict(load),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    data: dict[str, Any] = {"recipe": recipe, "runs": {}}
    if out.exists():
        data = json.loads(out.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(python, Path(folder) / "model", sizes)
        for i, system in missing(data["runs"], systems.split(","), repeat):
            try:
                with Pair(system, python, model, sizes, load) as pair:
                    pair.ask(tokens_of(70_000, 64), 2).result()  # the servers have met
                    run = {name: work(pair, load) for name, work in WORKLOADS.items()}
            except NotStartedError as error:
                print(f"{system} did not start: {error}", file=sys.stderr)
                continue
            data["runs"][f"{system} {i}"] = run
            data["summary"] = summary(data["runs"])
            out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
            shown = {name: data["summary"][name][system] for name in run}
            print(system, i, json.dumps(shown), flush=True)
