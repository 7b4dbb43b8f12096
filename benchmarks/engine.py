"""The engine of Hugging Face's models beside transformers by itself, on the CPU.

    python -m benchmarks engine > benchmarks/results/engine.json

A Llama of 100 M random parameters in float32 (12 layers of 768, 12 heads of 64, 4 of K and V,
vocabulary 32,000, embeddings tied); pages of 16 tokens. All that is compared takes turns, and the
medians are given.

"decode": a step of the decode worker, `DecodeEngine.step` whole, for a batch whose contexts are all
of that length, against a step of `generate` with a static cache on the same batch. What is in the
caches is random: neither is timed while it fills. The pages of a request lie side by side
("fresh"), or anywhere ("mixed").
"prefill": 2,048 tokens in chunks of 512 on pages, against one `forward` of all that keeps no cache.
"own": processor time of a request on both workers, in one process, with one thread of torch: all
but the model's is prefixkv's and the engines' own. Decode's transport looks for what comes as long
as a request is on its way, so its share grows with the time that prefill takes.
"turns", "slow", "small", "burst" (with "turns"): see `engine_turns`.

With its defaults it takes about ten minutes; `--rounds 1 --steps 4` says whether it works.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import psutil
import torch
import transformers
import typer
from transformers import StaticCache, StoppingCriteria, StoppingCriteriaList

from benchmarks.engine_turns import SMALL_KV, turns
from benchmarks.yardsticks import no_collector
from prefixkv.cli.figures import machine
from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.engines.hf import DecodeEngine, Generate, PagedModel, PrefillEngine, make_model
from prefixkv.engines.hf.attention import FlatPool
from prefixkv.engines.hf.models import unpaged_copy
from prefixkv.engines.hf.requests import pack_first
from prefixkv.errors import ConfigError
from prefixkv.runtime.prefill_node import PrefillNode

SIZES: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
    "initializer_range": 0.02, "tie_word_embeddings": True,
}  # fmt: skip
PAGE_SIZE = 16
PARTS = ("decode", "prefill", "own", "turns", "slow", "small")


def clock() -> float:
    """Seconds. With one thread of torch those of this thread's processor time, so that it matters
    less what else the machine does."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


# --- decode ---------------------------------------------------------------------------------------


class _Steps(StoppingCriteria):  # type: ignore[misc]
    """Ends `generate` after so many tokens, and notes the time of each."""

    def __init__(self, num: int) -> None:
        self.num, self.times_s = num, [clock()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times_s.append(clock())
        done = len(self.times_s) > self.num
        return torch.full((len(input_ids),), done, dtype=torch.bool)


class StaticDecode:
    """`generate` with a static cache that has the batch's context already."""

    def __init__(self, model: Any, batch: int, context: int, steps: int) -> None:
        self.model, self.context, self.steps = model, context, steps
        self.cache = StaticCache(config=model.config, max_cache_len=context + steps + 1)
        sizes = batch, SIZES["num_key_value_heads"], context - 1, SIZES["head_dim"]
        for layer in range(SIZES["num_hidden_layers"]):
            self.cache.update(torch.randn(sizes), torch.randn(sizes), layer)
        self.ids = torch.zeros(batch, context, dtype=torch.long)

    @torch.inference_mode()
    def round(self) -> list[float]:
        """Seconds of each step but the first."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context - 1)
        ends = _Steps(self.steps + 1)
        self.model.generate(
            self.ids, attention_mask=torch.ones_like(self.ids), past_key_values=self.cache,
            max_new_tokens=self.steps + 1, do_sample=False, pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([ends]),
        )  # fmt: skip
        return _differences(ends.times_s)[1:]


class EngineDecode:
    """A decode engine with that batch; a prefill node sends it the random KV of its own pool."""

    def __init__(
        self, model: PagedModel, batch: int, context: int, steps: int, mixed: bool
    ) -> None:
        self.batch, self.context, self.steps, self.mixed = batch, context, steps, mixed
        pages = (context + steps) // PAGE_SIZE + 2
        self.source = model.make_pool(pages, PAGE_SIZE)
        for layer in range(model.num_layers):
            self.source.k(layer).normal_()
            self.source.v(layer).normal_()
        config = PrefillConfig(model=model.identity, cache=False)
        self.sender = PrefillNode(self.source, config)
        pool = model.make_pool(batch * pages * 2, PAGE_SIZE)
        self.engine = DecodeEngine(model, pool, DecodeConfig(cache=False, reserve_tokens=steps + 8))
        self.rounds = 0
        if mixed:
            _mix(self.engine)

    def round(self) -> list[float]:
        """Seconds of each step but the first, once the whole batch runs."""
        self.rounds += 1
        engine, rng = self.engine, np.random.default_rng(self.rounds)
        for i in range(self.batch):
            tokens = rng.integers(0, 1000, self.context, dtype=np.int32)
            ask = Generate(
                f"{self.rounds}.{i}", tokens, self.sender.endpoint, max_new_tokens=self.steps + 3
            )
            engine.submit(ask, lambda output: None)
        arrived = 0
        requests = {job.rid: job.request() for job in engine.take_prefill_jobs()}
        for request in requests.values():
            self.sender.add(request)
        node = engine.node
        while arrived < self.batch:  # before the engine's first step, so that all run in all steps
            node.pop_preallocated()
            for req in self.sender.pop_bootstrapped():
                self.sender.send_chunk(req, self.context, last=True, aux=pack_first(1, 0))
            arrived += len(self.sender.pop_sent())
            node.wait(0.001)
        times_s = [clock()]
        while engine.stats()["running"] or len(times_s) == 1:
            engine.step()
            times_s.append(clock())
        # The first steps take in what has come; the last finishes.
        return _differences(times_s)[-self.steps - 1 : -1]

    def close(self) -> None:
        self.engine.close()
        self.sender.close()


def _mix(engine: DecodeEngine) -> None:
    """Leave only single pages free that do not lie side by side."""
    allocator = engine.node.scheduler.pages.allocator
    taken = allocator.alloc(allocator.free_pages)
    allocator.free(taken[::2])


def decode(model: PagedModel, reference: Any, batch: int, rounds: int, steps: int) -> list[Any]:
    rows = []
    for context in (512, 2048):
        sides: dict[str, Any] = {"static": StaticDecode(reference, batch, context, steps)}
        for name, mixed in (("fresh", False), ("mixed", True)):
            sides[name] = EngineDecode(model, batch, context, steps, mixed)
        times = turn_about({name: side.round for name, side in sides.items()}, rounds)
        for name in ("fresh", "mixed"):
            sides[name].close()
            rows.append({
                "context": context,
                "pages": name,
                "engine_ms": _ms(times[name]),
                "generate_ms": _ms(times["static"]),
                "times": round(_median(times[name]) / _median(times["static"]), 3),
            })  # fmt: skip
    return rows


# --- prefill --------------------------------------------------------------------------------------


def prefill(
    model: PagedModel, reference: Any, rounds: int, tokens: int = 2048, chunk: int = 512
) -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(0, 1000, tokens)
    flat = FlatPool(model.make_pool(tokens // PAGE_SIZE * 2, PAGE_SIZE))
    pages = np.random.default_rng(1).permutation(tokens // PAGE_SIZE * 2).astype(np.int32)

    def chunks() -> list[float]:
        began_s = clock()
        for start in range(0, tokens, chunk):
            end = start + chunk
            wanted = [0] if end == tokens else []
            model.forward(flat, ids[start:end], [pages], [start], [end], wanted)
        return [clock() - began_s]

    @torch.inference_mode()
    def whole() -> list[float]:
        began_s = clock()
        reference(input_ids=torch.as_tensor(ids)[None], use_cache=False, logits_to_keep=1)
        return [clock() - began_s]

    times = turn_about({"chunks": chunks, "whole": whole}, rounds)
    return {
        "tokens": tokens,
        "chunk": chunk,
        "engine_ms": _ms(times["chunks"]),
        "forward_ms": _ms(times["whole"]),
        "times": round(_median(times["chunks"]) / _median(times["whole"]), 3),
    }


# --- prefixkv's own -------------------------------------------------------------------------------


def own(
    model: PagedModel, prompt: int = 512, answer: int = 64, requests: int = 8
) -> dict[str, Any]:
    """Processor time of requests that run together, through both engines."""
    threads_of_torch = torch.get_num_threads()
    torch.set_num_threads(1)
    model_s = 0.0
    forward = model.forward

    def timed(*args: Any) -> torch.Tensor:
        nonlocal model_s
        began_s = time.thread_time()
        logits = forward(*args)
        model_s += time.thread_time() - began_s
        return logits

    model.forward = timed  # type: ignore[method-assign, assignment]
    pages = requests * (prompt + answer) // PAGE_SIZE + 64
    prefill_engine = PrefillEngine(model, model.make_pool(pages, PAGE_SIZE))
    decode_engine = DecodeEngine(model, model.make_pool(pages, PAGE_SIZE))
    process, rng = psutil.Process(), np.random.default_rng(3)
    try:
        for number, num in enumerate((1, requests)):  # the first wires the two up
            ended = 0
            before, of_before = process.cpu_times(), _threads(process)
            model_s = 0.0

            def on_output(output: Any) -> None:
                nonlocal ended
                ended += output.finish is not None

            for i in range(num):
                tokens = rng.integers(0, 1000, prompt if number else 16, dtype=np.int32)
                where = prefill_engine.endpoint
                ask = Generate(f"{number}.{i}", tokens, where, max_new_tokens=answer)
                decode_engine.submit(ask, on_output)
            while ended < num:
                for job in decode_engine.take_prefill_jobs():
                    prefill_engine.submit(job)
                going = prefill_engine.step()
                if not (decode_engine.step() or going):
                    decode_engine.wait(0.01)
            after, of_after = process.cpu_times(), _threads(process)
        total_s = after.user + after.system - before.user - before.system
    finally:
        del model.forward  # the method is there again
        decode_engine.close()
        prefill_engine.close()
        torch.set_num_threads(threads_of_torch)
    return {
        "prompt": prompt,
        "answer": answer,
        "requests": requests,
        "model_ms_a_request": round(1e3 * model_s / requests, 1),
        "own_ms_a_request": round(1e3 * (total_s - model_s) / requests, 2),
        "of_it_in_threads_ms_a_request": {
            name: round(1e3 * (took_s - of_before.get(name, 0.0)) / requests, 2)
            for name, took_s in of_after.items()
            if name != "MainThread"
        },
        "own_of_the_models": round((total_s - model_s) / model_s, 4),
    }


def _threads(process: psutil.Process) -> dict[str, float]:
    """Seconds of processor time by the thread's name; each has one of its own."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = [
        (names.get(one.id, "other"), one.user_time, one.system_time) for one in process.threads()
    ]
    return {name: sum(u + s for of, u, s in found if of == name) for name, *_ in found}


# --- what they have in common ---------------------------------------------------------------------


def turn_about(sides: dict[str, Callable[[], list[float]]], rounds: int) -> dict[str, list[float]]:
    """Seconds of all rounds but the first, which warms up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    with no_collector():
        for number in range(rounds + 1):
            for name, side in sides.items():
                took = side()
                if number:
                    times[name] += took
    return times


def _differences(times_s: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times_s)]


def _median(times_s: list[float]) -> float:
    return float(np.median(times_s))


def _ms(times_s: list[float]) -> float:
    return round(1e3 * _median(times_s), 2)


def engine(
    rounds: Annotated[int, typer.Option(help="Of each side, turn about.")] = 4,
    steps: Annotated[int, typer.Option(help="Of a round of decode.")] = 12,
    batch: Annotated[int, typer.Option(help="Requests of decode.")] = 8,
    threads: Annotated[int, typer.Option(help="Of torch.")] = 2,
    parts: Annotated[str, typer.Option(help="What is run.")] = ",".join(PARTS),
) -> None:
    """Decode steps, prefill, prefixkv's own processor time and turns of conversations with a real
    model; JSON on stdout."""
    if min(rounds, steps, batch, threads) < 1:
        raise ConfigError("--rounds, --steps, --batch and --threads must be at least 1")
    torch.set_num_threads(threads)
    load_before = os.getloadavg()
    wanted = parts.split(",")
    if unknown := [part for part in wanted if part not in PARTS]:
        raise ConfigError(f"--parts has {unknown[0]!r}, there are {', '.join(PARTS)}")
    model = make_model("llama", seed=0, trial=False, **SIZES)
    reference = unpaged_copy(model)
    found: dict[str, Any] = {}
    began_s = time.perf_counter()
    for part in wanted:
        print(f"{time.perf_counter() - began_s:6.0f} s: {part}", file=sys.stderr, flush=True)
        if part == "decode":
            found[part] = decode(model, reference, batch, rounds, steps)
        elif part == "prefill":
            found[part] = prefill(model, reference, rounds)
        elif part == "own":
            found[part] = own(model)
        else:
            found[part] = turns(part, SMALL_KV if part == "small" else SIZES)
    recipe: dict[str, Any] = {
        "command": "python -m benchmarks engine"
        + (f" --parts {parts}" if parts != ",".join(PARTS) else ""),
        "what": "medians of all steps of all rounds, float32, pages of 16 tokens, layer_major",
        "parameters": sum(one.numel() for one in model.model.parameters()),
        "rounds": rounds,
        "steps": steps,
        "batch": batch,
        "threads": threads,
        "clock": "processor time" if threads == 1 else "time",
        "took_s": round(time.perf_counter() - began_s),
        "load_average": [load_before[0], os.getloadavg()[0]],
        **machine(),
    }
    recipe["versions"]["transformers"] = transformers.__version__
    print(json.dumps({"recipe": recipe, **found}, indent=1))
