"""The HF engine as the conformance kit drives it: both workers in one process and one thread.

python -m prefixkv.conformance prefixkv.engines.hf.conformance:HFSides
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np

from prefixkv import DecodeNode, PrefillNode
from prefixkv.conformance.interface import AnswerLog, Prompt, ScenarioSettings, Side
from prefixkv.engines.hf.decode import DecodeEngine
from prefixkv.engines.hf.models import PagedModel, Reference, make_model
from prefixkv.engines.hf.prefill import PrefillEngine
from prefixkv.engines.hf.requests import Generate, Output, Sampling
from prefixkv.errors import AbortedError

_SIZES: Final[dict[str, Any]] = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip


@cache
def _model() -> tuple[PagedModel, Reference]:
    model = make_model("llama", 1, **_SIZES)
    return model, Reference(model)


class HFSides:
    """Both workers with a model that computes in no time. Raises NotImplementedError for several
    tokens per step: the kit's model has no draft."""

    def __init__(self, settings: ScenarioSettings) -> None:
        if settings.tokens_per_step > 1:
            raise NotImplementedError("this engine gives one token per step")
        self._settings = settings
        self._model, self._reference = self._models()
        self.vocabulary = range(self._model.vocab_size)
        self._start_prefill()
        self._start_decode()

    def _models(self) -> tuple[PagedModel, Reference]:
        return _model()

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
