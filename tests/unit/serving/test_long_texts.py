"""How a front's texts and defaults become tokens: no client waits for the long text of another."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prefixkv.engines.hf.folder import SamplingDefaults
from prefixkv.engines.hf.small import CHAT_TEMPLATE, small_tokenizer
from prefixkv.serving.text import Texts
from prefixkv.serving.wire import Ask, TokenEvent
from tests.support.fronts import fronted
from tests.support.patience import PATIENCE_S
from tests.support.scenes import in_loop, until


def blanks() -> Tokenizer:
    """A tokenizer with tokens of up to 128 blanks."""
    vocab = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ġ" * 2**i, "Ġ" * 2**i) for i in range(7)]
    for one, _ in merges:
        vocab[one * 2] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


parts = st.lists(
    st.tuples(st.sampled_from([" ", "a", " kaka", "ü ", "\n", "世"]), st.integers(1, 60_000)),
    min_size=1, max_size=4,
)  # fmt: skip
LONG = {"blanks": Texts(blanks()), "words": Texts(small_tokenizer())}


@pytest.mark.parametrize("kind", LONG)
@given(parts=parts, most=st.sampled_from([100, 5_000, 200_000]))
def test_a_long_text_has_the_tokens_of_the_whole_or_too_many(
    kind: str, parts: list[tuple[str, int]], most: int
) -> None:
    texts = LONG[kind]
    text = "".join(part * num for part, num in parts)[:150_000]
    whole, found = texts.tokenizer.encode(text).ids, texts.plain(text, most)
    assert found == whole or len(whole) > most < len(found)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        (" " * 4_000_000, 11 << 16),
        ("word " * 800_000, 1 << 16),
        # The first pieces have hardly a token, which is no measure of what comes.
        (" " * 262_144 + "word " * 800_000, 5 << 16),
    ],
)
def test_a_text_is_tokenized_until_too_many_tokens_are_certain(text: str, taken: int) -> None:
    tokens = LONG["blanks"].plain(text, 4096)
    assert len(tokens) > 4096
    assert len(LONG["blanks"].tokenizer.decode(tokens)) <= taken


def message(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


# --- a front --------------------------------------------------------------------------------------


class Held(Texts):
    """Texts that begin with "long" are tokenized only when that is allowed."""

    def __init__(self) -> None:
        super().__init__(small_tokenizer(), CHAT_TEMPLATE)
        self.begun, self.allowed = threading.Event(), threading.Event()

    def plain(self, text: str, most: int = 0) -> list[int]:
        if text.startswith("long"):
            self.begun.set()
            assert self.allowed.wait(PATIENCE_S)
        return super().plain(text, most)


@asynccontextmanager
async def client_of_front(
    texts: Texts, **more: Any
) -> AsyncGenerator[tuple[httpx.AsyncClient, list[Any]]]:
    """A client of a front with these texts, and what its worker is asked."""
    async with (
        fronted(texts, **more) as (front, asked),
        httpx.AsyncClient(base_url=front.server.url, timeout=PATIENCE_S) as client,
    ):
        yield client, asked


async def completed(client: httpx.AsyncClient, prompt: Any, **more: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": "small", "prompt": prompt, **more})


@in_loop
async def test_no_client_waits_for_a_text_longer_than_its_own() -> None:
    texts = Held()
    async with client_of_front(texts) as (client, _):
        long = asyncio.create_task(completed(client, "long" + "a" * 100_000))
        await asyncio.to_thread(texts.begun.wait, PATIENCE_S)
        for prompt in ("short", " kaka" * 1000):
            assert (await completed(client, prompt)).status_code == 200
        refused = (await completed(client, "a" * 100_000)).json()["error"]
        assert refused["code"] == "context_length_exceeded"
        assert not long.done()
        texts.allowed.set()
        assert (await long).json()["error"]["code"] == "context_length_exceeded"


@in_loop
async def test_how_a_model_would_have_tokens_drawn_counts_where_a_client_says_nothing() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.9)
    async with client_of_front(Held(), defaults=defaults) as (client, asked):
        for more in ({}, {"top_k": 0, "temperature": None}, {"temperature": 0, "top_p": 1}):
            assert (await completed(client, "a", **more)).status_code == 200
        body = {"model": "small", "messages": message("hi")}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        drawn = [
            [
                one["sampling"].get(name, of)
                for name, of in (("temperature", 0), ("top_k", 0), ("top_p", 1))
            ]
            for one in asked
        ]
        assert drawn == [[0.6, 20, 0.9], [0.6, 0, 0.9], [0, 20, 1], [0.6, 20, 0.9]]
        shown = (await client.get("/v1/models")).json()["data"][0]
        assert shown["default_temperature"] == 0.6


@in_loop
async def test_a_special_token_stops_an_answer_by_its_text() -> None:
    """It has no text in an answer, so no text of an answer is equal to it."""
    async with client_of_front(Held()) as (client, asked):
        for stop in ("<|end|>", ["kaka", "<|user|>", "<|nothing|>"]):
            assert (await completed(client, "a", stop=stop, stop_token_ids=[7])).status_code == 200
    assert [one["sampling"]["stop_tokens"] for one in asked] == [[7, 512], [7, 514]]


@in_loop
async def test_tokens_that_the_model_has_not_are_refused_of_a_text_too() -> None:
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens(["<new>"])
    async with client_of_front(Texts(tokenizer, CHAT_TEMPLATE)) as (client, asked):
        body = {"model": "small", "messages": message("<new>")}
        for answer in (
            await client.post("/v1/chat/completions", json=body),
            await completed(client, "a<new>"),
            await completed(client, [516]),
        ):
            assert answer.status_code == 400
            assert "has tokens that are not in [0, 516)" in answer.json()["error"]["message"]
        assert not asked


@pytest.mark.parametrize(("length", "first"), [(1, 64), (4000, 4)])
@in_loop
async def test_of_many_prompts_few_long_ones_wait_at_once(length: int, first: int) -> None:
    """So another client's prompt is not behind all of them."""
    places, begun = asyncio.Semaphore(0), list[Ask]()

    async def generate(ask: Ask) -> AsyncGenerator[TokenEvent, None]:
        begun.append(ask)
        await places.acquire()
        yield TokenEvent(token=1, text="yes")
        yield TokenEvent(token=1, text="yes", finish="stop")

    async with (
        fronted(Held(), context=8192) as (front, _),
        httpx.AsyncClient(base_url=front.server.url, timeout=PATIENCE_S) as client,
    ):
        front.fleet.generate = generate  # type: ignore[method-assign]
        whole = asyncio.create_task(completed(client, [[7] * length] * 64))
        for done in range(64):
            expected = min(64, first + done)
            await until(partial(lambda num: len(begun) >= num, expected))
            assert len(begun) == expected
            places.release()
        assert len((await whole).json()["choices"]) == 64
