"""The decode worker: one token per answer and step, all answers in one forward. With
`DecodeConfig.compute` it also computes prompts of which little is missing, in chunks.

One thread owns it: `submit` and `abort` as requests arrive, `step` while it returns True, `wait`
otherwise. `docs/engine.md` shows the loop.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import structs

from prefixkv import (
    DecodeConfig,
    DecodeNode,
    DecodeRequest,
    KVPool,
    NotFiniteError,
    OutOfPagesError,
    PrefillAsk,
    PrefixKVError,
    Request,
)
from prefixkv.engines.hf.loop import NodeEngine
from prefixkv.engines.hf.models import PagedModel
from prefixkv.engines.hf.recurrent import NO_SLOT, StateMemory, StateRows
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
from prefixkv.engines.hf.sampling import choose, chosen_logprobs
from prefixkv.engines.hf.text import AnswerText
from prefixkv.engines.hf.thinking import KeepThinking, Markers
from prefixkv.errors import ConfigError, RequestError
from prefixkv.spi import secret_number, whole_number

OnOutput = Callable[[Output], None]

_BLOCKED_S: Final = 0.01  # rest while pages are missing that come back by themselves
_IDLE_S: Final = 0.1  # longest rest, after which deadlines are checked
_AT_ONCE: Final = 4  # samples of a request that are never held
_MOST_WAITING: Final = 16  # of the others that wait on the node
_LEAST_S: Final = 0.001  # deadline of a sample whose time was over while it was held


# A token that was sampled for a request, and its log-probabilities where they are wanted.
_Sampled = tuple[DecodeRequest, int, TokenLogprob | None]


class _Chunk(NamedTuple):
    """The tokens [start, end) of a prompt that one forward computes."""

    req: DecodeRequest
    start: int
    end: int

    @property
    def gives_token(self) -> bool:
        return self.end == self.req.fill_len and not self.req.resumed


@dataclass(slots=True, eq=False)
class _Asked:
    """A client's request. Its samples from `next_sample` on are held, and not on the node yet."""

    ask: Generate
    on_output: OnOutput
    ends: frozenset[int]  # tokens that end an answer
    begun_s: float
    next_sample: int = 0

    @property
    def holds_samples(self) -> bool:
        return self.next_sample < self.ask.num_samples


@dataclass(slots=True, eq=False)
class _Answer:
    asked: _Asked
    choice: Choice  # the choice of its first token
    req: DecodeRequest
    text: AnswerText | None
    aborted: bool = False  # by its client
    error: Exception | None = None  # an error that this engine found, not the node
    prefill_hit_tokens: int = 0


class DecodeEngine(NodeEngine):
    """A model on a `DecodeNode`. Used from one thread. It owns the model from now on.

    Of a request with many samples, later ones are held here and take turns with other requests, so
    none waits behind all of them.

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

    def __init__(
        self,
        model: PagedModel,
        pool: KVPool,
        config: DecodeConfig | None = None,
        tokenizer: Any = None,
        thinking: KeepThinking = "on",
        shared_states: bool = False,
    ) -> None:
        self.model, self._tokenizer = model, tokenizer
        self._flat = model.flat_pool(pool)
        layout = pool.layout
        config = model.configured(config or DecodeConfig(), layout.num_pages, layout.page_size)
        self._computes = config.compute is not None
        self.states: StateMemory | None = None
        # Most tokens of one prompt per forward: a row of the window group has pages for no more.
        most = layout.num_pages * layout.page_size
        self._step_tokens = min([most, *(group.step_tokens for group in pool.groups)])
        if model.has_states:
            num_slots = min(config.max_running, layout.num_pages)
            self.states = model.make_states(num_slots + config.checkpoints, shared_states)
        if config.compute is not None:
            config = replace(config, compute=replace(config.compute, ask="late"))
        if thinking not in ("on", "off"):
            raise ConfigError(f"thinking is {thinking!r}, must be on or off")
        # Of thinking that is left out of the cache; None: all is kept.
        self._markers: Markers | None = None
        if thinking == "off" and tokenizer is not None:
            self._markers = Markers(tokenizer) or None
        # Last of what may raise: it has threads.
        state = None if self.states is None else self.states.pool
        self.node = DecodeNode(pool, config, state=state)
        self._answers: dict[str, _Answer] = {}  # by the node's id of the request
        # Requests whose samples are not all on the node, and samples there that were held and have
        # no output yet.
        self._held: deque[_Asked] = deque()
        self._waiting: list[DecodeRequest] = []
        self._outputs: list[tuple[OnOutput, Output]] = []  # that the end of `step` reports
        self._samples: dict[str, list[str]] = {}  # the node's ids by the client's id
        # Requests with all their KV here but the newest token's: one forward each step.
        self._running: list[DecodeRequest] = []
        # Requests that are computed here, with the tokens that have KV, oldest first.
        self._local: dict[DecodeRequest, int] = {}
        # Tokens that are not appended yet, with their log-probabilities. Not empty between two
        # steps only where pages are missing: then no forward runs until they are appended.
        self._sampled: list[_Sampled] = []
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
        self._check(ask)
        ends = ask.sampling.ends(self.model.end_tokens)
        asked = _Asked(ask, on_output, ends, time.monotonic())
        answers: list[_Answer] = []
        try:
            while len(answers) < min(ask.num_samples, _AT_ONCE):
                answers.append(self._add_sample(asked))
        except PrefixKVError:
            # All of these samples or none. The aborted ones come out of `pop_failed`, where
            # `_failed` finds no answer for them.
            for answer in answers:
                self.node.abort(answer.req.rid)
            raise
        self._samples[ask.rid] = [f"{ask.rid}/{i}" for i in range(ask.num_samples)]
        for answer in answers:
            self._begin_to_answer(answer)
        if asked.holds_samples:
            self._held.append(asked)

    def _add_sample(self, asked: _Asked) -> _Answer:
        """Raises as `submit` does; the sample is not held in any case."""
        ask, i = asked.ask, asked.next_sample
        asked.next_sample += 1
        deadline_s = ask.deadline_s
        if deadline_s is not None:
            deadline_s = max(deadline_s - (time.monotonic() - asked.begun_s), _LEAST_S)
        request = Request(
            f"{ask.rid}/{i}", ask.tokens, ask.max_new_tokens, room=self._rooms,
            prefill=ask.prefill, namespace=ask.namespace, cacheable=ask.cacheable,
            priority=ask.priority, deadline_s=deadline_s, hints=ask.hints,
        )  # fmt: skip
        prompt = request.key.tokens()
        self._check_tokens(ask, prompt)
        choice = Choice(ask.sampling, ask.sampling.seeded(ask.rid), i)
        req = self.node.add(request)
        self._rooms += 1
        text = self._tokenizer and AnswerText(self._tokenizer, ask.sampling.stop, prompt)
        return _Answer(asked, choice, req, text)

    def _begin_to_answer(self, answer: _Answer) -> None:
        req = answer.req
        self._answers[req.rid] = answer
        # Else the node asks for it, if this engine does not compute it.
        if not self._computes:
            self._queue_job(answer, PrefillAsk(req, self.node.peer_id.name, req.prompt_len))

    def _add_held(self, most: float = _MOST_WAITING) -> None:
        """Add held samples, one of each request in turn, while fewer than `most` wait for their
        prefill worker; only one, so that they go on, while a request that is never held waits for
        that worker. So a worker that stands still holds up its own alone. O(answers)."""
        self._waiting = [req for req in self._waiting if _waits(req)]
        waiting = Counter(req.prefill for req in self._waiting)
        others = (one.req for one in self._answers.values() if one.choice.sample < _AT_ONCE)
        busy = {req.prefill for req in others if _waits(req)} if most == _MOST_WAITING else ()
        num_passed = 0  # one behind the other, whose workers have enough
        while num_passed < len(self._held):
            asked = self._held.popleft()
            address = asked.ask.prefill
            if waiting[address] >= (1 if address in busy else most):
                self._held.append(asked)
                num_passed += 1
                continue
            num_passed = 0
            waiting[address] += 1
            try:
                answer = self._add_sample(asked)
                self._waiting.append(answer.req)
                self._begin_to_answer(answer)
            except PrefixKVError as error:
                self._end_held(asked, asked.next_sample - 1, "error", error)
            if asked.holds_samples:
                self._held.append(asked)

    def _end_held(
        self, asked: _Asked, sample: int, finish: Finish, error: Exception | None = None
    ) -> None:
        rid = asked.ask.rid
        self._outputs.append((asked.on_output, Output(sample, finish=finish, rid=rid, error=error)))
        self._forget_name(rid, f"{rid}/{sample}")

    def abort(self, rid: str) -> bool:
        """End all answers; the next `step` reports it. False if unknown or ended."""
        # The node must not reuse their pages before the device has finished with them.
        after = self.model.event()
        names = self._samples.get(rid, []).copy()
        for asked in [asked for asked in self._held if asked.ask.rid == rid]:
            self._held.remove(asked)
            for sample in range(asked.next_sample, asked.ask.num_samples):
                self._end_held(asked, sample, "abort")
        for name in names:
            if (answer := self._answers.get(name)) is not None:
                answer.aborted = True
                self.node.abort(name, after)
        return bool(names)

    def take_prefill_jobs(self) -> list[PrefillJob]:
        """Return the new jobs; the caller brings each to the `PrefillEngine` at `job.prefill`."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def give_up_job(self, job: PrefillJob, reason: str) -> bool:
        """Tell that a job did not reach its prefill worker, or was refused there: it is tried
        again, computed here, or its answer fails, as the config says. False if the answer has
        ended, or the job is not its last attempt."""
        name = "/".join(job.rid.rsplit("/", 2)[1:]).rpartition(".")[0]
        answer = self._answers.get(name)
        if answer is None or answer.req.generation != job.generation:
            return False
        return self.node.give_up_prefill(name, reason)

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
            self._queue_job(self._answers[ask.rid], ask)
        arrived = node.pop_transferred()
        for req in arrived:
            self._begin(req)
        for req in node.pop_local():
            self._begin_local(req)
        # The event stands behind all chunks of those that failed.
        for req in node.pop_failed(self.model.event() if self._local else None):
            self._failed(req)
        # 2. Append first tokens, and tokens that had no page at the last step: the forward needs
        # each request's newest token, and a page for its KV.
        if self._sampled and not self._append():
            return False
        # 3. One forward. An aborted request's pages may belong to another request by now.
        self._running = [req for req in self._running if not req.state.ended]
        if not self._running and not self._local:
            return bool(arrived or self._outputs or self._jobs)
        self._forward(self._running.copy(), self._next_chunks())
        self._append()
        return True

    def _next_chunks(self) -> list[_Chunk]:
        """The oldest prompts come first, each as far as the node allows."""
        chunks: list[_Chunk] = []
        if not self._local:
            return chunks
        left = self.node.chunk_tokens
        for req, start in self._local.items():
            if left > 0 and not req.state.ended:
                end = min(start + min(left, self._step_tokens), req.fill_len)
                if self.model.window:  # a window is kept at a chunk's end
                    end = next((at for at in req.stops if start < at <= end), end)
                chunks.append(_Chunk(req, start, end))
                left -= end - start
        return chunks

    def _begin_local(self, req: DecodeRequest) -> None:
        if req.prefix_len < req.fill_len:
            self._local[req] = req.prefix_len
            answer = self._answers[req.rid]
            if not req.resumed:
                answer.prefill_hit_tokens = 0  # an attempt before this one may have had some
            # Prefill has sent all but the end, and knew the token behind that.
            if req.aux and not req.resumed:
                try:
                    _, answer.prefill_hit_tokens, _ = unpack_first(
                        req.aux, self.model.vocab_size, req.prefix_len
                    )
                except ValueError as error:
                    self._abort_for(answer, error)
            return
        # It lacks no KV: its window is there, or its state in a checkpoint.
        if self.states is not None:
            self.states.copy([(req.checkpoint_slot, req.state_slot)])
        self.node.computed(req, req.fill_len, after=self.model.event())
        for whole in self.node.pop_transferred():
            self._begin(whole)

    def _begin(self, req: DecodeRequest) -> None:
        answer = self._answers[req.rid]
        try:
            # A resumed one continues from its newest token, which decode knows already.
            if not req.resumed:
                token, answer.prefill_hit_tokens, logprob = unpack_first(
                    req.aux, self.model.vocab_size, req.prompt_len, answer.choice.sampling.logprobs
                )
                self._sampled.append((req, token, logprob))
        except ValueError as error:
            self._abort_for(answer, error)
            return
        self._running.append(req)

    def _abort_for(self, answer: _Answer, error: ValueError) -> None:
        answer.error = error
        self.node.abort(answer.req.rid, self.model.event())

    def _forward(self, reqs: list[DecodeRequest], chunks: list[_Chunk]) -> None:
        """Write each newest token's KV and the chunks', and sample the next tokens."""
        # 1. What is sampled comes from the first rows of the logits: of those that run, then of the
        # chunks that complete a prompt.
        starts = [req.kv_len for req in reqs]
        firsts = [chunk for chunk in chunks if chunk.gives_token]
        sampled = [*reqs, *(chunk.req for chunk in firsts)]
        computed = [*reqs, *(chunk.req for chunk in chunks)]
        not_finite: list[int] = []
        tokens = [np.array([req.output[-1] for req in reqs], np.int32)]
        tokens += [one.req.key.tokens()[one.start : one.end] for one in chunks]
        logits = self.model.forward(
            self._flat,
            np.concatenate(tokens),
            [req.pages for req in computed],
            starts + [chunk.start for chunk in chunks],
            [start + 1 for start in starts] + [chunk.end for chunk in chunks],
            [*range(len(reqs)), *(len(reqs) + chunks.index(one) for one in firsts)],
            states=self._state_rows(reqs, chunks),
            windows=self.model.window_pages(computed),
            not_finite=not_finite,
        )
        self._counters["steps"] += bool(reqs)
        # 2. Before anything of it is handed over: those end whose numbers are not finite, and the
        # others go on without them.
        if not_finite:
            self._fail([computed[at] for at in not_finite])
            logits = logits[[at for at, req in enumerate(sampled) if not req.state.ended]]
            sampled, reqs = _living(sampled), _living(reqs)
            firsts, chunks = (
                [chunk for chunk in some if not chunk.req.state.ended] for some in (firsts, chunks)
            )
        choices = [
            structs.replace(self._answers[req.rid].choice, position=len(req.output))
            for req in sampled
        ]
        found = choose(logits, choices, self.model.end_tokens)
        logprobs = chosen_logprobs(logits, found, choices)
        num = len(reqs)
        self._sampled = list(zip(reqs, found[:num], logprobs[:num], strict=True))
        # 3. The chunks. A first token takes the way of those that prefill sends.
        aux = {
            chunk.req: pack_first(token, self._answers[chunk.req.rid].prefill_hit_tokens, logprob)
            for chunk, token, logprob in zip(firsts, found[num:], logprobs[num:], strict=True)
        }
        event = self.model.event() if chunks else None
        for chunk in chunks:
            self._local[chunk.req] = chunk.end
            if chunk.end == chunk.req.fill_len:
                del self._local[chunk.req]
            self.node.computed(chunk.req, chunk.end, aux.get(chunk.req, b""), event)
        # 4. What is whole now runs, and its first token goes out with this pass.
        if chunks:
            for req in self.node.pop_transferred():
                self._begin(req)

    def _fail(self, reqs: list[DecodeRequest]) -> None:
        after = self.model.event()
        for req in reqs:
            error = NotFiniteError(f"decode computed NaN or infinity for request {req.rid!r}")
            self.node.fail(req.rid, error, after)

    def _state_rows(self, reqs: list[DecodeRequest], chunks: list[_Chunk]) -> StateRows | None:
        """A step replaces each state in its slot, and a prompt's first chunk goes on from a
        checkpoint. Copies the states that are kept of requests that run."""
        if self.states is None:
            return None
        self.states.copy(self.node.save_states(reqs))
        slots = [req.state_slot for req in reqs]
        sources = slots.copy()
        # The slots are asked for before the forward: once a chunk is told its stops are over.
        saves: dict[int, dict[int, int]] = {}
        for req, start, end in chunks:
            sources.append(req.checkpoint_slot if start == req.prefix_len else req.state_slot)
            for at in [at for at in req.stops if start <= at <= end]:
                slot = self.node.save_state(req, at)
                if slot != NO_SLOT and at == start:  # what prefill has sent
                    self.states.copy([(req.state_slot, slot)])
                elif slot != NO_SLOT:
                    saves.setdefault(len(slots), {})[at] = slot
            slots.append(req.state_slot)
        return StateRows(self.states, sources, slots, saves)

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
                self._report_token(req, token, logprob)
        return True

    def _retract(self, rid: str) -> None:
        """Its pages are free once the device is done with them."""
        self.node.retract(rid, self.model.event())
        self._counters["retractions"] += 1
        self._running = [req for req in self._running if req.rid != rid]
        self._sampled = [one for one in self._sampled if one[0].rid != rid]

    def _report_token(self, req: DecodeRequest, token: int, logprob: TokenLogprob | None) -> None:
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
        # The end releases text that was kept back; after a stop string nothing is left.
        if finish is not None and answer.text is not None:
            text += answer.text.end()
        self._counters["tokens"] += 1
        self._report(answer, len(req.output) - 1, token, text, finish, logprob=logprob)
        if finish is not None:
            keep = None
            if self._markers is not None:  # the prompt is copied to look at it
                keep = self._markers.first_thought(req.request.key.tokens(), req.output)
                if keep is not None:
                    left_out = req.prompt_len + len(req.output) - keep
                    self._counters["thinking_tokens_left_out"] += left_out
            if self.states is not None:  # it may end at a page boundary
                self.states.copy(self.node.save_states([req]))
            self.node.finish(req, self.model.event(), keep_tokens=keep)
            self._running.remove(req)
            self._forget(answer)

    # --- prefill ----------------------------------------------------------------------------------

    def _queue_job(self, answer: _Answer, ask: PrefillAsk) -> None:
        self._jobs.append(
            PrefillJob(
                f"{ask.decode}/{ask.rid}.{ask.generation}", ask.tokens, ask.prefill, ask.decode,
                ask.room, ask.generation, ask.namespace, ask.cacheable, answer.choice,
                ask.known_token is not None, answer.asked.ask.deadline_s,
            )
        )  # fmt: skip

    # --- ends -------------------------------------------------------------------------------------

    def _failed(self, req: DecodeRequest) -> None:
        if req in self._running:
            self._running.remove(req)
        self._local.pop(req, None)
        answer = self._answers.get(req.rid)
        # A request of a `submit` that was undone has no answer. A later one may have its id.
        if answer is None or answer.req is not req:
            return
        finish: Finish = "abort" if answer.aborted else "error"
        text = "" if answer.text is None else answer.text.end()
        self._report(answer, len(req.output), None, text, finish, answer.error or req.error)
        self._forget(answer)

    def _report(
        self, answer: _Answer, position: int, token: int | None, text: str, finish: Finish | None,
        error: Exception | None = None, logprob: TokenLogprob | None = None,
    ) -> None:  # fmt: skip
        req, asked = answer.req, answer.asked
        output = Output(
            answer.choice.sample, position, token, text, finish, req.hit_tokens,
            answer.prefill_hit_tokens, req.shared_tokens, logprob, req.host_tokens,
            req.decode_computed_tokens, rid=asked.ask.rid, error=error,
        )  # fmt: skip
        self._outputs.append((asked.on_output, output))

    def _forget(self, answer: _Answer) -> None:
        del self._answers[answer.req.rid]
        self._forget_name(answer.asked.ask.rid, answer.req.rid)

    def _forget_name(self, rid: str, name: str) -> None:
        names = self._samples[rid]
        names.remove(name)
        if not names:
            del self._samples[rid]

    # --- checks -----------------------------------------------------------------------------------

    def _check(self, ask: Generate) -> None:
        if not isinstance(ask.rid, str) or "/" in ask.rid:
            raise RequestError(f'rid is {ask.rid!r}, a string without "/" is needed')
        if ask.rid in self._samples:
            raise RequestError(f"request {ask.rid!r} is here already")
        if not isinstance(ask.sampling, Sampling):
            raise RequestError(f"sampling is {ask.sampling!r}, a Sampling is needed")
        if ask.sampling.stop and self._tokenizer is None:
            raise RequestError("stop strings need an engine with a tokenizer")
        ends = ask.sampling.ends(self.model.end_tokens)
        if ask.sampling.min_tokens and len(ends) >= self.model.vocab_size:
            raise RequestError("every token ends the answer, so it cannot have min_tokens")
        whole_number("num_samples", ask.num_samples, 1, 1025)

    def _check_tokens(
        self, ask: Generate, prompt: np.ndarray[tuple[int], np.dtype[np.int32]]
    ) -> None:
        """Raise RequestError for tokens outside the vocabulary, or too many for the context."""
        if int(prompt.max()) >= self.model.vocab_size:
            raise RequestError(
                f"token {prompt.max()} is not in the vocabulary of {self.model.vocab_size}"
            )
        num = len(prompt) + ask.max_new_tokens
        if num > self.model.context:
            raise RequestError(
                f"{len(prompt)} tokens and max_new_tokens={ask.max_new_tokens} are {num}, the "
                f"model takes {self.model.context}"
            )

    # --- the rest ---------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until `step` may have something to do. Returns True if so."""
        # Blocked on pages: look again soon, with or without an event of the node.
        if self._sampled:
            self.node.wait(min(timeout_s, _BLOCKED_S))
            return True
        busy = self._running or self._local or self._jobs or self._outputs
        return bool(busy) or self.node.wait(timeout_s)

    @property
    def idle_s(self) -> float:
        """Longest time in seconds that a poller may wait."""
        return _BLOCKED_S if self._sampled else _IDLE_S

    def drain(self, timeout_s: float = 0.0) -> bool:
        """Take no more requests. Call `step` and this until it returns True: all have ended."""
        self._add_held(math.inf)  # the node takes none later
        busy = self._running or self._sampled or self._local or self._outputs
        return self.node.drain(0.0 if busy else timeout_s) and not self._jobs

    def stats(self) -> dict[str, int]:
        """Return the node's counters and these: "steps", "tokens", "retractions", "blocked_steps",
        "running", and "thinking_tokens_left_out" of the cache."""
        return {
            **self.node.stats(),
            **self._counters,
            "running": len(self._running),
        }


def _living(reqs: list[DecodeRequest]) -> list[DecodeRequest]:
    return [req for req in reqs if not req.state.ended]


def _waits(req: DecodeRequest) -> bool:
    return not req.output and not req.state.ended
