"""How a front's texts and defaults become tokens: no client waits for the long text of another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from prefixkv.engines.hf.generation import SamplingDefaults
from prefixkv.engines.hf.small import CHAT_TEMPLATE, small_tokenizer
from prefixkv.serving.text import Texts
from tests.support.fronts import fronted
from tests.support.patience import PATIENCE_S
from tests.support.scenes import in_loop


def message(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


# --- a front --------------------------------------------------------------------------------------


class Held(Texts):
    """Texts that begin with "long" are tokenized only when that is allowed."""

    def __init__(self) -> None:
        super().__init__(small_tokenizer(), CHAT_TEMPLATE)
        self.begun, self.allowed = threading.Event(), threading.Event()

    def plain(self, text: str) -> list[int]:
        if text.startswith("long"):
            self.begun.set()
            assert self.allowed.wait(PATIENCE_S)
        return super().plain(text)


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
