"""Log-probabilities of a prompt on their way from a prefill worker, by way of the decode worker, to
the front: in the answer to the job, which stays open until the prompt is computed.

The decode worker keeps them until the first token is there, and sends them before it: what fails
until then is tried again elsewhere as a whole. Nothing of this runs for requests without them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import Any, Final

import msgspec

from prefixkv.serving.waits import wait_set
from prefixkv.serving.wire import LIFE_SIGN_S, Ask, Logprob, PromptLine, TokenEvent

_NUMBER_BYTES: Final = 48  # longest JSON of a token and its number, with brackets
_LINE_BYTES: Final = 4096  # of a line, beside its numbers

_line_decoder = msgspec.json.Decoder(PromptLine)


class PromptError(Exception):
    """A prefill worker's answer to a job is not the log-probabilities of its prompt."""


class PromptAnswer:
    """The answer of a prefill worker to a job with `prompt_logprobs`. Owned by the event loop.

    Args:
        num_tokens: length of the prompt.
        give_up: called if the answer ends before all is known.
    """

    def __init__(self, num_tokens: int, give_up: Callable[[], object]) -> None:
        self._num_tokens, self._give_up = num_tokens, give_up
        self._lines: deque[bytes] = deque()
        self._has_line = asyncio.Event()
        self._is_whole = False

    def add(self, part: Any) -> None:
        """Add a `PromptPart` of the engine to the prefill worker's answer."""
        if self._is_whole:
            return
        error = "" if part.error is None else f"{type(part.error).__name__}: {part.error}"
        self._is_whole = not part.logprobs or part.position + len(part.logprobs) == self._num_tokens
        found = [None if one is None else Logprob(*one) for one in part.logprobs]
        self._add(PromptLine(part.position, found, error))

    def end(self, why: str) -> None:
        """End the prefill worker's answer, if it is not whole: nothing more will come."""
        if not self._is_whole:
            self._is_whole = True
            self._add(PromptLine(0, [], why))

    def _add(self, line: PromptLine) -> None:
        self._lines.append(msgspec.json.encode(line) + b"\n")
        self._has_line.set()

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the prefill worker's answer, and an empty one as a sign of life."""
        while True:
            await wait_set(self._has_line, LIFE_SIGN_S)
            # Cleared before the queue is read: a line that comes in between sets it again.
            self._has_line.clear()
            lines = b"".join(self._lines)
            self._lines.clear()
            is_whole = self._is_whole
            yield lines or b"\n"
            if is_whole:
                return

    async def close(self) -> None:
        """End a job whose prefill worker's answer nothing reads to its end any more."""
        if not self._is_whole:
            self._is_whole = True
            self._give_up()


class PromptWait:
    """What a decode worker's request with `prompt_logprobs` waits for. Owned by the event loop.

    The outputs of all its samples are kept here until the prompt's log-probabilities are whole and
    the first sample has begun. Then those go first, as events of their own.
    """

    def __init__(self, ask: Ask, vocab_size: int) -> None:
        self._tokens, self._vocab_size = ask.tokens, vocab_size
        self._num_top = min(ask.sampling.logprobs or 0, vocab_size)
        self._events: list[bytes] = []  # those of the prompt, in JSON, once they are whole
        self._kept: list[TokenEvent] = []
        self._has_begun = False
        self.num_reading = 0  # answers of prefill that are being read
        self.is_over = False

    def keep(self, output: TokenEvent) -> bool:
        """Keep an output of a decode worker's request back. Returns False if it is not to wait."""
        # An error goes out at once: without the others, since the front then leaves.
        if self.is_over or output.finish in ("abort", "error"):
            return False
        self._kept.append(output)
        self._has_begun = self._has_begun or output.sample == 0
        return True

    def take_ready(self) -> tuple[list[bytes], list[TokenEvent]]:
        """Return the events of the prompt and the outputs behind them, once, when both are there;
        before and after that nothing."""
        if self.is_over or not self._events or not self._has_begun:
            return [], []
        self.is_over = True
        events, kept = self._events, self._kept
        self._events, self._kept = [], []
        return events, kept

    @property
    def is_lost(self) -> bool:
        """True if the decode worker's request has begun, and nothing is read that could still bring
        the log-probabilities of its prompt."""
        # Each job is told before its outputs come, and its answer is read from then on. A job
        # that fails before the request has begun is followed by another one, or by an error.
        return not (self.is_over or self._events) and self._has_begun and not self.num_reading

    @property
    def is_whole(self) -> bool:
        """True if the log-probabilities of the prompt have arrived on the decode worker."""
        return self.is_over or bool(self._events)

    async def read(self, pieces: AsyncIterable[bytes], is_wanted: Callable[[], bool]) -> None:
        """Read a prefill worker's answer to its end, or until it is no longer wanted.

        An answer that says that its job has ended early is no error: the node hears of that, and
        tries again or fails. Raises PromptError for an answer that is not as it has to be.
        """
        events: list[bytes] = []
        num, rest = 0, b""
        longest = (self._num_top + 2) * len(self._tokens) * _NUMBER_BYTES + _LINE_BYTES
        async for piece in pieces:
            if not is_wanted():
                return
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > longest:
                raise PromptError(f"a line of more than {longest} bytes")
            for raw in lines:
                if not raw:
                    continue
                try:
                    line = _line_decoder.decode(raw)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise PromptError(f"a line that is none: {error}") from None
                if line.error:
                    return
                self._check(line, num)
                num += len(line.logprobs)
                events.append(msgspec.json.encode(TokenEvent(prompt=line.logprobs)))
        if num != len(self._tokens):
            raise PromptError(f"it ended after {num} of {len(self._tokens)} tokens")
        # The first answer that is whole counts; a later attempt's would be the same.
        self._events = self._events or events

    def _check(self, line: PromptLine, num: int) -> None:
        """Raise PromptError if a line is not about the prompt's tokens from `num` on."""
        from prefixkv.engines.hf.logprobs import check_logprob

        expected = self._tokens[num : num + len(line.logprobs)]
        if line.position != num or not 0 < len(line.logprobs) == len(expected):
            raise PromptError(f"{len(line.logprobs)} tokens at {line.position}, {num} are known")
        for at, (token, one) in enumerate(zip(expected, line.logprobs, strict=True), start=num):
            if one is None or at == 0:
                if one is not None or at:
                    raise PromptError(f"token {at} has {one}")
                continue
            if one.token != token or len(one.top) != self._num_top:
                raise PromptError(f"token {at} is {one.token} with {len(one.top)} likely ones")
            try:
                check_logprob(one, self._vocab_size)  # type: ignore[arg-type]
            except ValueError as error:
                raise PromptError(f"token {at}: {error}") from None
