"""What the conformance kit and an engine say to each other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol

from prefixkv import ControlConfig, DecodeConfig, DecodeNode, PrefillConfig, PrefillNode

Side = Literal["decode", "prefill"]

LAWS: Final = {
    "law 1": "each page is in exactly one state, and the books agree (`audit`)",
    "law 2": "at rest nothing is locked, owned or held",
    "law 4": "an engine writes only pages that a request of its own has",
    "law 5": "KV that was handed over is not written again",
    "law 7": "each request ends once, in time, and not without a reason",
    "law 8": "what decode reads is what prefill computed: every answer is right",
    "order": "what waits for the other side is asked for there, and nothing waits for ever",
    "calls": "a node refuses no call of an engine, and its loops do not raise",
    "tokens": "a token that had no page is kept, and appended when there is one",
    "cache": "what is finished is found by the next request that may find it, and by no other",
}
"""Names in findings: laws of docs/architecture.md by number, and rules of
docs/integrate/conformance.md."""


class Finding(NamedTuple):
    """One broken law: which, in which scenario and from which seed, and what was seen."""

    law: str
    scenario: str
    seed: int
    what: str
    options: str = ""  # of the run: what `run` was given besides

    def __str__(self) -> str:
        again = f"run(make, only=[{self.scenario!r}], seeds=[{self.seed}]{self.options})"
        return f"{self.law} ({LAWS[self.law]}):\n    {self.what}\n    again: {again}"


_DECODE: Final = DecodeConfig(reserve_tokens=0)
_PREFILL: Final = PrefillConfig()


@dataclass(frozen=True, slots=True)
class ScenarioSettings:
    """What a scenario wants of the two workers that it runs on.

    Args:
        page_size, prefill_page_size: tokens per page, of decode's pool and of prefill's.
        decode_pages, prefill_pages: pages that requests may have, in each pool.
        chunk_tokens: most tokens that prefill computes of a prompt before it hands them over.
        shared: the pools lie in memory that the other worker may map (`KVPool.create`).
        tokens_per_step: most tokens that one step of decode may give a request. An engine that
            has no speculative decoding raises NotImplementedError for more than 1.
        factor: what all numbers of tokens of the scenario are multiplied by, for larger pages.
        decode, prefill: the configs of the nodes, for an engine to pass on. It may set `model` and
            `reserved_pages` in them (with as many pages more in the pool), `compute`, `host_memory`
            and `failure_policy` in decode's, and `checkpoints` and `checkpoint_tokens` in both.
            Some scenarios have `host_memory`, or `compute` with `failure_policy` "local": an engine
            that cannot keep to them raises NotImplementedError.
    """

    page_size: int = 4
    prefill_page_size: int = 4
    decode_pages: int = 64
    prefill_pages: int = 64
    chunk_tokens: int = 8
    shared: bool = False
    tokens_per_step: int = 1
    factor: int = 1
    decode: DecodeConfig = _DECODE
    prefill: PrefillConfig = _PREFILL


BRIEF: Final = ControlConfig(
    heartbeat_s=0.2, suspect_after_s=2.0, resend_s=0.1, connect_timeout_s=1.0,
    bootstrap_timeout_s=5.0, drain_timeout_s=2.0, parked_timeout_s=2.0,
)  # fmt: skip
"""Timeouts of scenarios in which a worker goes away."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request of the kit, for both sides.

    Args:
        rid: its name, a word without punctuation; each is used once.
        tokens: the prompt, out of `EngineSides.vocabulary`.
        max_new_tokens: the answer has as many tokens, if no `end_token` ends it.
        end_token: a token that ends the answer and is its last token; None: there is none.
        namespace, cacheable, deadline_s: as in `Request`; the deadline is for both sides.
    """

    rid: str
    tokens: Sequence[int]
    max_new_tokens: int
    end_token: int | None = None
    namespace: Hashable = None
    cacheable: bool = True
    deadline_s: float | None = None


@dataclass(eq=False)
class AnswerLog:
    """The client of one prompt. An engine calls `token` for each token and `end` once. `expected`
    is the right answer; `faults` has what an honest engine does not do: (law, text)."""

    prompt: Prompt
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    num_ends: int = 0
    error: Exception | None = None
    may_fail: bool = False  # it was aborted, or its worker has gone
    lost: bool = False  # its decode worker has gone: no end has to come
    aborted_at: int | None = None  # tokens that it had then
    faults: list[tuple[str, str]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.num_ends > 0

    def token(self, token: int) -> None:
        """Take one token of the answer, in order."""
        rid, at = self.prompt.rid, len(self.tokens)
        self.tokens.append(token)
        if self.ended:
            self.faults.append(("law 7", f"{rid}: token {at} came after the end"))
        elif at >= len(self.expected):
            if at == len(self.expected):  # once: those behind it follow from it
                num = f"{at} token" if at == 1 else f"{at} tokens"
                what = f"{rid}: a token came after the last of its answer ({num})"
                self.faults.append(("law 7", what))
        # One fault per answer: all tokens after a wrong one follow from it.
        elif token != self.expected[at] and self.tokens[:at] == self.expected[:at]:
            right = self.expected[at]
            self.faults.append(("law 8", f"{rid}: token {at} is {token}, the model says {right}"))

    def end(self, error: Exception | None = None) -> None:
        """Take the answer's end. `error`: why it is not complete."""
        self.num_ends += 1
        rid = self.prompt.rid
        if self.num_ends > 1:
            self.faults.append(("law 7", f"{rid}: it ended {self.num_ends} times"))
            return
        self.error = error
        if error is not None and not self.may_fail:
            self.faults.append(("law 7", f"{rid}: it failed: {type(error).__name__}: {error}"))
        if error is None and len(self.tokens) < len(self.expected):
            so_far = f"{len(self.tokens)} of {len(self.expected)} tokens"
            self.faults.append(("law 7", f"{rid}: it ended after {so_far}, without an error"))


class SidesError(TypeError):
    """What `make` has returned is no `EngineSides`: the message says what is missing."""


class EngineSides(Protocol):
    """An engine's decode and prefill worker.

    The kit calls everything here from one thread, and looks at `decode` and `prefill` from it
    between two calls of `step`. An engine with threads of its own lets them make one pass in
    `step`. `prefill` is None where prefill is in another process; the kit then sees its effects
    only.
    """

    @property
    def decode(self) -> DecodeNode:
        """The present node: another one after `restart`."""

    @property
    def prefill(self) -> PrefillNode | None:
        """Likewise."""

    @property
    def vocabulary(self) -> range:
        """Token ids that prompts may have, `range(1000)` for instance."""

    def submit(self, prompt: Prompt, answer: AnswerLog) -> None:
        """Give a prompt to both sides; `answer` hears each token and the end."""

    def abort(self, rid: str, side: Side) -> None:
        """End a prompt's request on one side, as when its client leaves; on prefill each attempt at
        it. It may have ended."""

    def step(self) -> object:
        """Make one pass of both loops, without waiting. A true value: there was something to do."""

    def expected(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        """Return the tokens that the model says after these, by itself, without pages."""

    def restart(self, side: Side) -> None:
        """End a worker without a drain, and start it again under its name, with an empty pool.
        Prefill may have another endpoint then; what was under way there may end with an error."""

    def close(self) -> None: ...


def check_sides(sides: Any) -> None:
    """Raise SidesError, which names all that is missing or of another type."""
    calls = ("submit", "abort", "step", "expected", "restart", "close")
    needed: dict[str, tuple[Any, str]] = {
        "decode": (DecodeNode, "a DecodeNode"),
        "prefill": (PrefillNode | None, "a PrefillNode (or None)"),
        "vocabulary": (range, "a range"),
        **dict.fromkeys(calls, (Callable, "a method")),
    }
    wrong = []
    for name, (kind, noun) in needed.items():
        try:
            if isinstance(value := getattr(sides, name), kind):
                continue
            found = f"{value!r:.80}"
        except AttributeError as error:  # of a property it may be another's, of the same name
            found = f"missing ({error})"
        wrong.append(f"{name} is {found}, {noun} is needed")
    if wrong:
        raise SidesError(f"{type(sides).__name__}: {'; '.join(wrong)}")
