"""Both workers of the engine of Hugging Face's models in one process and one thread, over real
NIXL, and the model by itself to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import numpy as np
import torch

from prefixkv.config import ControlConfig, DecodeConfig, PrefillConfig
from prefixkv.engines.hf import (
    DecodeEngine,
    Generate,
    Output,
    PagedModel,
    PrefillEngine,
    Sampling,
    make_model,
)
from prefixkv.engines.hf.models import unpaged_copy
from prefixkv.engines.hf.requests import TokenLogprob
from prefixkv.engines.hf.text import KeepThinking
from tests.support.devices import DEVICE
from tests.support.hybrid_models import config_of
from tests.support.patience import NEVER_S, until

BY_SIZE = 100.0  # a share of steps

_CONTROL = ControlConfig(
    waiting_timeout_s=NEVER_S, transfer_timeout_s=NEVER_S, bootstrap_timeout_s=NEVER_S,
    longest_wait_s=100 * NEVER_S, connect_timeout_s=NEVER_S,
)  # fmt: skip
# Logits on pages differ from those of one forward by about 1e-5: sums are formed in another order.
# With states it is up to 1e-4 for Qwen3-Next, also without pages, and 1 where a state is wrong.
NEAR, NEAR_WITH_STATES = 1e-4, 1e-3
# A model that computes in no time, on the device of the tests.
TINY = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "device": DEVICE,
}  # fmt: skip


@dataclass
class Answer:
    """What a client has got."""

    ask: Generate
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by sample
    ends: dict[int, Output] = field(default_factory=dict)
    pieces: dict[int, list[str]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob | None]] = field(default_factory=dict)

    def __call__(self, output: Output) -> None:
        assert output.sample not in self.ends, "an answer ended twice"
        tokens = self.tokens.setdefault(output.sample, [])
        assert output.position == len(tokens)
        self.pieces.setdefault(output.sample, []).append(output.text)
        if output.token is not None:
            tokens.append(output.token)
            self.logprobs.setdefault(output.sample, []).append(output.logprob)
        if output.finish is not None:
            self.ends[output.sample] = output

    def text(self, sample: int) -> str:
        return "".join(self.pieces[sample])

    @property
    def done(self) -> bool:
        return len(self.ends) == self.ask.num_samples


class World:
    """A prefill and a decode engine; both compute with `model`, turn about. Where the share of own
    compute is no bound (BY_SIZE), it decides by size alone, whatever was measured."""

    def __init__(
        self, model: PagedModel, *, pages: int = 64, page_size: int = 16,
        order: str = "layer_major", prefill_pages: int = 64, prefill_page_size: int = 0,
        prefill_order: str = "", chunk_tokens: int = 32,
        decode: dict[str, Any] | None = None, prefill: dict[str, Any] | None = None,
        tokenizer: Any = None, thinking: KeepThinking = "on",
        window_pages: int = 0, prefill_window_pages: int = 0, step_tokens: int = 0,
    ) -> None:  # fmt: skip
        pools = (
            model.make_pool(
                prefill_pages, prefill_page_size or page_size, prefill_order or order,
                step_tokens=step_tokens or chunk_tokens, window_pages=prefill_window_pages,
                requests=32, checkpoints=(prefill or {}).get("checkpoints", 16),
            ),
            model.make_pool(
                pages, page_size, order, window_pages=window_pages, **self._computes(decode)
            ),
        )  # fmt: skip
        memory = [*pools, *(group.pool for pool in pools for group in pool.groups)]
        for pool in memory:  # what was never written must not matter
            for layer in range(pool.layout.num_layers):
                pool.k(layer).normal_(0, 3)
                pool.v(layer).normal_(0, 3)
        self.answers: list[Answer] = []
        with ExitStack() as closing:
            prefill_config = PrefillConfig(control=_CONTROL, **(prefill or {}))
            self.prefill = PrefillEngine(model, pools[0], prefill_config, chunk_tokens)
            closing.callback(self.prefill.close)
            given = {"reserve_tokens": 16, "waiting_timeout_s": 100 * NEVER_S} | (decode or {})
            config = DecodeConfig(control=_CONTROL, **given)
            self.decode = DecodeEngine(model, pools[1], config, tokenizer, thinking)
            closing.callback(self.decode.close)
            if config.compute is not None and config.compute.itl_share == BY_SIZE:
                self._choose_by_size(config.compute.below)
            for engine in (self.prefill, self.decode):
                for views in engine.states.views.values() if engine.states is not None else ():
                    for _, view in views:
                        view.normal_(0, 3)
            self.close = closing.pop_all().close

    def _choose_by_size(self, below: int) -> None:
        def is_here(missing: int, *_: Any, **__: Any) -> bool:
            return missing <= below

        self.decode.node.sources["computed"].rule.is_here = is_here  # type: ignore[method-assign]

    @staticmethod
    def _computes(decode: dict[str, Any] | None) -> dict[str, int]:
        """What decode's pool has to have for prompts that are computed there."""
        compute = (decode or {}).get("compute")
        if compute is None:
            return {}
        kept = (decode or {}).get("checkpoints", 16)
        return {"step_tokens": compute.chunk_tokens, "checkpoints": kept}

    def ask(self, rid: str, tokens: Any, **options: Any) -> Answer:
        ask = Generate(rid, np.asarray(tokens, np.int32), self.prefill.endpoint, **options)
        answer = Answer(ask)
        self.decode.submit(ask, answer)
        self.answers.append(answer)
        return answer

    def step(self) -> None:
        """One pass of both loops."""
        for job in self.decode.take_prefill_jobs():
            self.prefill.submit(job)
        going = self.prefill.step()
        if not (self.decode.step() or going):
            self.decode.wait(0.005)

    def until(self, done: Callable[[], object]) -> None:
        until(done, step=self.step, state=self.state, pause_s=0.0)

    def state(self) -> object:
        return self.decode.stats(), self.prefill.stats()

    def run(self) -> None:
        """Until all answers have ended: the patience is for each of them."""
        for answer in self.answers:
            self.until(lambda answer=answer: answer.done)

    def run_without_prefill(self) -> None:
        """Until all answers have ended; each job is given up."""

        def step() -> None:
            for job in self.decode.take_prefill_jobs():
                # Nothing is left to give up where the node has heard first that prefill left.
                self.decode.give_up_job(job, "prefill has gone")
            if not self.decode.step():
                self.decode.wait(0.005)

        until(lambda: all(answer.done for answer in self.answers), step=step)

    def at_rest(self) -> None:
        """All that lived has ended: nothing is held, and both books are whole."""
        self.until(lambda: self.decode.drain() and self.prefill.drain())
        for engine in (self.decode, self.prefill):
            engine.audit()
            stats = engine.stats()
            assert stats["pages_owned"] == stats["pages_held"] == stats["locks"] == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@cache
def family(name: str) -> tuple[PagedModel, Reference]:
    """A tiny model of `hybrid_models`."""
    made = make_model(config_of(name), seed=3, device=DEVICE)
    return made, Reference(made)


class Reference:
    """The model by itself, as transformers runs it."""

    def __init__(self, model: PagedModel) -> None:
        self.model = unpaged_copy(model)
        self.near = NEAR_WITH_STATES if model.layers.parts else NEAR

    @torch.inference_mode()
    def greedy(self, tokens: Any, num: int, said: Sequence[int] = ()) -> list[int]:
        """What `generate` says, and stops for no token.

        `said`: what may be that answer. One forward tells, where `generate` takes one for each
        token; it is asked where a token is not the likeliest.
        """
        if 0 < num == len(said):
            likeliest: list[int] = self.logits([*tokens, *said], num).argmax(-1).tolist()
            if likeliest == [*said]:
                return likeliest
        ids = torch.as_tensor(np.asarray(tokens, np.int64), device=self.model.device)[None]
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, min_new_tokens=num,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        found: list[int] = out[0, ids.shape[1] :].tolist()
        return found

    @torch.inference_mode()
    def logits(self, tokens: Any, num: int) -> np.ndarray[Any, Any]:
        """float64 [num, vocabulary]: what led to each of the last `num` of these tokens, in one
        forward."""
        ids = torch.as_tensor(np.asarray(tokens, np.int64), device=self.model.device)[None, :-1]
        kept: torch.Tensor = self.model(input_ids=ids, logits_to_keep=num).logits[0]
        return kept.double().cpu().numpy()

    def check_logprobs(self, tokens: Any, given: list[TokenLogprob | None], num_top: int) -> None:
        """The last of these tokens have the log-probabilities that are given, by one forward of
        all."""
        assert None not in given
        if not given:
            return
        tokens = np.asarray(tokens, np.int64)
        rows = torch.log_softmax(torch.from_numpy(self.logits(tokens, len(given))), -1).numpy()
        for token, one, row in zip(tokens[-len(given) :], given, rows, strict=True):
            assert one.token == token
            assert abs(one.logprob - row[token]) < self.near
            likely, values = zip(*one.top, strict=True) if one.top else ((), ())
            assert len({*likely}) == num_top
            assert list(values) == sorted(values, reverse=True)
            assert np.abs(row[list(likely)] - np.array(values)).max(initial=0) < self.near
            # No token that is missing is likelier than one that is there, but for rounding.
            assert (
                np.abs(np.sort(row)[::-1][:num_top] - np.array(values)).max(initial=0) < self.near
            )
            # A client compares the two numbers to see whether the token is the greedy one.
            assert all(value == one.logprob for other, value in one.top if other == token)

    def routes_by_rounding(self, tokens: Any) -> bool:
        """Whether rounding decides which experts one of these tokens goes to: two scores are alike
        but for their last bits. Everything behind such a token may differ by a little."""
        chosen = getattr(self.model.config, "num_experts_per_tok", 0)
        gaps: list[float] = []

        def look(_module: Any, _given: Any, said: Any) -> None:
            for scores in said if isinstance(said, tuple) else (said,):
                if scores.is_floating_point() and scores.shape[-1] > chosen:
                    ranked = scores.sort(-1, descending=True).values
                    gaps.append(float((ranked[..., chosen - 1] - ranked[..., chosen]).min()))

        routers = [one for one in self.model.modules() if type(one).__name__.endswith("Router")]
        hooks = [router.register_forward_hook(look) for router in routers]
        try:
            self.logits(tokens, 1)
        finally:
            for hook in hooks:
                hook.remove()
        return bool(gaps) and min(gaps) < 1e-6

    def is_near(self, tokens: Any, said: list[int], other: list[int]) -> bool:
        """Whether two answers part at a token where both are as likely, but for rounding."""
        at = next(i for i, pair in enumerate(zip(said, other, strict=False)) if len({*pair}) > 1)
        row = self.logits([*tokens, *said[: at + 1]], 1)[0]
        apart = abs(row[said[at]] - row[other[at]]), row.max() - row[said[at]]
        return bool(max(apart) < self.near)


def choose_plainly(
    logits: np.ndarray[Any, Any], sampling: Sampling, number: float
) -> tuple[int, float]:
    """The token that `number` in [0, 1) draws, written token by token, and how far the number is
    from drawing another."""
    if sampling.temperature == 0:
        best = np.sort(logits)
        return int(logits.argmax()), float(best[-1] - best[-2])
    scaled = logits / sampling.temperature
    shares = np.exp(scaled - scaled.max())
    shares /= shares.sum()
    order = sorted(range(len(shares)), key=lambda token: -shares[token])
    kept = order[: sampling.top_k] if sampling.top_k else order
    whole, total, nucleus = sum(shares[token] for token in kept), 0.0, []
    for token in kept:
        if total >= sampling.top_p * whole:
            break
        nucleus.append(token)
        total += shares[token]
    seen = 0.0
    for token in sorted(nucleus):
        before, seen = seen, seen + shares[token]
        if number * total < seen or token == max(nucleus):
            return token, min(number - before / total, seen / total - number)
    raise AssertionError("no token is left")
