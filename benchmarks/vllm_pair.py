"""A prefill and a decode server of one system, and what a proxy does with them: for the benchmark
`vllm`.

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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.vllm_servers import MODEL, Server, Sizes, transfer_config
from tests.support.ports import free_port

SYSTEMS: Final = ("pull", "push", "ours", "computes")
BLOCK: Final = 32
COMPUTE_BELOW: Final = 2 * BLOCK
"""Tokens up to which decode of `computes` may compute what it lacks itself."""
LARGE: Final = Sizes(1024, 12, 16, 8, 64, "bfloat16")  # 121 M parameters


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
    """How the servers are started."""

    sizes: Sizes
    chunk: int = 256
    blocks: int = 1024
    decode_blocks: int = 1024
    max_len: int = 4096


@dataclass(frozen=True)
class _Ports:
    """Of a server, the same in each of its lives."""

    http: int = field(default_factory=free_port)
    kv: int = field(default_factory=free_port)
    side: int = field(default_factory=free_port)


class Pair:
    """Started when it is made; `with` waits until both answer. `patience_s`: after which an answer
    that does not come is a TimeoutError."""

    def __init__(self, system: str, python: str, model: Path, shape: Shape) -> None:
        self.system, self.shape = system, shape
        self.patience_s = 600.0
        self._python, self._model = python, model
        self._folder = tempfile.TemporaryDirectory()
        self._threads = ThreadPoolExecutor(96)
        self._rooms = itertools.count(1)
        self._lives = itertools.count(1)
        self._prefill_at, self._decode_at = _Ports(), _Ports()
        self.prefill = self._start_prefill()
        self.decode = self._start_decode()

    def _server(
        self, name: str, transfer: dict[str, Any] | None, ports: _Ports, blocks: int
    ) -> Server:
        around = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.side),
            "UCX_TLS": "sysv,posix,cma,tcp,self",
            "UCX_NET_DEVICES": "lo",
        }
        shape, log = self.shape, Path(self._folder.name) / f"{name}-{next(self._lives)}.log"
        return Server(
            self._python, self._model, log, transfer, port=ports.http,
            blocks=blocks, block_size=BLOCK, chunk=shape.chunk, dtype=shape.sizes.dtype,
            max_len=shape.max_len, environment=around if self.is_nixl else {},
        )  # fmt: skip

    def _start_prefill(self) -> Server:
        transfer = self._transfer("kv_producer", "prefill-0", self._prefill_at.kv)
        return self._server("prefill", transfer, self._prefill_at, self.shape.blocks)

    def _start_decode(self) -> Server:
        transfer = self._transfer("kv_consumer", "decode-0", self._decode_at.kv)
        return self._server("decode", transfer, self._decode_at, self.shape.decode_blocks)

    @property
    def is_nixl(self) -> bool:
        return self.system in ("pull", "push")

    def _transfer(self, role: str, name: str, port: int) -> dict[str, Any] | None:
        if self.is_nixl:
            kind = "NixlConnector" if self.system == "pull" else "NixlPushConnector"
            return {
                "kv_connector": kind, "kv_role": "kv_both", "kv_buffer_device": "cpu",
                "kv_load_failure_policy": "recompute",
            }  # fmt: skip
        below = COMPUTE_BELOW if self.system == "computes" else 0
        return transfer_config(role, name, port, compute_below=below)

    def __enter__(self) -> Pair:
        try:
            self.wait(self.prefill)
            self.wait(self.decode)
        except BaseException:
            self.close()
            raise
        return self

    def wait(self, server: Server) -> None:
        """Until it answers, and may use all cores."""
        server.wait()
        if self.is_nixl:
            unpin(server, self.system)

    @property
    def kv_address(self) -> str:
        """Where prefill's connector listens."""
        return f"tcp://127.0.0.1:{self._prefill_at.kv}"

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.decode.kill()
        self.prefill.kill()
        self._threads.shutdown(wait=False)
        self._folder.cleanup()

    # --- requests ---------------------------------------------------------------------------------

    def ask(self, prompt: list[int], num_tokens: int) -> Future[Answer]:
        ask = self._ask_in_turn if self.is_nixl else self._ask_ours
        return self._threads.submit(ask, prompt, num_tokens)

    def _both(
        self,
        prompt: list[int],
        num_tokens: int,
        send: dict[str, Any],
        load: dict[str, Any],
        **more: Any,
    ) -> Answer:
        """Both servers are asked at once."""
        begun_s = time.perf_counter()

        def prefill() -> float:
            with suppress(OSError, http.client.HTTPException):  # it may be killed
                self.prefill.complete(prompt, 1, send, self.patience_s, **more)
            return time.perf_counter() - begun_s

        answered = self._threads.submit(prefill)
        answer = self.streamed(self.decode, prompt, num_tokens, load, begun_s, **more)
        return Answer(answer.tokens, answer.times_s, answered.result())

    def _ask_ours(self, prompt: list[int], num_tokens: int) -> Answer:
        room = next(self._rooms)
        send = {"do_remote_decode": True, "room": room, "decode": "decode-0"}
        load = {"do_remote_prefill": True, "room": room, "prefill": self.kv_address}
        return self._both(prompt, num_tokens, send, load)

    _TO_PREFILL: Final = {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
        "remote_block_ids": None, "remote_host": None, "remote_port": None,
    }  # fmt: skip

    def _ask_in_turn(self, prompt: list[int], num_tokens: int) -> Answer:
        """Decode is asked with what prefill's answer says, in push as in pull, as vLLM's own
        examples of a proxy do. Where prefill fails, decode is asked without."""
        name, begun_s = f"request-{next(self._rooms)}", time.perf_counter()
        params = None
        with suppress(OSError, http.client.HTTPException):
            params = self.prefill.complete(
                prompt, 1, dict(self._TO_PREFILL), self.patience_s, request_id=name
            )["kv_transfer_params"]
        prefill_s = time.perf_counter() - begun_s
        answer = self.streamed(self.decode, prompt, num_tokens, params, begun_s, request_id=name)
        return Answer(answer.tokens, answer.times_s, prefill_s)

    def streamed(
        self,
        server: Server,
        prompt: Sequence[int],
        num_tokens: int,
        params: dict[str, Any] | None,
        begun_s: float,
        **more: Any,
    ) -> Answer:
        if params is not None:
            more["kv_transfer_params"] = params
        tokens: list[int] = []
        times_s: list[float] = []
        for new in stream(server.port, prompt, num_tokens, self.patience_s, **more):
            tokens += new
            times_s += [time.perf_counter() - begun_s] * len(new)
        return Answer(tokens, times_s)

    def bytes_moved(self) -> int:
        """KV that came to decode since the servers started."""
        if self.is_nixl:
            name = "vllm:nixl_bytes_transferred_sum"
            return int(sum(one.metrics().get(name, 0) for one in (self.prefill, self.decode)))
        return self.prefill.counter("bytes_sent")


def stream(
    port: int, prompt: Sequence[int], num_tokens: int, patience_s: float, **more: Any
) -> Iterator[list[int]]:
    """The tokens of an answer, as they come; who stops reading has left.

    Raises: RuntimeError where the answer is an error, or ends early; TimeoutError where nothing
        comes in `patience_s`.
    """
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
        "stream": True, "ignore_eos": True, "return_token_ids": True, **more,
    }  # fmt: skip
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=patience_s)
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
