"""The prefill worker: it computes prompts in chunks, several prompts per forward, and sends each
chunk as soon as it is computed.

One thread owns it: `submit` and `abort` as requests arrive, `step` while it returns True, `wait`
otherwise. `docs/engine.md` shows the loop.
"""

from __future__ import annotations

from typing import Any, Final

from prefixkv import KVPool, PrefillConfig, PrefillNode, PrefillRequest
from prefixkv.engines.hf.engine import NodeEngine
from prefixkv.engines.hf.layers import NO_SLOT
from prefixkv.engines.hf.models import PagedModel
from prefixkv.engines.hf.requests import Choice, PrefillJob, pack_first
from prefixkv.errors import RequestError
from prefixkv.settings import at_least

_AT_ONCE: Final = 16  # limit of prompts that are begun in one pass
_STATE_SLOTS: Final = 32  # most prompts with a state that are computed or on their way at once


class PrefillEngine(NodeEngine):
    """A model on a `PrefillNode`. Used from one thread. It owns the model from now on.

    Args:
        pool: made by `model.make_pool`; it must outlive the engine.
        config: its `model` is replaced by the model's identity. With recurrent layers or windows,
            `checkpoints` of 0 stands for `PagedModel.num_checkpoints`, where there is a `cache`.
        chunk_tokens: limit of tokens per forward, over all its prompts. Of one prompt it is also
            the `step_tokens` of the pool's window group.

    Raises ConfigError, as PrefillNode and FlatPool do.
    """

    node: PrefillNode
    side = "prefill"

    def __init__(
        self,
        model: PagedModel,
        pool: KVPool,
        config: PrefillConfig | None = None,
        chunk_tokens: int = 512,
    ) -> None:
        at_least(1, chunk_tokens=chunk_tokens)
        super().__init__(model, pool, chunk_tokens)
        self.chunk_tokens = chunk_tokens
        layout = pool.layout
        config = model.configured(config or PrefillConfig(), layout.num_pages, layout.page_size)
        # Slots of the states: the engine's, then those of the checkpoints.
        num_slots = min(_STATE_SLOTS, config.max_running)
        self._free_slots = list(range(num_slots))
        self._slots: dict[PrefillRequest, int] = {}  # until sent or failed: a write may read it
        if model.layers.parts:
            self.states = model.make_states(num_slots + config.checkpoints)
        state = None if self.states is None else self.states.pool
        self.node = PrefillNode(pool, config, state=state)
        self._jobs: dict[str, PrefillJob] = {}  # by id, until sent or failed
        self._counters = {"forwards": 0, "computed_tokens": 0}

    @property
    def endpoint(self) -> str:
        """Address for decode workers: `Generate.prefill`."""
        return self.node.endpoint

    def submit(self, job: PrefillJob) -> None:
        """Queue a job. Raises RequestError or TokenError for one that cannot be taken; decode is
        refused then, unless the job itself is malformed."""
        request = job.request()
        if why := self._why_refused(request.key):
            self.node.refuse(request, why)
            raise RequestError(f"request {job.rid!r}: {why}")
        self.node.add(request)
        self._jobs[job.rid] = job

    def abort(self, rid: str) -> bool:
        """End a job, and inform decode. False if it is unknown or has ended."""
        return self.node.abort(rid)

    def step(self) -> bool:
        """Make one pass, with at most one forward. Returns True if it computed something."""
        node = self.node
        waiting = sum(req.fill_len - done for req, done in self._computing.items())
        # 1. Begin prompts, but no more than the next forward needs: a prompt that has not begun
        # holds no pages, and may find more in the cache later. Called at every pass, with a limit
        # of 0 too, since the node moves computed pages into the cache there.
        limit = 0 if waiting >= self.chunk_tokens else _AT_ONCE
        if self.states is not None:
            limit = min(limit, len(self._free_slots))
        for req in node.pop_bootstrapped(limit):
            self._computing[req] = req.prefix_len
            if self.states is not None:
                self._slots[req] = self._free_slots.pop()
        # 2. Forget those that ended. The event stands after all work that was launched for the
        # failed ones; their pages are free only when it is over.
        freed = False
        for req in [*node.pop_failed(self.model.event()), *node.pop_sent()]:
            self._computing.pop(req, None)
            if req in self._slots:
                self._free_slots.append(self._slots.pop(req))
                freed = True
            del self._jobs[req.rid]
        if not (work := self._next_chunks(self.chunk_tokens)):
            return freed  # a prompt may have waited for the slot
        # 3. Compute, and send a chunk of each. The last one carries the first token, so that decode
        # can continue at once; or none, where decode knows it, or computes the end itself.
        work, event = self._compute(work)
        self._counters["forwards"] += 1
        for one in work:
            req, row, aux = one.req, one.row, b""
            last = row.end == req.fill_len
            if last:
                del self._computing[req]
                token, logprob = one.drawn or (0, None)
                aux = pack_first(token, req.prefix_len, logprob)
            else:
                self._computing[req] = row.end
            self._counters["computed_tokens"] += len(row.tokens)
            node.send_chunk(req, row.end, last, aux, event, row.slot if last else NO_SLOT)
        return True

    def _slot(self, req: Any) -> int:
        return self._slots[req]

    def _first_choice(self, req: Any) -> Choice | None:
        job = self._jobs[req.rid]
        return None if job.is_known else job.choice

    def _fail(self, req: Any, error: Exception, _after: object) -> None:
        self.node.fail(req.rid, error)

    def stats(self) -> dict[str, int]:
        """Return the node's counters, "forwards", "computed_tokens" and "computing" (prompts)."""
        return {**self.node.stats(), **self._counters, "computing": len(self._computing)}
