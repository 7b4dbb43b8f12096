"""What is alike in both workers: a model on a node computes tokens of several requests in one
forward, and samples the tokens behind them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from prefixkv import KVPool, NotFiniteError
from prefixkv.engines.hf.layers import NO_SLOT, Row, StateMemory
from prefixkv.engines.hf.models import SLIDING, PagedModel
from prefixkv.engines.hf.requests import Choice, TokenLogprob
from prefixkv.engines.hf.sampling import choose, chosen_logprobs
from prefixkv.spi import DeviceEvent, GroupPages, RadixKey

_IDLE_S: Final = 0.1  # longest rest, after which deadlines are checked


@dataclass(slots=True, eq=False)
class Work:
    """What one forward computes of a request; where there is a `choice`, the token behind is
    `drawn`."""

    req: Any
    row: Row
    choice: Choice | None = None
    drawn: tuple[int, TokenLogprob | None] | None = None


class NodeEngine(ABC):
    """Used from one thread. It owns the model from now on; `pool` must outlive it."""

    node: Any
    side: ClassVar[str]

    def __init__(self, model: PagedModel, pool: KVPool, most_tokens: int) -> None:
        self.model = model
        self.states: StateMemory | None = None  # of recurrent layers
        self._flat = model.flat_pool(pool)
        # Most tokens of one prompt per forward: a row of the window group has pages for no more.
        self._step_tokens = min([most_tokens, *(group.step_tokens for group in pool.groups)])
        # Tokens with KV of the prompts that are computed here, oldest first.
        self._computing: dict[Any, int] = {}

    @abstractmethod
    def _slot(self, req: Any) -> int:
        """Return the slot of the state of a request that is computed here."""

    @abstractmethod
    def _first_choice(self, req: Any) -> Choice | None:
        """Return the choice of the token behind a request's prompt; None: it is known."""

    @abstractmethod
    def _fail(self, req: Any, error: Exception, after: DeviceEvent | None) -> None: ...

    def _next_chunks(self, limit: int) -> list[Work]:
        """The oldest prompts come first, each as far as the limit of tokens allows."""
        chunks = []
        for req, start in self._computing.items():
            if limit <= 0:
                break
            if not req.state.ended:
                end = min(start + min(limit, self._step_tokens), req.fill_len)
                if self.model.window:  # a window is kept at a chunk's end
                    end = next((at for at in req.stops if start < at <= end), end)
                chunks.append((req, start, end, self._saves(req, start, end)))
                limit -= end - start
        # Pages are read after the last call on the node.
        return [self._chunk(*chunk) for chunk in chunks]

    def _saves(self, req: Any, start: int, end: int) -> dict[int, int]:
        """Asked for before the forward: once a chunk is handed over its stops are over."""
        if self.states is None:
            return {}
        stops = [at for at in req.stops if start <= at <= end]
        saves = {at: slot for at in stops if (slot := self.node.save_state(req, at)) != NO_SLOT}
        if start in saves:  # what prefill has sent
            self.states.copy([(self._slot(req), saves.pop(start))])
        return saves

    def _chunk(self, req: Any, start: int, end: int, saves: Mapping[int, int]) -> Work:
        choice = self._first_choice(req) if end == req.fill_len else None
        source = slot = NO_SLOT
        if self.states is not None:
            slot = self._slot(req)
            # A checkpoint is only read: it may be another prompt's too.
            source = req.checkpoint_slot if start == req.prefix_len else slot
        wanted = () if choice is None else (-1,)
        tokens = req.key.tokens()[start:end]
        row = Row(tokens, start, req.pages, self._window(req), wanted, source, slot, saves)
        return Work(req, row, choice)

    def _window(self, req: Any) -> GroupPages | None:
        pages: GroupPages | None = req.window_pages(SLIDING) if self.model.window else None
        return pages

    def _compute(self, work: list[Work]) -> tuple[list[Work], DeviceEvent | None]:
        """Run one forward. Returns the work whose numbers are finite, and an event behind it; the
        requests of the others have failed."""
        model = self.model
        logits, wrong = model.forward(self._flat, [one.row for one in work], self.states)
        # Sends and copies need not wait for the work of sampling.
        event = model.event()
        drawn = [one for one in work if one.choice is not None]
        # Before anything of it is handed over.
        for at in wrong:
            why = f"{self.side} computed NaN or infinity for request {work[at].req.rid!r}"
            self._fail(work[at].req, NotFiniteError(why), event)
        if wrong:
            failed = {work[at] for at in wrong}
            logits = logits[[at for at, one in enumerate(drawn) if one not in failed]]
            work, drawn = ([one for one in some if one not in failed] for some in (work, drawn))
        choices = [one.choice for one in drawn if one.choice is not None]
        tokens = choose(logits, choices, model.end_tokens)
        logprobs = chosen_logprobs(logits, tokens, choices)
        for one, token, logprob in zip(drawn, tokens, logprobs, strict=True):
            one.drawn = token, logprob
        return work, event

    def _why_refused(self, prompt: RadixKey, more: int = 0) -> str:
        """Return why the model cannot take a prompt and `more` new tokens; "": it can."""
        num, context = len(prompt), self.model.context
        if num + more > context:
            said = f" and max_new_tokens={more} are {num + more}" if more else ""
            return f"{num} tokens{said}, the model takes {context}"
        # It would index outside of the embedding.
        if (token := int(prompt.tokens().max())) >= self.model.vocab_size:
            return f"token {token} is not in the vocabulary of {self.model.vocab_size}"
        return ""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until `step` may have something to do. Returns True if so."""
        return self._is_busy or bool(self.node.wait(timeout_s))

    @property
    def idle_s(self) -> float:
        """Longest time in seconds that a poller may wait."""
        return _IDLE_S

    @property
    def _is_busy(self) -> bool:
        return bool(self._computing)

    def drain(self, timeout_s: float = 0.0) -> bool:
        """Take no more requests. Call `step` and this until it returns True: all have ended."""
        return bool(self.node.drain(0.0 if self._is_busy else timeout_s))

    def fileno(self) -> int:
        """Return a descriptor for a poller, to be polled while `step` is False."""
        fd: int = self.node.fileno()
        return fd

    def audit(self) -> None:
        self.node.audit()

    def close(self) -> None:
        self.node.close()
