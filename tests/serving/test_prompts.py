"""Log-probabilities of a prompt between prefill and the front: what is kept, what is refused, what
counts as lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from prefixkv.serving.prompts import PromptAnswer, PromptError, PromptWait
from prefixkv.serving.wire import Ask, Logprob, PromptLine, SamplingParams, TokenEvent

TOKENS = [5, 6, 7, 8]
ASK = Ask("r", TOKENS, "", "", sampling=SamplingParams(logprobs=1), prompt_logprobs=True)
VOCAB = 10
ONES = [None, *(Logprob(token, -1.5, ((3, -0.5),)) for token in TOKENS[1:])]
FIRST = TokenEvent(0, 0, 9, "x")
OTHER = TokenEvent(1, 0, 9, "y", "length")


def lines_of(*lines: PromptLine) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


RIGHT = (
    lines_of(PromptLine(0, ONES[:1]), PromptLine(1, ONES[1:3]))
    + b"\n\n"
    + lines_of(PromptLine(3, ONES[3:]))
)


async def pieces_of(data: bytes, size: int) -> AsyncGenerator[bytes, None]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def read(
    wait: PromptWait, data: bytes, size: int = 7, is_wanted: Callable[[], bool] = lambda: True
) -> None:
    asyncio.run(wait.read(pieces_of(data, size), is_wanted))


def prompt_in(events: list[bytes]) -> list[Logprob | None]:
    told = [msgspec.json.decode(event, type=TokenEvent) for event in events]
    assert all(one.token is None and one.finish is None for one in told)
    return [one for event in told for one in event.prompt or ()]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_outputs_wait_for_the_prompt_and_go_behind_it(size: int) -> None:
    wait = PromptWait(ASK, VOCAB)
    assert wait.keep(FIRST)
    assert wait.keep(OTHER)
    assert wait.take_ready() == ([], [])
    read(wait, RIGHT, size)
    events, outputs = wait.take_ready()
    assert prompt_in(events) == ONES
    assert outputs == [FIRST, OTHER]
    assert wait.take_ready() == ([], [])
    assert not wait.keep(FIRST)  # from now on they go as they come


def test_the_prompt_waits_for_the_first_sample() -> None:
    """What fails until then is tried again elsewhere: nothing has been said."""
    wait = PromptWait(ASK, VOCAB)
    read(wait, RIGHT)
    assert wait.is_whole
    assert wait.take_ready() == ([], [])
    assert wait.keep(OTHER)
    assert wait.take_ready() == ([], [])
    assert not wait.keep(TokenEvent(finish="error"))
    assert wait.keep(FIRST)
    events, outputs = wait.take_ready()
    assert prompt_in(events) == ONES
    assert outputs == [OTHER, FIRST]


def test_an_answer_after_one_that_broke_is_read_from_its_beginning() -> None:
    wait = PromptWait(ASK, VOCAB)
    with pytest.raises(PromptError, match="ended after 3 of 4"):
        read(wait, RIGHT[: RIGHT.index(b"\n\n") + 1])
    read(wait, lines_of(PromptLine(0, ONES[:2])) + lines_of(PromptLine(0, [], "AbortedError: no")))
    assert not wait.is_whole
    read(wait, RIGHT)
    read(wait, RIGHT)  # a third attempt that overlapped changes nothing
    wait.keep(FIRST)
    assert prompt_in(wait.take_ready()[0]) == ONES


def test_it_is_lost_where_the_first_sample_has_begun_and_nothing_is_read() -> None:
    wait = PromptWait(ASK, VOCAB)
    assert not wait.is_lost
    wait.num_reading = 1
    wait.keep(OTHER)
    wait.keep(FIRST)
    assert not wait.is_lost
    wait.num_reading = 0
    assert wait.is_lost
    read(wait, RIGHT)
    assert not wait.is_lost
    wait.take_ready()
    assert not wait.is_lost
    other = PromptWait(ASK, VOCAB)
    other.keep(OTHER)  # the second sample has jobs of its own
    assert not other.is_lost


def test_what_is_no_longer_wanted_is_not_read() -> None:
    wait = PromptWait(ASK, VOCAB)
    read(wait, RIGHT, is_wanted=lambda: False)
    assert not wait.is_whole


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}\n", b"[1]\n", b"\xff\n", b'{"position":0}\n', RIGHT[:-20], RIGHT + RIGHT,
        lines_of(PromptLine(1, ONES[1:])), lines_of(PromptLine(0, [])),
        lines_of(PromptLine(0, [*ONES, ONES[3]])), lines_of(PromptLine(0, [ONES[1], *ONES[1:]])),
        lines_of(PromptLine(0, [*ONES[:3], None])), lines_of(PromptLine(-1, ONES)),
        *(
            lines_of(PromptLine(0, [*ONES[:3], wrong]))
            for wrong in (
                Logprob(7, -1.0, ((3, -1.0),)), Logprob(8, -1.0), Logprob(8, 2.0, ((3, -1.0),)),
                Logprob(8, -1e9, ((3, -1.0),)), Logprob(8, -1.0, ((10, -1.0),)),
                Logprob(8, -1.0, ((-1, -1.0),)), Logprob(8, -1.0, ((3, -1.0), (4, -2.0))),
                Logprob(8, float("nan"), ((3, -1.0),)), Logprob(8, -1.0, ((3, float("inf")),)),
            )
        ),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    wait = PromptWait(ASK, VOCAB)
    with pytest.raises(PromptError):
        read(wait, data, 1000)
    assert not wait.is_whole


def test_a_line_is_bounded() -> None:
    wait = PromptWait(ASK, VOCAB)
    num = [0]

    async def endless() -> AsyncGenerator[bytes, None]:
        while True:
            num[0] += 1
            yield b"1" * 1000

    with pytest.raises(PromptError, match="a line of more than"):
        asyncio.run(wait.read(endless(), lambda: True))
    assert num[0] < 10


def part(position: int, num: int, error: Exception | None = None) -> Any:
    """As the engine hands it on: tuples."""
    found = tuple(
        None if at == 0 else (TOKENS[at], -1.5, ((3, -0.5),))
        for at in range(position, position + num)
    )
    return SimpleNamespace(position=position, logprobs=found, error=error)


async def sent_by(answer: PromptAnswer) -> bytes:
    return b"".join([piece async for piece in answer.lines()])


def test_an_answer_ends_with_the_prompt_and_can_be_read() -> None:
    async def main() -> bytes:
        gave_up: list[int] = []
        answer = PromptAnswer(4, lambda: gave_up.append(1))
        reading = asyncio.create_task(sent_by(answer))
        for one in (part(0, 1), part(1, 2), part(3, 1)):
            answer.add(one)
            await asyncio.sleep(0)
        data = await reading
        answer.add(part(0, 1))
        answer.end("late")
        await answer.close()
        assert not gave_up
        return data

    wait = PromptWait(ASK, VOCAB)
    read(wait, asyncio.run(main()))
    wait.keep(FIRST)
    assert prompt_in(wait.take_ready()[0]) == ONES


@pytest.mark.parametrize("how", ["error", "end", "close"])
def test_an_answer_that_ends_early_says_so_once(how: str) -> None:
    async def main() -> tuple[bytes, int]:
        gave_up: list[int] = []
        answer = PromptAnswer(4, lambda: gave_up.append(1))
        answer.add(part(0, 3))
        if how == "error":
            answer.add(part(3, 0, ValueError("no")))
        elif how == "end":
            answer.end("no")
        else:
            await answer.close()
        data = await sent_by(answer)
        await answer.close()
        return data, len(gave_up)

    data, gave_up = asyncio.run(main())
    wait = PromptWait(ASK, VOCAB)
    if how == "close":
        assert gave_up == 1
        return
    assert not gave_up
    assert b"no" in data
    read(wait, data)
    assert not wait.is_whole
