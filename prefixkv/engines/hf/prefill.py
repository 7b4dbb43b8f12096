"""The prefill worker: it computes prompts in chunks, several prompts per forward, and sends each
chunk as soon as it is computed.

One thread owns an engine and calls it: `submit` and `abort` as requests arrive, `step` while it
returns True, `wait` otherwise. `docs/engine.md` shows the loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from prefixkv import KVPool, PrefillConfig, PrefillNode, PrefillRequest
from prefixkv.engines.hf.attention import FlatPool
from prefixkv.engines.hf.identity import with_model
from prefixkv.engines.hf.models import PagedModel
from prefixkv.engines.hf.requests import PrefillJob, pack_first
from prefixkv.engines.hf.sampling import choose
from prefixkv.spi import RequestError, at_least

_AT_ONCE: Final = 16  # limit of prompts that are begun in one pass
_IDLE_S: Final = 0.1  # longest rest, after which deadlines are checked


@dataclass(slots=True, eq=False)
class _Computing:
    """A prompt with computed KV up to token `done`; up to `hit_tokens` it was cached."""

    req: PrefillRequest
    job: PrefillJob
    done: int
    hit_tokens: int


class PrefillEngine:
    """A model on a `PrefillNode`. Used from one thread.

    Args:
        model: the model; it belongs to this engine from now on.
        pool: the KV memory, made by `model.make_pool`; it must outlive the engine.
        config: the node's. Its `model` is replaced by the model's identity.
        chunk_tokens: limit of tokens per forward, over all its prompts.

    Raises: ConfigError, as PrefillNode and FlatPool do.
    """

    def __init__(
        self,
        model: PagedModel,
        pool: KVPool,
        config: PrefillConfig | None = None,
        chunk_tokens: int = 512,
    ) -> None:
        at_least(1, chunk_tokens=chunk_tokens)
        self.model = model
        self.chunk_tokens = chunk_tokens
        self._flat = FlatPool(pool)
        config = with_model(config or PrefillConfig(), model.identity, model.name)
        self.node = PrefillNode(pool, config)
        self._jobs: dict[str, PrefillJob] = {}  # by id, until sent or failed
        self._computing: dict[PrefillRequest, _Computing] = {}  # in order of arrival
        self._counters = {"forwards": 0, "computed_tokens": 0}

    @property
    def endpoint(self) -> str:
        """Address of the HF prefill engine for decode workers: `Generate.prefill`."""
        return self.node.endpoint

    def submit(self, job: PrefillJob) -> None:
        """Queue a decode worker's job on the HF prefill engine.

        Raises RequestError or TokenError for one that cannot be taken. Decode is refused then,
        unless the job itself is malformed.
        """
        # The checks are on what a client sent; a bad token would index outside of the embedding.
        request = job.request()
        why = ""
        if len(request.key) > self.model.context:
            why = f"{len(request.key)} tokens, the model takes {self.model.context}"
        elif int(np.max(job.tokens)) >= self.model.vocab_size:
            why = f"token {np.max(job.tokens)}, the vocabulary has {self.model.vocab_size}"
        if why:
            self.node.refuse(request, why)
            raise RequestError(f"request {job.rid!r}: {why}")
        self.node.add(request)
        self._jobs[job.rid] = job

    def abort(self, rid: str) -> bool:
        """End a job of the HF prefill engine, and inform decode.

        Returns False if it is unknown or has ended.
        """
        return self.node.abort(rid)

    def step(self) -> bool:
        """Make one pass of the HF prefill engine, with at most one forward.

        Returns True if it computed something.
        """
        node = self.node
        waiting = sum(one.req.num_tokens - one.done for one in self._computing.values())
        # 1. Begin prompts, but no more than the next forward needs: a prompt that has not begun
        # holds no pages, and may find more in the cache later. Called at every pass, with a limit
        # of 0 too, since the node moves computed pages into the cache there.
        for req in node.pop_bootstrapped(0 if waiting >= self.chunk_tokens else _AT_ONCE):
            self._computing[req] = _Computing(
                req, self._jobs[req.rid], req.prefix_len, req.prefix_len
            )
        # 2. Forget those that ended. The event stands after all work that was launched for the
        # failed ones; their pages are free only when it is over.
        for req in [*node.pop_failed(self.model.event()), *node.pop_sent()]:
            self._computing.pop(req, None)
            del self._jobs[req.rid]
        if not self._computing:
            return False
        self._compute()
        return True

    def _compute(self) -> None:
        """Run the HF model once over the oldest prompts; send a chunk of each to decode."""
        # 1. The oldest prompts first, each as far as the budget goes. `parts` has the end of each.
        parts: list[tuple[_Computing, int]] = []
        left = self.chunk_tokens
        for one in self._computing.values():
            end = min(one.done + left, one.req.num_tokens)
            parts.append((one, end))
            left -= end - one.done
            if not left:
                break
        # 2. Forward. Only a completed prompt needs logits, unless decode knows its next token.
        ends = [end for _, end in parts]
        sampled = [
            i for i, (one, end) in enumerate(parts)
            if end == one.req.num_tokens and not one.job.is_known
        ]  # fmt: skip
        logits = self.model.forward(
            self._flat,
            np.concatenate([one.job.tokens[one.done : end] for one, end in parts]),
            [one.req.pages for one, _ in parts],
            [one.done for one, _ in parts],
            ends,
            sampled,
        )
        # 3. The event stands before the work of sampling, for which the sends need not wait.
        ready = self.model.event()
        choices = [parts[i][0].job.choice for i in sampled]
        firsts = choose(logits, choices, self.model.end_tokens) if sampled else []
        tokens = dict(zip(sampled, firsts, strict=True))
        self._counters["forwards"] += 1
        # 4. Send. The last chunk carries the first token, so that decode can continue at once.
        for i, (one, end) in enumerate(parts):
            last = end == one.req.num_tokens
            aux = pack_first(tokens[i], one.hit_tokens) if i in tokens else b""
            self._counters["computed_tokens"] += end - one.done
            self.node.send_chunk(one.req, end, last, aux, ready)
            one.done = end
            if last:
                del self._computing[one.req]

    def wait(self, timeout_s: float) -> bool:
        """Wait until the HF prefill engine may have something to do in `step`, at most `timeout_s`.

        Returns True if so.
        """
        return bool(self._computing) or self.node.wait(timeout_s)

    def fileno(self) -> int:
        """Return the HF prefill engine's descriptor for a poller, while `step` is False.

        See `PrefillNode`.
        """
        return self.node.fileno()

    @property
    def idle_s(self) -> float:
        """Longest time in seconds that a poller may wait for the HF prefill engine."""
        return _IDLE_S

    def drain(self, timeout_s: float = 0.0) -> bool:
        """Take no more jobs on the HF prefill engine. Returns True once all have ended.

        Call `step` and this until then.
        """
        return self.node.drain(0.0 if self._computing else timeout_s)

    def stats(self) -> dict[str, int]:
        """Return the counters of the HF prefill engine and its node.

        "forwards", "computed_tokens" and "computing" (prompts) are the engine's.
        """
        return {**self.node.stats(), **self._counters, "computing": len(self._computing)}

    def audit(self) -> None:
        """Check every law of the HF prefill engine's node. Slow. Raises InternalError."""
        self.node.audit()

    def close(self) -> None:
        """End all threads of the HF prefill engine's node. Idempotent."""
        self.node.close()
