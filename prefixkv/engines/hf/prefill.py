"""The prefill worker: prompts computed in chunks, several in one forward, each chunk sent as it is
done.

One thread owns an engine and calls it: `submit` and `abort` as they come, `step` as long as it
says that there is more, `wait` in between. `docs/engine.md` shows the loop.
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

_AT_ONCE: Final = 16  # prompts that are begun in one pass
_IDLE_S: Final = 0.1  # deadlines are looked at


@dataclass(slots=True, eq=False)
class _Computing:
    """A prompt whose KV is there up to token `done`; it was up to `hit_tokens` when it began."""

    req: PrefillRequest
    job: PrefillJob
    done: int
    hit_tokens: int


class PrefillEngine:
    """A model on a `PrefillNode`. Used from one thread.

    Args:
        model: computes; it belongs to this engine from now on.
        pool: the KV memory, as `model.make_pool` makes it; it must outlive the engine.
        config: of the node. Its `model` is replaced by the model's identity.
        chunk_tokens: the most tokens of one forward, over all its prompts.

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
        self._jobs: dict[str, PrefillJob] = {}
        self._computing: dict[PrefillRequest, _Computing] = {}  # first come, first computed
        self._counters = {"forwards": 0, "computed_tokens": 0}

    @property
    def endpoint(self) -> str:
        """Where decode workers find it: `Generate.prefill`."""
        return self.node.endpoint

    def submit(self, job: PrefillJob) -> None:
        """Take a job. Raises RequestError or TokenError for one that cannot be taken; decode is
        told where its room is known."""
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
        """End a job; decode is told. False if it is unknown or has ended."""
        return self.node.abort(rid)

    def step(self) -> bool:
        """One pass: at most one forward. True if there was something to compute."""
        node = self.node
        waiting = sum(one.req.num_tokens - one.done for one in self._computing.values())
        # Called at every pass: what is computed goes to the cache there. What is not begun yet
        # holds no pages, and may find more in the cache later.
        for req in node.pop_bootstrapped(0 if waiting >= self.chunk_tokens else _AT_ONCE):
            self._computing[req] = _Computing(
                req, self._jobs[req.rid], req.prefix_len, req.prefix_len
            )
        # What was launched for those that failed has ended with this event.
        for req in [*node.pop_failed(self.model.event()), *node.pop_sent()]:
            self._computing.pop(req, None)
            del self._jobs[req.rid]
        if not self._computing:
            return False
        self._compute()
        return True

    def _compute(self) -> None:
        """One forward over the oldest prompts, and a chunk of each to decode."""
        parts: list[tuple[_Computing, int]] = []  # and up to which token
        left = self.chunk_tokens
        for one in self._computing.values():
            end = min(one.done + left, one.req.num_tokens)
            parts.append((one, end))
            left -= end - one.done
            if not left:
                break
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
        ready = self.model.event()
        firsts = choose(logits, [parts[i][0].job.choice for i in sampled]) if sampled else []
        tokens = dict(zip(sampled, firsts, strict=True))
        self._counters["forwards"] += 1
        for i, (one, end) in enumerate(parts):
            last = end == one.req.num_tokens
            aux = pack_first(tokens[i], one.hit_tokens) if i in tokens else b""
            self._counters["computed_tokens"] += end - one.done
            self.node.send_chunk(one.req, end, last, aux, ready)
            one.done = end
            if last:
                del self._computing[one.req]

    def wait(self, timeout_s: float) -> bool:
        """Until `step` may have something to do, at most `timeout_s`. True if it may."""
        return bool(self._computing) or self.node.wait(timeout_s)

    def fileno(self) -> int:
        """As `PrefillNode.fileno`: for a poller of the caller's, while `step` is False."""
        return self.node.fileno()

    @property
    def idle_s(self) -> float:
        """The longest that a poller may wait then."""
        return _IDLE_S

    def drain(self, timeout_s: float = 0.0) -> bool:
        """Take no more jobs; True once all have ended. Call `step` and this until then."""
        return self.node.drain(0.0 if self._computing else timeout_s)

    def stats(self) -> dict[str, int]:
        """The node's, with "forwards", "computed_tokens" and "computing" (prompts)."""
        return {**self.node.stats(), **self._counters, "computing": len(self._computing)}

    def audit(self) -> None:
        """Check every law of the node. Slow. Raises InternalError."""
        self.node.audit()

    def close(self) -> None:
        """End all threads. Again: no-op."""
        self.node.close()
