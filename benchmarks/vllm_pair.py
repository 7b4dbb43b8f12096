"""A prefill server and decode servers of one system, and what a proxy does with them: for the
benchmark `vllm`.

Every server has one thread to compute with. NixlConnector moves its worker's main thread, the one
that computes, to the last core of each NUMA node, and so the threads that NIXL makes after that, of
which one turns without a pause. No setting of vLLM 0.32 prevents it. So when such a server has
started, its threads are moved from outside, as `taskset -p` would: see `unpin`.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.vllm_servers import MODEL, Server, Sizes, transfer_config
from tests.support.ports import free_port

SYSTEMS: Final = ("pull", "push", "ours", "computes")
BLOCK: Final = 32
COMPUTE_BELOW: Final = 2 * BLOCK
"""Tokens up to which decode of `computes` may compute what it lacks itself."""
LARGE: Final = Sizes(1024, 12, 16, 8, 64, "bfloat16")  # 121 M parameters
DECODE: Final = "decode-0"
PATIENCE_S: Final = 600.0  # of an answer
_TO_PREFILL: Final = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    times_s: list[float]  # of each token, from when the request was sent
    prefill_s: float = 0.0  # when prefill had answered

    @property
    def ttft_s(self) -> float:
        return self.times_s[0]

    @property
    def after_prefill_s(self) -> float:
        return self.ttft_s - self.prefill_s


@dataclass(frozen=True)
class Shape:
    """How the servers are started. `decodes`: our connector's settings of each decode server, by
    its name; `prefill`: of prefill."""

    sizes: Sizes
    chunk: int = 256
    blocks: int = 1024
    decode_blocks: int = 1024
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decodes: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {DECODE: {}})


class Pair(ExitStack):
    """Started when it is made; `with` waits until all servers answer."""

    def __init__(self, system: str, python: str, model: Path, shape: Shape) -> None:
        super().__init__()
        self.system, self._rooms = system, itertools.count(1)
        folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        self._threads = ThreadPoolExecutor(96)
        self.callback(self._threads.shutdown, wait=False)
        kv_port = free_port()
        self._kv_address = f"tcp://127.0.0.1:{kv_port}"
        below: dict[str, Any] = {"compute_below": COMPUTE_BELOW} if system == "computes" else {}

        def start(role: str, name: str, port: int, blocks: int, extra: Mapping[str, Any]) -> Server:
            transfer = transfer_config(role, name, port, **below, **extra)
            return self.enter_context(Server(
                python, model, folder / f"{name}.log", self._nixl or transfer, blocks=blocks,
                block_size=BLOCK, chunk=shape.chunk, dtype=shape.sizes.dtype,
                environment=nixl_environment() if self._nixl else {},
            ))  # fmt: skip

        self.prefill = start("kv_producer", "prefill-0", kv_port, shape.blocks, shape.prefill)
        self._names = {name: f"decode-{number}" for number, name in enumerate(shape.decodes)}
        self.decodes = {
            name: start("kv_consumer", self._names[name], free_port(), shape.decode_blocks, extra)
            for name, extra in shape.decodes.items()
        }

    @property
    def _nixl(self) -> dict[str, Any] | None:
        """`--kv-transfer-config` of vLLM's own connectors; None: ours."""
        kind = {"pull": "NixlConnector", "push": "NixlPushConnector"}.get(self.system)
        if kind is None:
            return None
        return {
            "kv_connector": kind, "kv_role": "kv_both", "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
        }  # fmt: skip

    def __enter__(self) -> Self:
        try:
            for server in (self.prefill, *self.decodes.values()):
                server.wait()
                if self._nixl:
                    unpin(server, self.system)
        except BaseException:
            self.close()
            raise
        return self

    def ask(
        self, prompt: list[int], num_tokens: int, decode: str = DECODE, **more: Any
    ) -> Future[Answer]:
        """Ask prefill and a decode server; `more` goes to both."""
        ask = self._ask_in_turn if self._nixl else self._ask_both
        return self._threads.submit(ask, prompt, num_tokens, decode, **more)

    def _ask_both(self, prompt: list[int], num_tokens: int, decode: str, **more: Any) -> Answer:
        """Both servers are asked at once."""
        room, begun_s = next(self._rooms), time.perf_counter()
        send = {"do_remote_decode": True, "room": room, "decode": self._names[decode]}
        load = {"do_remote_prefill": True, "room": room, "prefill": self._kv_address}

        def prefill() -> float:
            with suppress(OSError, http.client.HTTPException):  # decode may have refused the room
                self.prefill.complete(prompt, 1, send, PATIENCE_S, **more)
            return time.perf_counter() - begun_s

        answered = self._threads.submit(prefill)
        tokens, times_s = self._streamed(decode, prompt, num_tokens, load, begun_s, **more)
        return Answer(tokens, times_s, answered.result())

    def _ask_in_turn(self, prompt: list[int], num_tokens: int, decode: str) -> Answer:
        """Decode is asked with what prefill's answer says, in push as in pull, as vLLM's own
        examples of a proxy do. Where prefill fails, decode is asked without."""
        name, begun_s = f"request-{next(self._rooms)}", time.perf_counter()
        params = None
        with suppress(OSError, http.client.HTTPException):
            params = self.prefill.complete(
                prompt, 1, dict(_TO_PREFILL), PATIENCE_S, request_id=name
            )["kv_transfer_params"]
        prefill_s = time.perf_counter() - begun_s
        answer = self._streamed(decode, prompt, num_tokens, params, begun_s, request_id=name)
        return Answer(*answer, prefill_s)

    def _streamed(
        self, decode: str, prompt: Sequence[int], num_tokens: int, params: dict[str, Any] | None,
        begun_s: float, **more: Any,
    ) -> tuple[list[int], list[float]]:  # fmt: skip
        """The answer's tokens, and when each came."""
        if params is not None:
            more["kv_transfer_params"] = params
        tokens: list[int] = []
        times_s: list[float] = []
        for new in stream(self.decodes[decode].port, prompt, num_tokens, **more):
            tokens += new
            times_s += [time.perf_counter() - begun_s] * len(new)
        return tokens, times_s

    def bytes_moved(self) -> int:
        """KV that came to decode since the servers started."""
        if self._nixl:
            name = "vllm:nixl_bytes_transferred_sum"
            servers = (self.prefill, *self.decodes.values())
            return int(sum(one.metrics().get(name, 0) for one in servers))
        return self.prefill.counter("bytes_sent")


def nixl_environment() -> dict[str, str]:
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_TLS": "sysv,posix,cma,tcp,self",
        "UCX_NET_DEVICES": "lo",
    }


def stream(port: int, prompt: Sequence[int], num_tokens: int, **more: Any) -> Iterator[list[int]]:
    """The tokens of an answer, as they come; who stops reading has left.

    Raises: RuntimeError where the answer is an error, or ends early; TimeoutError where nothing
        comes in `PATIENCE_S`.
    """
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
        "stream": True, "ignore_eos": True, "return_token_ids": True, **more,
    }  # fmt: skip
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    seen = 0
    try:
        headers = {"content-type": "application/json"}
        client.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = client.getresponse()
        if answer.status != 200:
            raise RuntimeError(answer.read().decode())
        for line in answer:
            if line.startswith(b"data: {"):
                said = json.loads(line[6:])
                new = [one for c in said.get("choices", ()) for one in c.get("token_ids") or []]
                seen += len(new)
                if new:
                    yield new
    finally:
        client.close()
    if seen != num_tokens:
        raise RuntimeError(f"{seen} tokens of {num_tokens}")


def unpin(server: Server, system: str) -> None:
    """`pull`: what computes leaves the last core to NIXL's threads. `push`: all may run on every
    core. Of what was tried, the best for each."""
    last = (os.cpu_count() or 1) - 1
    for pid in server.processes():
        with suppress(ProcessLookupError):
            if system == "push":
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), range(last + 1))
            elif last and os.sched_getaffinity(pid) == {last}:
                os.sched_setaffinity(pid, range(last))
