"""What turns of conversations wait for with a real model: workers as `prefixkv worker` runs them, a
prefill worker, and two decode workers, one with its cache and one without. Part of `python -m
benchmarks engine`.

"turns": TTFT at .7 of what is answered without decode's cache when all is sent at once.
"slow": the same, and 1 Gbit/s between prefill and decode: two network namespaces, a veth pair,
`tc tbf` on both its ends, `UCX_TLS=tcp`. It takes root.
"small": the same with 6 KiB of KV a token and shared memory, four times turn about.
"burst": eight requests at once with one new system prompt: what prefill computes.

All passes have the same system prompt, which is cached where there is a cache, and the same
lengths; what users say differs. A pass waits for the one before it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.stand_in.workload import arrival_times
from prefixkv.cli.chats.play import Played, Vocabulary, play
from prefixkv.cli.chats.workers import PREFILL, ModelWorkers
from prefixkv.cli.chats.workload import Run, Workload, chat

LOAD = 0.7
SEED = 1
WORDS = Vocabulary(100, 30_000, system=1, user=2, assistant=3, stop=4)
ON, OFF = "decode-on", "decode-off"
GBIT = 1.0
ADDRESSES = ("10.78.0.1", "10.78.0.2")
WIRE = "wire"

SMALL_KV: dict[str, Any] = {
    "vocab_size": 32_000, "tie_word_embeddings": True,
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
}  # fmt: skip
CHATS = {
    "turns": {
        "conversations": 8, "turns": 4, "system_tokens": 1024, "user_tokens": 48,
        "output_tokens": 16,
    },
    "slow": {
        "conversations": 6, "turns": 4, "system_tokens": 3072, "user_tokens": 24,
        "output_tokens": 12,
    },
    "small": {
        "conversations": 8, "turns": 5, "system_tokens": 1024, "user_tokens": 40,
        "output_tokens": 16,
    },
}  # fmt: skip
TURN_ABOUT = {"turns": 1, "slow": 1, "small": 4}
BURST, BURST_SYSTEM, BURST_SUFFIX = 8, 512, 22
BURSTS = 3


def turns(kind: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """One of the rows; "turns" has "burst" with it. `sizes` of a Llama, as of `make_model`."""
    from prefixkv.engines.hf import make_model
    from prefixkv.engines.hf.reference import Reference
    from prefixkv.engines.hf.small import small_tokenizer

    with tempfile.TemporaryDirectory(prefix="prefixkv-engine-") as name, ExitStack() as stack:
        folder = Path(name)
        model = make_model("llama", 0, trial=False, **sizes)
        Reference(model).save(folder)
        small_tokenizer().save(str(folder / "tokenizer.json"))
        kv_bytes = model.make_pool(1, 1).layout.kv_bytes_per_token
        parameters = sum(one.numel() for one in model.model.parameters())
        del model
        if kind != "slow":
            found = asyncio.run(_measure(kind, folder))
        else:
            found = _beyond_a_wire(kind, folder, stack)
    return {"parameters": parameters, "kv_bytes_per_token": kv_bytes, **found}


async def _measure(
    kind: str, folder: Path, prefill: Mapping[str, Any] | None = None, *within: str
) -> dict[str, Any]:
    workload = chat(SEED, **CHATS[kind])
    most = workload.max_request_tokens
    pages = -(-(most + 64) // 16)
    of_passes = len(workload.sessions) * pages
    few = {"page_size": 16, "num_pages": of_passes + 512}
    decode = {ON: {**few, "cache": True}, OFF: {**few, "cache": False}}
    async with ModelWorkers(folder, few | dict(prefill or {}), decode, within) as workers:
        system = WORDS(workload.sessions[0][0], True)
        for name in (ON, OFF):  # the system prompt is where it can be
            await workers.ask(name, f"first {name}", system, 2, ignore_end=True)
        sustained = await _pass(workers, OFF, workload, 1)
        rate = LOAD * workload.num_requests / sustained.duration_s
        rounds = []
        for number in range(TURN_ABOUT[kind]):
            order = (ON, OFF) if number % 2 == 0 else (OFF, ON)
            rounds.append({
                name: await _row(workers, name, workload, 2 + 2 * number + at, rate)
                for at, name in enumerate(order)
            })  # fmt: skip
        found: dict[str, Any] = {
            "workload": CHATS[kind],
            "offered_requests_per_s": round(rate, 3),
            "rounds": [{name: one[name] for name in (ON, OFF)} for one in rounds],
            "ttft_p50_off_by_on": _median(
                [one[OFF]["ttft_ms"]["p50"] / one[ON]["ttft_ms"]["p50"] for one in rounds]
            ),
            "retried": workers.retried,
        }
        if kind == "turns":
            found["burst"] = [await _burst(workers, number) for number in range(BURSTS)]
    return found


async def _pass(
    workers: ModelWorkers, name: str, workload: Workload, number: int, rate: float | None = None
) -> Played:
    """One pass, when the workers have nothing left of the one before it."""
    for one in (PREFILL, name):
        await workers.settled(one)
    due = arrival_times(workload, SEED, rate)
    return await play(workers, name, others(workload, number), WORDS, "", due, ignore_end=True)


async def _row(
    workers: ModelWorkers, name: str, workload: Workload, number: int, rate: float
) -> dict[str, Any]:
    before, _ = await workers.settled(PREFILL)
    played = await _pass(workers, name, workload, number, rate)
    after, _ = await workers.settled(PREFILL)
    answers = played.all()
    times_ms = 1e3 * np.array([answer.ttft_s for answer in answers])
    return {
        "requests": len(answers),
        "ttft_ms": {f"p{p}": round(float(np.percentile(times_ms, p)), 2) for p in (50, 90, 99)},
        "itl_ms_p50": _median([1e3 * one for answer in answers for one in answer.itl_s]),
        "hit_rate": round(
            sum(answer.hit_tokens for answer in answers)
            / sum(len(answer.prompt) for answer in answers), 4,
        ),
        "computed_tokens": int(_counted(after, "prompt_tokens") - _counted(before, "prompt_tokens")
            - _counted(after, "hit_tokens") + _counted(before, "hit_tokens")),
        "mib_sent": round((_counted(after, "sent_bytes") - _counted(before, "sent_bytes")) / 2**20),
        "duration_s": round(played.duration_s, 2),
    }  # fmt: skip


def others(workload: Workload, number: int) -> Workload:
    """The same lengths and the same system prompt; users say other things."""

    def other(run: Run) -> Run:
        return Run(run.seed + number, run.length)

    return Workload(
        tuple(
            tuple(replace(turn, text=(*turn.text[:-1], other(turn.text[-1]))) for turn in session)
            for session in workload.sessions
        )
    )


async def _burst(workers: ModelWorkers, number: int) -> dict[str, Any]:
    """Eight requests at once with a system prompt that is nowhere."""
    rng = np.random.default_rng([SEED, number])

    def some(num: int) -> list[int]:
        tokens: list[int] = rng.integers(100, 30_000, num).tolist()
        return tokens

    system = some(BURST_SYSTEM)
    before, _ = await workers.settled(PREFILL)
    async with asyncio.TaskGroup() as group:
        for i in range(BURST):
            rid = f"burst {number}.{i}"
            group.create_task(workers.ask(ON, rid, system + some(BURST_SUFFIX), 4, ignore_end=True))
    after, _ = await workers.settled(PREFILL)
    counts = [
        _counted(after, name) - _counted(before, name) for name in ("prompt_tokens", "hit_tokens")
    ]
    distinct = BURST_SYSTEM + BURST * BURST_SUFFIX
    computed = int(counts[0] - counts[1])
    return {
        "requests": BURST, "distinct_tokens": distinct, "computed_tokens": computed,
        "times": round(computed / distinct, 3),
    }  # fmt: skip


def _counted(figures: Mapping[str, float], name: str) -> float:
    """A counter of the prefill worker, over all namespaces."""
    begin = f"prefixkv_{name}_total{{"
    return sum(value for what, value in figures.items() if what.startswith(begin))


def _median(values: list[float]) -> float:
    return round(float(np.median(values)), 3)


# --- a wire ---------------------------------------------------------------------------------------


def _beyond_a_wire(kind: str, folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Measured by a process in decode's namespace."""
    prefill, decode = (f"prefixkv-{os.getpid()}-{side}" for side in ("p", "d"))
    for name in (prefill, decode):
        _do(f"ip netns add {name}")
        stack.callback(_do, f"ip netns delete {name}")
    _do(f"ip -n {prefill} link add {WIRE} type veth peer name {WIRE} netns {decode}")
    for name, address in zip((prefill, decode), ADDRESSES, strict=True):
        _do(f"ip -n {name} address add {address}/24 dev {WIRE}")
        for device in ("lo", WIRE):
            _do(f"ip -n {name} link set {device} up")
        limit = f"rate {GBIT}gbit burst 256kb latency 50ms"
        _do(f"tc -n {name} qdisc replace dev {WIRE} root tbf {limit}")
    command = [
        "ip", "netns", "exec", decode, sys.executable, "-m", "benchmarks.engine_turns", kind,
        str(folder), prefill,
    ]  # fmt: skip
    environ = os.environ | {"UCX_TLS": "tcp", "UCX_NET_DEVICES": WIRE}
    ended = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True)
    return {"gbit_per_s": GBIT, **json.loads(ended.stdout)}


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True)


def _in_the_namespace(kind: str, folder: str, prefill: str) -> None:
    """`python -m benchmarks.engine_turns slow FOLDER NAMESPACE`: the decode side of a wire."""
    address = ADDRESSES[0]
    bind = {
        "host": address, "status_host": address, "bind": f"tcp://{address}:*",
        "control_network_is_isolated": True,
    }  # fmt: skip
    within = ("ip", "netns", "exec", prefill)
    print(json.dumps(asyncio.run(_measure(kind, Path(folder), bind, *within))))


if __name__ == "__main__":
    _in_the_namespace(*sys.argv[1:])
