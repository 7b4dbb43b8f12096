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
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from benchmarks import vllm_model
from benchmarks.vllm_model import VOCABULARY as VOCABULARY
from prefixkv.errors import ConfigError
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
DECODE_TOKENS: Final = 1536
"""Of decode's pool: less than the conversations have, so that it evicts."""


def make_model(folder: Path) -> None:
    vllm_model.make(str(folder), 256, 4, 4, 2, 64, "bfloat16")


class Pair:
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
        self.ports = {"prefill": free_port(), "decode": free_port()}
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
        self._around = {}
        for side, size in zip(sides, ranks, strict=True):
            sides[side] += ["--tp-size", str(size)]
            self._around[side] = {**os.environ, **ENVIRONMENT, **around}
            if size > 1:  # else SGLang gives each rank a NUMA node
                cores = [str(rank % (os.cpu_count() or 1)) for rank in range(size)]
                self._around[side]["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores)
        self.logs = {side: logs / f"{side}.log" for side in sides}
        for log in self.logs.values():
            log.unlink(missing_ok=True)
        common = [option for option in COMMON if option != "--skip-tokenizer-init" or not tokenizer]
        self._commands = {
            side: [
                python, "-m", "sglang.launch_server", "--model-path", str(model), *common,
                "--port", str(self.ports[side]), "--disaggregation-mode", side, *options, *more,
            ]
            for side, options in sides.items()
        }  # fmt: skip
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Pair:
        try:
            for side in self.ports:
                self.start(side)
            for side in self.ports:
                self.until_up(side)
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, side: str) -> None:
        with self.logs[side].open("ab") as log:
            self._servers[side] = subprocess.Popen(
                self._commands[side], stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True, env=self._around[side],
            )  # fmt: skip

    def until_up(self, side: str) -> None:
        while True:
            if self._servers[side].poll() is not None:
                raise ConfigError(f"{side} ended: {self.told(side)[-1500:]}")
            try:
                urllib.request.urlopen(f"{self.url(side)}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(1)

    def kill(self, side: str) -> None:
        """SIGKILL for all its processes at once."""
        server = self._servers[side]
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()

    def __exit__(self, *_error: object) -> None:
        for side in self._servers:
            self.kill(side)

    def url(self, side: str) -> str:
        return f"http://127.0.0.1:{self.ports[side]}"

    def told(self, side: str) -> str:
        return self.logs[side].read_text(errors="replace")

    def body(self, ids: list[int], room: int, output: int = OUTPUT) -> dict[str, Any]:
        return {
            "input_ids": ids, "bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap,
            "bootstrap_room": room, "rid": f"request-{room}",
            "sampling_params": {"temperature": 0, "max_new_tokens": output, "ignore_eos": True},
        }  # fmt: skip

    def generate(self, ids: list[int], room: int) -> list[int]:
        """What decode answers; both are asked at once."""
        body = self.body(ids, room)
        pool = ThreadPoolExecutor(2)
        try:
            _, answer = pool.map(lambda side: post(f"{self.url(side)}/generate", body), self.ports)
        finally:  # without waiting: whoever ends this has servers to end that may not answer
            pool.shutdown(wait=False)
        return answer["output_ids"]  # type: ignore[no-any-return]


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
            told = pair.told("decode")
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


def post(url: str, body: Any, answer: bool = True) -> Any:
    """What it answers, as JSON; with `answer=False` any success is one."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as said:
        return json.load(said) if answer else None
