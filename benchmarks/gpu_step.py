"""Part of `benchmarks/gpu.py`: how much longer a model's step takes while KV comes in.

A step is the matrix products of an 8B-class model's 32 layers on random weights in bfloat16, no
attention and no sampling: with a batch of 64 as long as reading the weights takes, with 1,024 as
long as the arithmetic. The engine's loop launches a step, waits for it, and then serves its node.
"alone": nothing comes in; "beside": requests of 2,048 tokens (256 MiB), two under way at any time.
Both take turns. The sender is another process on the same card: its copies share it with the step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu_turns import serve
from benchmarks.pair import Row, Watch, quantiles
from prefixkv.config import DecodeConfig
from prefixkv.errors import InternalError

if TYPE_CHECKING:
    from prefixkv.prefill.request import PrefillRequest
    from prefixkv.runtime.decode_node import DecodeNode


@dataclass(frozen=True)
class Steps:
    device: str
    batch: int = 64
    layout: str = "page_major"
    num_layers: int = 32
    hidden: int = 4096
    ffn: int = 14336
    tokens: int = 2048
    under_way: int = 2
    steps: int = 60  # of a round
    rounds: int = 3
    num_pages: int = 1024
    page_size: int = 16

    @property
    def num_bytes(self) -> int:
        """Of a request."""
        return self.tokens * self.num_layers * 2 * 8 * 128 * 2

    def pool(self) -> Any:
        from prefixkv.memory.kv_pool import KVPool

        pool = KVPool.create(
            self.num_pages, self.page_size, self.num_layers, 8, 128,
            order=self.layout, device=self.device,
        )  # fmt: skip
        for layer in range(self.num_layers):
            pool.k(layer).normal_()
            pool.v(layer).normal_()
        return pool

    def prompt(self, room: int) -> Any:
        return np.random.default_rng(room).integers(0, 50_000, self.tokens, dtype=np.int32)


def small(device: str) -> Steps:
    """As small as it still works."""
    return Steps(
        device, batch=4, num_layers=2, hidden=64, ffn=128, tokens=64, steps=5, rounds=1,
        num_pages=64,
    )  # fmt: skip


def prefill_side(pipe: Connection, _watch: Watch, case: Steps) -> None:
    from prefixkv.runtime.prefill_node import PrefillNode

    with PrefillNode(case.pool()) as node:
        pipe.send(node.endpoint)

        def send(req: PrefillRequest) -> None:
            node.send_chunk(req, req.num_tokens, last=True)

        serve(pipe, node, send, lambda req: None)


def model_step(case: Steps) -> Callable[[], None]:
    """Runs a step to its end."""
    import torch

    cuda: Any = torch.cuda

    def weight(rows: int, columns: int) -> torch.Tensor:
        scale = rows**-0.5
        made = torch.randn(rows, columns, device=case.device, dtype=torch.bfloat16)
        return made.mul_(scale)

    layers = [
        (weight(case.hidden, case.hidden * 3 // 2), weight(case.hidden, case.hidden),
         weight(case.hidden, 2 * case.ffn), weight(case.ffn, case.hidden))
        for _ in range(case.num_layers)
    ]  # fmt: skip
    start = torch.randn(case.batch, case.hidden, device=case.device, dtype=torch.bfloat16)

    def step() -> None:
        x = start
        for qkv, out, up, down in layers:
            attended = (x @ qkv)[:, : case.hidden]
            x = attended @ out
            gate, value = (x @ up).chunk(2, dim=1)
            x = (gate * value) @ down
        if x.is_cuda:
            cuda.current_stream(x.device).synchronize()

    return step


class _Engine:
    def __init__(self, pipe: Connection, case: Steps, node: DecodeNode, endpoint: str) -> None:
        self._pipe, self._case, self._node, self._endpoint = pipe, case, node, endpoint
        self._room = 0
        self.open = 0
        self.arrived = 0

    def serve(self, under_way: int) -> None:
        """What an engine does for its node between two steps."""
        from prefixkv.request import Request

        node = self._node
        while self.open < under_way:
            self._room += 1
            self.open += 1
            rid, tokens = f"r{self._room}", self._case.prompt(self._room)
            self._pipe.send((rid, tokens, self._room))
            node.add(
                Request(rid, tokens, max_new_tokens=1, room=self._room, prefill=self._endpoint)
            )
        node.pop_preallocated()
        for req in node.pop_transferred():
            node.append_many([req], [1])
            node.finish(req)
            self.open -= 1
            self.arrived += 1
        for req in node.pop_failed():
            raise InternalError(f"{req.rid} failed") from req.error

    def drain(self) -> None:
        end_s = time.monotonic() + 60
        while self.open:
            self.serve(0)
            if time.monotonic() > end_s:
                raise InternalError(f"nothing arrives: {self._node.stats()}")
            self._node.wait(0.01)


def decode_side(pipe: Connection, _watch: Watch, case: Steps) -> Row:
    from prefixkv.runtime.decode_node import DecodeNode

    step = model_step(case)
    took_ms: dict[str, list[float]] = {"alone": [], "beside": []}
    served_ms: list[float] = []
    ratios, rates = [], []
    with DecodeNode(case.pool(), DecodeConfig(reserve_tokens=0)) as node:
        engine = _Engine(pipe, case, node, pipe.recv())
        engine.serve(1)
        engine.drain()
        for _ in range(5):
            step()
        for _ in range(case.rounds):
            medians = []
            for how, under_way in (("alone", 0), ("beside", case.under_way)):
                engine.serve(under_way)
                before, began_s = engine.arrived, time.monotonic()
                round_ms = []
                for _ in range(case.steps):
                    start = time.perf_counter()
                    step()
                    end = time.perf_counter()
                    engine.serve(under_way)
                    round_ms.append(1e3 * (end - start))
                    if under_way:
                        served_ms.append(1e3 * (time.perf_counter() - end))
                took_ms[how] += round_ms
                if how == "beside":
                    passed_s = time.monotonic() - began_s
                    rates.append((engine.arrived - before) * case.num_bytes / passed_s / 1e9)
                medians.append(statistics.median(round_ms))
                engine.drain()
            ratios.append(medians[1] / medians[0])
        pipe.send(None)
    return {
        "batch": case.batch,
        "layout": case.layout,
        "step_ms": {how: quantiles(took) for how, took in took_ms.items()},
        "beside_over_alone": round(statistics.median(ratios), 3),
        "mean_beside_over_alone": round(
            statistics.mean(took_ms["beside"]) / statistics.mean(took_ms["alone"]), 3
        ),
        "came_in_gb_s": round(statistics.median(rates), 2),
        "serving_the_node_ms": quantiles(served_ms),
    }
