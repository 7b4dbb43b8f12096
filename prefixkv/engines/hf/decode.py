"""The decode worker: one token per answer and step, all answers in one forward. With
`DecodeConfig.compute` it also computes prompts of which little is missing, in chunks.

One thread owns it: `submit` and `abort` as requests arrive, `step` while it returns True, `wait`
otherwise. `docs/engine.md` shows the loop.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from msgspec import structs

from prefixkv import (
    DecodeConfig,
    DecodeNode,
    DecodeRequest,
    KVPool,
    OutOfPagesError,
    PrefillAsk,
    PrefixKVError,
    Request,
)
from prefixkv.engines.hf.engine import NodeEngine, Work
from prefixkv.engines.hf.layers import Row
from prefixkv.engines.hf.models import PagedModel
from prefixkv.engines.hf.requests import (
    Choice,
    Finish,
    Generate,
    Output,
    PrefillJob,
    Sampling,
    TokenLogprob,
    pack_first,
    unpack_first,
)
from prefixkv.engines.hf.text import AnswerText, KeepThinking, Markers
from prefixkv.errors import ConfigError, RequestError
from prefixkv.spi import MAX_INDEX, DeviceEvent, secret_number, whole_number

OnOutput = Callable[[Output], None]

_BLOCKED_S: Final = 0.01  # rest while pages are missing that come back by themselves
_MOST_WAITING: Final = 16  # held samples that wait for their first token, divided among requests
_MOST_ON_CPU: Final = 16  # samples of one request that are begun on a CPU at once
_AT_ONCE: Final = 4  # samples of one request that may wait in any case
_LEAST_S: Final = 0.001  # deadline of a sample whose time was over while it was held


@dataclass(slots=True, eq=False)
class _Asked:
    """A client's request. Its samples from `next_sample` on are held, and not on the node yet;
    `waiting` are on the node without a token. `left` samples have not ended."""

    ask: Generate
    on_output: OnOutput
    ends: frozenset[int]  # tokens that end an answer
    left: int
    begun_s: float = field(default_factory=time.monotonic)
    next_sample: int = 0
    has_token: bool = False  # of any sample
    waiting: list[DecodeRequest] = field(default_factory=list)

    @property
    def holds_samples(self) -> bool:
        return self.next_sample < self.ask.num_samples


@dataclass(slots=True, eq=False)
class _Answer:
    asked: _Asked
    choice: Choice  # the choice of its first token
    text: AnswerText | None
    aborted: bool = False  # by its client
    prefill_hit_tokens: int = 0


class DecodeEngine(NodeEngine):
    """A model on a `DecodeNode`. Used from one thread. It owns the model from now on.

    Of a request with many samples, later ones are held here until earlier ones have a token; on a
    CPU until all but 15 have ended. So nobody waits behind all of them, or for forwards of them.

    Args:
        pool: made by `model.make_pool`; it must outlive the engine.
        config: its `model` is replaced by the model's identity. With `compute`, `ask` is "late".
        tokenizer: from `load_tokenizer`: outputs then have text, and strings may end them.
        thinking: "on" or "off": whether the KV of a model's thinking is cached. The tokenizer's
            markers say where it begins; without any all is cached.
        shared_states: True to have the states of recurrent layers in memory that prefill may map.

    `states`, for recurrent layers, has a slot per request in transfer or running, and with
    `compute` those of `checkpoints` behind; 0 of them stands for as many as on prefill.

    Raises ConfigError, as DecodeNode and FlatPool do, or for settings that the model cannot have.
    """

    node: DecodeNode
    side = "decode"

    def __init__(
        self, model: PagedModel, pool: KVPool, config: DecodeConfig | None = None,
        tokenizer: Any = None, thinking: KeepThinking = "on", shared_states: bool = False,
    ) -> None:  # fmt: skip
        num_pages, page_size = pool.layout.num_pages, pool.layout.page_size
        super().__init__(model, pool, num_pages * page_size)
        self._tokenizer = tokenizer
        config = model.configured(config or DecodeConfig(), num_pages, page_size)
        self._computes = config.compute is not None
        if config.compute is not None:
            config = replace(config, compute=replace(config.compute, ask="late"))
        if model.layers.parts:
            num_slots = min(config.max_running, num_pages) + config.checkpoints
            self.states = model.make_states(num_slots, shared_states)
        if thinking not in ("on", "off"):
            raise ConfigError(f"thinking is {thinking!r}, must be on or off")
        # Of thinking that is left out of the cache; None: all is kept.
        self._markers: Markers | None = None
        if thinking == "off" and tokenizer is not None:
            self._markers = Markers(tokenizer)
        # Last of what may raise: it has threads.
        state = None if self.states is None else self.states.pool
        self.node = DecodeNode(pool, config, state=state)
        self._asked: dict[str, _Asked] = {}  # by the client's id
        self._held: list[_Asked] = []  # those whose samples are not all on the node
        self._answers: dict[str, _Answer] = {}  # by the node's id of the request
        self._outputs: list[tuple[OnOutput, Output]] = []  # that the end of `step` reports
        # Requests with all their KV here but the newest token's: one forward each step.
        self._running: list[DecodeRequest] = []
        # Tokens that are not appended yet, with their log-probabilities. Not empty between two
        # steps only where pages are missing: then no forward runs until they are appended.
        self._sampled: list[tuple[DecodeRequest, int, TokenLogprob | None]] = []
        self._jobs: list[PrefillJob] = []
        # A former life of this worker may still have rooms on prefill, so no number is used twice.
        self._rooms = secret_number()
        self._counters = {
            "steps": 0, "tokens": 0, "retractions": 0, "blocked_steps": 0,
            "thinking_tokens_left_out": 0,
        }  # fmt: skip

    # --- what a client asks -----------------------------------------------------------------------

    def submit(self, ask: Generate, on_output: OnOutput) -> None:
        """Begin to answer a prompt. `on_output` gets every token, and each answer's end once.

        It is called at the end of `step`; it may call `submit` and `abort`, and must not raise.
        Raises RequestError, TokenError or DrainingError, with nothing changed.
        """
        if not isinstance(ask.rid, str) or "/" in ask.rid:
            raise RequestError(f'rid is {ask.rid!r}, a string without "/" is needed')
        if ask.rid in self._asked:
            raise RequestError(f"request {ask.rid!r} is here already")
        if not isinstance(ask.sampling, Sampling):
            raise RequestError(f"sampling is {ask.sampling!r}, a Sampling is needed")
        if ask.sampling.stop and self._tokenizer is None:
            raise RequestError("stop strings need an engine with a tokenizer")
        ends = ask.sampling.ends(self.model.end_tokens)
        if ask.sampling.min_tokens and len(ends) >= self.model.vocab_size:
            raise RequestError("every token ends the answer, so it cannot have min_tokens")
        whole_number("num_samples", ask.num_samples, 1, 1025)
        asked = _Asked(ask, on_output, ends, left=ask.num_samples)
        self._add_sample(asked)
        self._asked[ask.rid] = asked
        if asked.holds_samples:
            self._held.append(asked)

    def _add_sample(self, asked: _Asked) -> None:
        """Raises as `submit` does; the sample is not held in any case."""
        ask, sample = asked.ask, asked.next_sample
        asked.next_sample += 1
        deadline_s = ask.deadline_s
        if deadline_s is not None:
            deadline_s = max(deadline_s - (time.monotonic() - asked.begun_s), _LEAST_S)
        request = Request(
            f"{ask.rid}/{sample}", ask.tokens, ask.max_new_tokens, room=self._rooms,
            prefill=ask.prefill, namespace=ask.namespace, cacheable=ask.cacheable,
            priority=ask.priority, deadline_s=deadline_s, hints=ask.hints,
        )  # fmt: skip
        if why := self._why_refused(request.key, ask.max_new_tokens):
            raise RequestError(why)
        choice = Choice(ask.sampling, ask.sampling.seeded(ask.rid), sample)
        req = self.node.add(request)
        self._rooms += 1
        text = self._tokenizer and AnswerText(
            self._tokenizer, ask.sampling.stop, request.key.tokens()
        )
        self._answers[req.rid] = _Answer(asked, choice, text)
        asked.waiting.append(req)
        # Else the node asks for it, if this engine does not compute it.
        if not self._computes:
            self._queue_job(PrefillAsk(req, self.node.peer_id.name, req.prompt_len))

    def _add_held(self, draining: bool = False) -> None:
        """Add held samples while few of their request wait; all of them for a drain. So a worker
        that stands still holds up its own alone. O(requests)."""
        silent = Counter(one.ask.prefill for one in self._asked.values() if not one.has_token)
        share = max(_AT_ONCE, _MOST_WAITING // max(1, len(self._held)))
        # A forward on a CPU takes longer for each: none ends sooner, and other requests wait.
        most = _MOST_ON_CPU if self.model.device.type == "cpu" else MAX_INDEX
        for asked in self._held:
            asked.waiting = [r for r in asked.waiting if not r.output and not r.state.ended]
            # Others may overtake a request that waits for its first token: let them be few.
            is_late = silent[asked.ask.prefill] > (not asked.has_token)
            num_begun = asked.left + asked.next_sample - asked.ask.num_samples - len(asked.waiting)
            at_once = MAX_INDEX if draining else min(1 if is_late else share, most - num_begun)
            while asked.holds_samples and len(asked.waiting) < at_once:
                try:
                    self._add_sample(asked)
                except PrefixKVError as error:
                    self._end_held(asked, "error", error)
        self._held = [asked for asked in self._held if asked.holds_samples]

    def _end_held(self, asked: _Asked, finish: Finish, error: Exception | None = None) -> None:
        """End the sample that was held last, and is no more."""
        sample = asked.next_sample - 1
        self._report(asked, Output(sample, finish=finish, rid=asked.ask.rid, error=error))

    def abort(self, rid: str) -> bool:
        """End all answers; the next `step` reports it. False if unknown or ended."""
        if (asked := self._asked.get(rid)) is None:
            return False
        # The node must not reuse their pages before the device has finished with them.
        after = self.model.event()
        for sample in range(asked.next_sample):
            if (answer := self._answers.get(f"{rid}/{sample}")) is not None:
                answer.aborted = True
                self.node.abort(f"{rid}/{sample}", after)
        while asked.holds_samples:
            asked.next_sample += 1
            self._end_held(asked, "abort")
        return True

    def take_prefill_jobs(self) -> list[PrefillJob]:
        """Return the new jobs; the caller brings each to the `PrefillEngine` at `job.prefill`."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def give_up_job(self, job: PrefillJob, reason: str) -> bool:
        """Tell that a job did not reach its prefill worker, or was refused there: it is tried
        again, computed here, or its answer fails, as the config says. False if the answer has
        ended, or the job is not its last attempt."""
        req = self.node.requests.get(job.answer_rid)
        if req is None or req.generation != job.generation:
            return False
        return self.node.give_up_prefill(req.rid, reason)

    # --- the loop ---------------------------------------------------------------------------------

    def step(self) -> bool:
        """Take in arrivals and run one forward of all answers. True if there was work to do."""
        # Clients are called at the end, since they may call `submit` and `abort`, which change the
        # state that a pass iterates over; and also after an error, so that no token is lost.
        try:
            return self._step()
        finally:
            outputs, self._outputs = self._outputs, []
            for on_output, output in outputs:
                on_output(output)

    def _step(self) -> bool:
        # 1. Take in what the node has: admissions, retries, arrivals, failures.
        node = self.node
        if self._held:
            self._add_held()
        node.pop_preallocated()
        for ask in node.pop_needs_prefill():
            self._queue_job(ask)
        arrived = node.pop_transferred()
        for req in arrived:
            self._begin(req)
        for req in node.pop_local():
            self._begin_local(req)
        # The event stands behind all chunks of those that failed.
        for req in node.pop_failed(self.model.event() if self._computing else None):
            self._failed(req)
        # 2. Append first tokens, and tokens that had no page at the last step: the forward needs
        # each request's newest token, and a page for its KV.
        if self._sampled and not self._append():
            return False
        # 3. One forward. An aborted request's pages may belong to another request by now.
        self._running = [req for req in self._running if not req.state.ended]
        if not self._running and not self._computing:
            return bool(arrived or self._outputs or self._jobs)
        self._forward()
        self._append()
        return True

    def _begin_local(self, req: DecodeRequest) -> None:
        if req.prefix_len < req.fill_len:
            self._computing[req] = req.prefix_len
            if not req.resumed:
                self._answers[req.rid].prefill_hit_tokens = 0  # those of an attempt before this one
                # Prefill has sent all but the end, and knew the token behind that.
                if req.aux:
                    self._read_first(req, req.prefix_len, None)
            return
        # It lacks no KV: its window is there, or its state in a checkpoint.
        if self.states is not None:
            self.states.copy([(req.checkpoint_slot, req.state_slot)])
        self.node.computed(req, req.fill_len, after=self.model.event())
        for whole in self.node.pop_transferred():
            self._begin(whole)

    def _begin(self, req: DecodeRequest) -> None:
        # A resumed one continues from its newest token, which decode knows already.
        if not req.resumed:
            num_top = self._answers[req.rid].choice.sampling.logprobs
            self._sampled += self._read_first(req, req.prompt_len, num_top)
        self._running.append(req)

    def _read_first(
        self, req: DecodeRequest, prompt_len: int, num_top: int | None
    ) -> list[tuple[DecodeRequest, int, TokenLogprob | None]]:
        """Return the first token that came with the KV; none for bytes that are no token, with
        which the request has failed."""
        try:
            token, hit_tokens, logprob = unpack_first(
                req.aux, self.model.vocab_size, prompt_len, num_top
            )
        except ValueError as error:
            self._fail(req, error, self.model.event())
            return []
        self._answers[req.rid].prefill_hit_tokens = hit_tokens
        return [(req, token, logprob)]

    def _forward(self) -> None:
        """Write each newest token's KV and the chunks', and sample the next tokens."""
        if self.states is not None:  # a step replaces each state in its slot
            self.states.copy(self.node.save_states(self._running))
        chunks = self._next_chunks(self.node.chunk_tokens) if self._computing else []
        work = [self._next_token(req) for req in self._running] + chunks
        if not work:  # the prompts failed with the last append, or have to wait
            return
        self._counters["steps"] += bool(self._running)
        work, event = self._compute(work)
        for one in work:
            req = one.req
            if req not in self._computing:
                assert one.drawn is not None
                self._sampled.append((req, *one.drawn))
                continue
            # A first token takes the way of those that prefill sends.
            aux = b""
            self._computing[req] = one.row.end
            if one.drawn is not None:
                token, logprob = one.drawn
                aux = pack_first(token, self._answers[req.rid].prefill_hit_tokens, logprob)
            if one.row.end == req.fill_len:
                del self._computing[req]
            self.node.computed(req, one.row.end, aux, event)
        # What is whole now runs, and its first token goes out with this pass.
        if chunks:
            for req in self.node.pop_transferred():
                self._begin(req)

    def _next_token(self, req: DecodeRequest) -> Work:
        choice = structs.replace(self._answers[req.rid].choice, position=len(req.output))
        pages, window, slot = req.pages, self._window(req), req.state_slot
        row = Row(req.output[-1:], req.kv_len, pages, window, source=slot, slot=slot)
        return Work(req, row, choice)

    def _slot(self, req: Any) -> int:
        slot: int = req.state_slot
        return slot

    def _first_choice(self, req: Any) -> Choice | None:
        return None if req.resumed else self._answers[req.rid].choice

    def _fail(self, req: Any, error: Exception, after: DeviceEvent | None) -> None:
        self.node.fail(req.rid, error, after)

    def _append(self) -> bool:
        """Append the sampled tokens on the node, and report them to clients.

        Requests are retracted until the others fit; a retracted one loses the token of this step,
        which no client has seen and which will be drawn again, with the same result. Returns False,
        and keeps the tokens, if pages are missing that will come back by themselves.
        """
        # `append_many` is all or nothing, so it is tried again after each retraction.
        while True:
            self._sampled = [one for one in self._sampled if not one[0].state.ended]
            try:
                self.node.append_many(
                    [req for req, _, _ in self._sampled], [token for _, token, _ in self._sampled]
                )
                break
            except OutOfPagesError as error:
                if not error.retract:
                    self._counters["blocked_steps"] += 1
                    return False
                self._retract(error.retract[0])
        appended, self._sampled = self._sampled, []
        for req, token, logprob in appended:
            if not req.state.ended:
                self._take_token(req, token, logprob)
        return True

    def _retract(self, rid: str) -> None:
        """Its pages are free once the device is done with them."""
        self.node.retract(rid, self.model.event())
        self._counters["retractions"] += 1
        self._running = [req for req in self._running if req.rid != rid]
        self._sampled = [one for one in self._sampled if one[0].rid != rid]

    def _take_token(self, req: DecodeRequest, token: int, logprob: TokenLogprob | None) -> None:
        # In this order: a stop token, which is not shown; a stop string; the length.
        answer = self._answers[req.rid]
        finish: Finish | None = None
        text = ""
        if token in answer.asked.ends:
            finish = "stop"
        elif answer.text is not None:
            # Text of the least tokens ends nothing, and is not looked at again.
            counts = len(req.output) > answer.choice.sampling.min_tokens
            text, stopped = answer.text.add(token, counts)
            finish = "stop" if stopped else None
        if finish is None and len(req.output) >= req.max_new_tokens:
            finish = "length"
        self._counters["tokens"] += 1
        self._report_of(req, text, finish, token=token, logprob=logprob)
        if finish is not None:
            keep = None
            if self._markers:  # the prompt is copied to look at it
                keep = self._markers.first_thought(req.request.key.tokens(), req.output)
            if keep is not None:
                left_out = req.prompt_len + len(req.output) - keep
                self._counters["thinking_tokens_left_out"] += left_out
            if self.states is not None:  # it may end at a page boundary
                self.states.copy(self.node.save_states([req]))
            self.node.finish(req, self.model.event(), keep_tokens=keep)
            self._running.remove(req)

    def _failed(self, req: DecodeRequest) -> None:
        if req in self._running:
            self._running.remove(req)
        self._computing.pop(req, None)
        finish: Finish = "abort" if self._answers[req.rid].aborted else "error"
        self._report_of(req, "", finish, error=req.error)

    # --- what is said -----------------------------------------------------------------------------

    def _queue_job(self, ask: PrefillAsk) -> None:
        answer = self._answers[ask.rid]
        self._jobs.append(
            PrefillJob(
                f"{ask.decode}/{ask.rid}.{ask.generation}", ask.tokens, ask.prefill, ask.decode,
                ask.room, ask.generation, ask.namespace, ask.cacheable, choice=answer.choice,
                is_known=ask.known_token is not None, deadline_s=answer.asked.ask.deadline_s,
            )
        )  # fmt: skip

    def _report_of(
        self, req: DecodeRequest, text: str, finish: Finish | None, *, token: int | None = None,
        logprob: TokenLogprob | None = None, error: Exception | None = None,
    ) -> None:  # fmt: skip
        answer = self._answers[req.rid]
        # The end releases text that was kept back; after a stop string nothing is left.
        if finish is not None:
            del self._answers[req.rid]
            text += "" if answer.text is None else answer.text.end()
        output = Output(
            answer.choice.sample, len(req.output) - (token is not None), token, text, finish,
            hit_tokens=req.hit_tokens, host_tokens=req.brought.get("loaded", 0),
            shared_tokens=req.shared_tokens, prefill_hit_tokens=answer.prefill_hit_tokens,
            decode_computed_tokens=req.brought.get("computed", 0), logprob=logprob,
            rid=answer.asked.ask.rid, error=error,
        )  # fmt: skip
        self._report(answer.asked, output)

    def _report(self, asked: _Asked, output: Output) -> None:
        self._outputs.append((asked.on_output, output))
        asked.has_token |= output.token is not None
        if output.finish is not None:
            asked.left -= 1
            if not asked.left:
                del self._asked[output.rid]

    # --- the rest ---------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> bool:
        # Blocked on pages: look again soon, with or without an event of the node.
        if self._sampled:
            self.node.wait(min(timeout_s, _BLOCKED_S))
            return True
        return super().wait(timeout_s)

    @property
    def idle_s(self) -> float:
        return _BLOCKED_S if self._sampled else super().idle_s

    @property
    def _is_busy(self) -> bool:
        return any((self._running, self._sampled, self._computing, self._jobs, self._outputs))

    def drain(self, timeout_s: float = 0.0) -> bool:
        self._add_held(draining=True)  # the node takes none later
        return super().drain(timeout_s) and not self._jobs

    def stats(self) -> dict[str, int]:
        """Return the node's counters and these: "steps", "tokens", "retractions", "blocked_steps",
        "running", and "thinking_tokens_left_out" of the cache."""
        return {**self.node.stats(), **self._counters, "running": len(self._running)}
