"""The prefill worker: it computes prompts in chunks, several prompts per forward, and sends each
chunk as soon as it is computed.

One thread owns it: `submit` and `abort` as requests arrive, `step` while it returns True, `wait`
otherwise. `docs/engine.md` shows the loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from prefixkv import KVPool, NotFiniteError, PrefillConfig, PrefillNode, PrefillRequest
from prefixkv.engines.hf.loop import NodeEngine
from prefixkv.engines.hf.models import PagedModel
from prefixkv.engines.hf.recurrent import NO_SLOT, StateMemory, StateRows
from prefixkv.engines.hf.requests import PrefillJob, pack_first
from prefixkv.engines.hf.sampling import choose, chosen_logprobs
from prefixkv.errors import RequestError
from prefixkv.settings import at_least

_AT_ONCE: Final = 16  # limit of prompts that are begun in one pass
_IDLE_S: Final = 0.1  # longest rest, after which deadlines are checked
_STATE_SLOTS: Final = 32  # most prompts with a state that are computed or on their way at once


@dataclass(slots=True, eq=False)
class _Computing:
    """A prompt with KV up to token `done`; up to `hit_tokens` it was cached. With recurrent layers
    `source` is the slot with the state behind `done`, `slot` the one for the next."""

    req: PrefillRequest
    job: PrefillJob
    done: int
    hit_tokens: int
    source: int = NO_SLOT
    slot: int = NO_SLOT

    def chunk_end(self, limit: int, window: int) -> int:
        """Return where a forward of at most `limit` tokens ends: with a window where a checkpoint
        is kept no later, since windows are those at a chunk's end."""
        end = min(self.done + limit, self.req.num_tokens)
        if window:
            end = next((at for at in self.req.stops if self.done < at <= end), end)
        return end


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
        self._flat = model.flat_pool(pool)
        layout = pool.layout
        config = model.configured(config or PrefillConfig(), layout.num_pages, layout.page_size)
        # Slots of the states: the engine's, then those of the checkpoints.
        self.states: StateMemory | None = None
        self._free_slots: list[int] = []
        # Most tokens of one prompt per forward.
        self._step_tokens = min([chunk_tokens, *(group.step_tokens for group in pool.groups)])
        if model.has_states:
            num_slots = min(_STATE_SLOTS, config.max_running)
            self.states = model.make_states(num_slots + config.checkpoints)
            self._free_slots = list(range(num_slots))
        self._slots: dict[PrefillRequest, int] = {}  # until sent or failed: a write may read it
        state = None if self.states is None else self.states.pool
        self.node = PrefillNode(pool, config, state=state)
        self._jobs: dict[str, PrefillJob] = {}  # by id, until sent or failed
        self._computing: dict[PrefillRequest, _Computing] = {}  # in order of arrival
        self._counters = {"forwards": 0, "computed_tokens": 0}

    @property
    def endpoint(self) -> str:
        """Address for decode workers: `Generate.prefill`."""
        return self.node.endpoint

    def submit(self, job: PrefillJob) -> None:
        """Queue a job. Raises RequestError or TokenError for one that cannot be taken; decode is
        refused then, unless the job itself is malformed."""
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
        """End a job, and inform decode. False if it is unknown or has ended."""
        return self.node.abort(rid)

    def step(self) -> bool:
        """Make one pass, with at most one forward. Returns True if it computed something."""
        node = self.node
        waiting = sum(one.req.num_tokens - one.done for one in self._computing.values())
        # 1. Begin prompts, but no more than the next forward needs: a prompt that has not begun
        # holds no pages, and may find more in the cache later. Called at every pass, with a limit
        # of 0 too, since the node moves computed pages into the cache there.
        limit = 0 if waiting >= self.chunk_tokens else _AT_ONCE
        if self.states is not None:
            limit = min(limit, len(self._free_slots))
        for req in node.pop_bootstrapped(limit):
            self._begin(req)
        # 2. Forget those that ended. The event stands after all work that was launched for the
        # failed ones; their pages are free only when it is over.
        freed = False
        for req in [*node.pop_failed(self.model.event()), *node.pop_sent()]:
            self._computing.pop(req, None)
            if req in self._slots:
                self._free_slots.append(self._slots.pop(req))
                freed = True
            del self._jobs[req.rid]
        if not self._computing:
            return freed  # a prompt may have waited for the slot
        self._compute()
        return True

    def _begin(self, req: PrefillRequest) -> None:
        one = _Computing(req, self._jobs[req.rid], req.prefix_len, req.prefix_len)
        if self.states is not None:
            one.slot = self._slots[req] = self._free_slots.pop()
            one.source = req.checkpoint_slot  # only read: it may be another prompt's too
        self._computing[req] = one

    def _compute(self) -> None:
        """Run the model over the oldest prompts; send a chunk of each."""
        # 1. The oldest prompts first, each as far as the budget goes. `parts` has the end of each.
        parts: list[tuple[_Computing, int]] = []
        left = self.chunk_tokens
        for one in self._computing.values():
            end = one.chunk_end(min(left, self._step_tokens), self.model.window)
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
        starts = [one.done for one, _ in parts]
        not_finite: list[int] = []
        logits = self.model.forward(
            self._flat,
            np.concatenate([
                one.job.tokens[start:end] for (one, end), start in zip(parts, starts, strict=True)
            ]),
            [one.req.pages for one, _ in parts],
            starts,
            ends,
            sampled,
            states=self._state_rows(parts),
            windows=self.model.window_pages(one.req for one, _ in parts),
            not_finite=not_finite,
        )  # fmt: skip
        # Before anything of it is handed over: those end whose numbers are not finite.
        for i in not_finite:
            rid = parts[i][0].req.rid
            error = NotFiniteError(f"prefill computed NaN or infinity for request {rid!r}")
            self.node.fail(rid, error)
        # 3. The event stands before the work of sampling, for which the sends need not wait.
        ready = self.model.event()
        rows = [row for row, i in enumerate(sampled) if i not in not_finite]
        ended = [sampled[row] for row in rows]
        choices = [parts[i][0].job.choice for i in ended]
        chosen = choose(logits[rows], choices, self.model.end_tokens)
        firsts = zip(chosen, chosen_logprobs(logits[rows], chosen, choices), strict=True)
        tokens = dict(zip(ended, firsts, strict=True))
        self._counters["forwards"] += 1
        # 4. Send. The last chunk carries the first token, so that decode can continue at once.
        for i, (one, end) in enumerate(parts):
            if i in not_finite:
                continue
            last = end == one.req.num_tokens
            aux = pack_first(tokens[i][0], one.hit_tokens, tokens[i][1]) if i in tokens else b""
            if last and not aux:  # decode knows the token, or computes the end itself
                aux = pack_first(0, one.hit_tokens)
            self._counters["computed_tokens"] += end - starts[i]
            self.node.send_chunk(one.req, end, last, aux, ready, one.slot if last else NO_SLOT)
            one.done = end
            if last:
                del self._computing[one.req]

    def _state_rows(self, parts: list[tuple[_Computing, int]]) -> StateRows | None:
        """Return the prompts' states, and where they are saved as checkpoints; None without any."""
        if self.states is None:
            return None
        # The slots are asked for before the forward: once a chunk is sent its stops are over.
        saves: dict[int, dict[int, int]] = {}
        for i, (one, end) in enumerate(parts):
            for at in [at for at in one.req.stops if one.done < at <= end]:
                slot = self.node.save_state(one.req, at)
                if slot != NO_SLOT:
                    saves.setdefault(i, {})[at] = slot
        sources = [one.source for one, _ in parts]
        for one, _ in parts:
            one.source = one.slot
        return StateRows(self.states, sources, [one.slot for one, _ in parts], saves)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until `step` may have something to do. Returns True if so."""
        return bool(self._computing) or self.node.wait(timeout_s)

    @property
    def idle_s(self) -> float:
        """Longest time in seconds that a poller may wait."""
        return _IDLE_S

    def drain(self, timeout_s: float = 0.0) -> bool:
        """Take no more jobs. Call `step` and this until it returns True: all have ended."""
        return self.node.drain(0.0 if self._computing else timeout_s)

    def stats(self) -> dict[str, int]:
        """Return the node's counters, "forwards", "computed_tokens" and "computing" (prompts)."""
        return {**self.node.stats(), **self._counters, "computing": len(self._computing)}
