"""Prefill and decode servers of SGLang on a CPU, with its own trees and transfers, with prefixkv's
tree, and with its tree and transfers, on the same multi-turn requests, one at a time: do all
answers agree?

Run by the interpreter of `python -m benchmarks env sglang`. The model is a small Llama with random
weights, made here. Each pair of servers runs by itself.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from benchmarks import vllm_model
from benchmarks.servers import Server
from benchmarks.vllm_model import VOCABULARY as VOCABULARY
from tests.support.ports import free_port

ENVIRONMENT: Final = {
    "SGLANG_USE_CPU_ENGINE": "1", "PREFIXKV_CPU_NIXL": "1", "OMP_NUM_THREADS": "1",
    "UCX_TLS": "shm,tcp,self", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "900",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "900",
}  # fmt: skip
COMMON: Final = [
    "--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph",
    "--skip-tokenizer-init", "--page-size", "16", "--max-running-requests", "16",
    "--sampling-backend", "pytorch", "--host", "127.0.0.1", "--disable-overlap-schedule",
    "--watchdog-timeout", "1000", "--sleep-on-idle", "--skip-server-warmup",
    "--mem-fraction-static", "0.6",
]  # fmt: skip
CONVERSATIONS, TURNS, SYSTEM, USER, OUTPUT = 5, 4, 256, 96, 16
SIDES: Final = {
    "sglang": ["--disaggregation-transfer-backend", "nixl"],
    "prefixkv": [
        "--disaggregation-transfer-backend", "nixl", "--radix-cache-backend", "prefixkv",
    ],
    "transfers": [
        "--disaggregation-transfer-backend", "prefixkv", "--radix-cache-backend", "prefixkv",
    ],
}  # fmt: skip
"""SGLang as it is, its transfers under prefixkv's tree, and prefixkv's of both."""
START_S: Final = 1800.0
DECODE_TOKENS: Final = 1536
"""Of decode's pool: less than the conversations have, so that it evicts."""


def make_model(folder: Path) -> None:
    vllm_model.make(str(folder), 256, 4, 4, 2, 64, "bfloat16")


class Pair(ExitStack):
    """A prefill and a decode server, until the `with` block ends.

    Args:
        more: options of both.
        decode_tokens, prefill_tokens: of their pools.
        on_prefill: options of prefill alone.
        around: environment variables besides.
        ranks: tensor-parallel ranks of prefill and of decode.
        tokenizer: whether they have one, for words as prompts and OpenAI's routes.
        python: the interpreter that has SGLang.
    """

    def __init__(
        self,
        model: Path,
        more: list[str],
        logs: Path,
        decode_tokens: int = DECODE_TOKENS,
        on_prefill: Sequence[str] = (),
        prefill_tokens: int = 16384,
        around: Mapping[str, str] = MappingProxyType({}),
        ranks: tuple[int, int] = (1, 1),
        tokenizer: bool = False,
        python: str = sys.executable,
    ) -> None:
        super().__init__()
        self.bootstrap = free_port()
        sides = {
            "prefill": [
                "--max-total-tokens", str(prefill_tokens),
                "--disaggregation-bootstrap-port", str(self.bootstrap), *on_prefill,
            ],
            "decode": [
                "--max-total-tokens", str(decode_tokens),
                "--disaggregation-decode-retraction-backup", "cpu_tensor",
                "--disaggregation-decode-enable-radix-cache", "--num-reserved-decode-tokens", "32",
            ],
        }  # fmt: skip
        common = [option for option in COMMON if option != "--skip-tokenizer-init" or not tokenizer]
        self.servers: dict[str, Server] = {}
        for (side, options), size in zip(sides.items(), ranks, strict=True):
            environment, port = {**ENVIRONMENT, **around}, free_port()
            if size > 1:  # else SGLang gives each rank a NUMA node
                cores = [str(rank % (os.cpu_count() or 1)) for rank in range(size)]
                environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores)
            command = [
                python, "-m", "sglang.launch_server", "--model-path", str(model), *common,
                "--port", str(port), "--disaggregation-mode", side, *options, *more,
                "--tp-size", str(size),
            ]  # fmt: skip
            server = Server(command, logs / f"{side}.log", port, environment)
            self.servers[side] = self.enter_context(server)

    def __enter__(self) -> Self:
        try:
            for server in self.servers.values():
                server.wait(START_S)
        except BaseException:
            self.close()
            raise
        return self

    def body(self, ids: list[int], room: int, output: int = OUTPUT) -> dict[str, Any]:
        return {
            "input_ids": ids, "bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap,
            "bootstrap_room": room, "rid": f"request-{room}",
            "sampling_params": {"temperature": 0, "max_new_tokens": output, "ignore_eos": True},
        }  # fmt: skip

    def generate(self, ids: list[int], room: int) -> list[int]:
        """What decode answers; both are asked at once."""
        body, pool = self.body(ids, room), ThreadPoolExecutor(2)
        try:
            asked = pool.map(lambda server: server.post("/generate", body), self.servers.values())
            return [*asked][1]["output_ids"]  # type: ignore[no-any-return]
        finally:  # without waiting: whoever ends this has servers to end that may not answer
            pool.shutdown(wait=False)


def serve(folder: Path, ranks: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    """All pairs, one after the other; what they answered. With several ranks, of prefill and of
    decode, SGLang as it is has them too: sums of floats depend on how they are shared out. Where
    they are unequal its own transfers write nothing to host memory, so it has one rank a side, and
    all compute with floats of 32 bits, where such sums hardly differ."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    if not (model / "config.json").is_file():
        make_model(model)
    answers: dict[str, list[list[int]]] = {}
    seconds = {}
    unequal = ranks[0] != ranks[1]
    sides = ["sglang", "transfers"] if unequal else list(SIDES)
    for side in sides:
        options = SIDES[side] + (["--dtype", "float32"] if unequal else [])
        of_side = (1, 1) if unequal and side == "sglang" else ranks
        logs = folder / side
        logs.mkdir(exist_ok=True)
        with Pair(model, options, logs, ranks=of_side) as pair:
            began = time.perf_counter()
            answers[side] = _workload(pair)
            seconds[side] = round(time.perf_counter() - began, 1)
            told = pair.servers["decode"].told()
        expected = "UnifiedRadixCache" if side == "sglang" else "PrefixKVCache"
        assert f"impl={expected}" in told, f"decode did not run {expected}"
        ours = "prefixkv's transfers: " in told
        assert ours == (side == "transfers"), f"{side} has not the transfer backend it was told"
        (folder / f"{side}.json").write_text(json.dumps(answers[side]))
    stock = answers["sglang"]
    same = {
        side: sum(ours == theirs for ours, theirs in zip(given, stock, strict=True))
        for side, given in answers.items()
        if side != "sglang"
    }
    return {
        "requests": len(stock), "ranks": ranks, "identical": same, "seconds": seconds,
        "decode_pool_tokens": DECODE_TOKENS,
        "workload": f"{CONVERSATIONS} conversations of {TURNS} turns, one request at a time",
    }  # fmt: skip


def _workload(pair: Pair) -> list[list[int]]:
    rng = random.Random(7)
    system = [rng.randrange(3, VOCABULARY) for _ in range(SYSTEM)]
    chats = [list(system) for _ in range(CONVERSATIONS)]
    answers = []
    for turn in range(TURNS):
        for number, chat in enumerate(chats):
            chat += [rng.randrange(3, VOCABULARY) for _ in range(USER)]
            answers.append(pair.generate(chat, 1 + turn * CONVERSATIONS + number))
            chat += answers[-1]
    return answers
