"""The HF engine keeps every law of the conformance kit, with a real model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from benchmarks.hybrid_models import config_of
from prefixkv import DecodeNode, PrefillNode, conformance
from prefixkv.config import ComputeConfig
from prefixkv.conformance import AnswerLog, Prompt, ScenarioSettings, Side
from prefixkv.engines.hf import (
    DecodeEngine,
    Generate,
    Output,
    PagedModel,
    PrefillEngine,
    Sampling,
    make_model,
)
from prefixkv.engines.hf.reference import Reference
from prefixkv.errors import AbortedError
from tests.support.hf_world import TINY
from tests.support.patience import PATIENCE_S


@cache
def _made(family: str) -> tuple[PagedModel, Reference]:
    if family == "llama":
        model = make_model("llama", 1, **{**TINY, "device": "cpu"})
    else:
        model = make_model(config_of(family), seed=1)
    return model, Reference(model)


class HFSides:
    """Both workers in one process and one thread. The model has no draft."""

    def __init__(self, settings: ScenarioSettings) -> None:
        if settings.tokens_per_step > 1:
            raise NotImplementedError("this engine gives one token per step")
        self._settings = settings
        self._model, self._reference = self._models()
        self.vocabulary = range(self._model.vocab_size)
        self._start_prefill()
        self._start_decode()

    def _models(self) -> tuple[PagedModel, Reference]:
        return _made("llama")

    def _start_prefill(self) -> None:
        settings = self._settings
        pool = self._model.make_pool(
            settings.prefill_pages, settings.prefill_page_size, step_tokens=settings.chunk_tokens
        )
        self._prefill = PrefillEngine(
            self._model, pool, settings.prefill, chunk_tokens=settings.chunk_tokens
        )
        self._jobs: list[str] = []  # names of all that were submitted

    def _start_decode(self) -> None:
        pool = self._model.make_pool(self._settings.decode_pages, self._settings.page_size)
        self._decode = DecodeEngine(self._model, pool, self._settings.decode)

    @property
    def decode(self) -> DecodeNode:
        return self._decode.node

    @property
    def prefill(self) -> PrefillNode:
        return self._prefill.node

    def submit(self, prompt: Prompt, answer: AnswerLog) -> None:
        def on_output(output: Output) -> None:
            if output.token is not None:
                answer.token(output.token)
            if output.finish in ("abort", "error"):
                answer.end(output.error or AbortedError("its client has left"))
            elif output.finish is not None:
                answer.end()

        stops = () if prompt.end_token is None else (prompt.end_token,)
        ask = Generate(
            prompt.rid, np.array(prompt.tokens, np.int32), self._prefill.endpoint,
            Sampling(stop_tokens=stops), prompt.max_new_tokens, namespace=prompt.namespace,
            cacheable=prompt.cacheable, deadline_s=prompt.deadline_s,
        )  # fmt: skip
        self._decode.submit(ask, on_output)

    def abort(self, rid: str, side: Side) -> None:
        if side == "decode":
            self._decode.abort(rid)
            return
        for name in self._jobs:
            if name.split("/")[1] == rid:
                self._prefill.abort(name)

    def step(self) -> bool:
        for job in self._decode.take_prefill_jobs():
            # A worker that has gone takes no job; decode finds out by itself.
            if job.prefill == self._prefill.endpoint:
                self._prefill.submit(job)
                self._jobs.append(job.rid)
        busy = self._prefill.step()
        return self._decode.step() or busy

    def expected(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        return self._reference.answer(tokens, num_tokens)

    def restart(self, side: Side) -> None:
        if side == "prefill":
            self._prefill.close()
            self._start_prefill()
        else:
            self._decode.close()
            self._start_decode()

    def close(self) -> None:
        self._decode.close()
        self._prefill.close()


class ComputingSides(HFSides):
    """With a decode worker that computes what lacks at most 16 tokens."""

    def __init__(self, settings: Any) -> None:
        compute = ComputeConfig(below=16, chunk_tokens=5)
        super().__init__(replace(settings, decode=replace(settings.decode, compute=compute)))


class RecurrentSides(HFSides):
    def _models(self) -> tuple[PagedModel, Reference]:
        return _made("granitemoehybrid")


class ComputingRecurrentSides(RecurrentSides, ComputingSides):
    pass


class WindowedSides(HFSides):
    """With a model that has sliding windows, whose pages are of one size."""

    def __init__(self, settings: Any) -> None:
        if settings.page_size != settings.prefill_page_size:
            raise NotImplementedError("both sides have pages of one size")
        super().__init__(settings)

    def _models(self) -> tuple[PagedModel, Reference]:
        return _made("gpt_oss")


@pytest.mark.slow
@pytest.mark.parametrize("sides", [HFSides, ComputingSides, ComputingRecurrentSides, WindowedSides])
@pytest.mark.parametrize("case", conformance.scenarios(), ids=str)
def test_the_engine_keeps_every_law(case: conformance.Case, sides: type[HFSides]) -> None:
    # Where decode computes, it begins at a checkpoint, which a prompt of whole pages that is cached
    # as a whole has no use for: these look at what it hits.
    if sides is ComputingRecurrentSides and case.scenario in ("full hit", "namespaces"):
        sides = RecurrentSides
    case.check(sides, patience_s=PATIENCE_S)


def test_retracted_requests_come_back_in_time() -> None:
    """By the machine's own clock: with a deadline of seconds, long after its start."""
    report = conformance.run(HFSides, only=["tiny decode pool"], seeds=[0])
    assert report.ok, str(report)


def test_it_takes_part_in_all_but_drafts() -> None:
    report = conformance.run(HFSides, only=["several tokens per step"])
    assert [*report.skipped.values()] == ["this engine gives one token per step"]


def test_a_restarted_worker_uses_no_room_of_its_former_life() -> None:
    sides = [HFSides(conformance.ScenarioSettings()) for _ in range(2)]
    try:
        rooms = [one._decode._rooms for one in sides]
        assert abs(rooms[0] - rooms[1]) > 1_000_000
    finally:
        for one in sides:
            one.close()
