"""What clients say of their sessions, wherever they say it."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from starlette.requests import Request

from prefixkv import Hints
from prefixkv.engines.hf.small import CHAT_TEMPLATE, small_tokenizer
from prefixkv.serving.api import HEADER, SessionFields
from prefixkv.serving.http import ApiError
from prefixkv.serving.text import Texts
from tests.support.fronts import fronted
from tests.support.patience import PATIENCE_S
from tests.support.scenes import in_loop


def hints(header: str = "", **body: Any) -> Hints:
    headers = [(HEADER.lower().encode(), header.encode())] if header else []
    asked = Request({"type": "http", "headers": headers})
    return msgspec.convert(body, SessionFields).hints(asked)


def test_a_session_is_named_by_the_most_precise_word() -> None:
    assert hints() == Hints()
    words: dict[str, Any] = {"prompt_cache_key": "key"}
    assert hints(**words).session == "key"
    assert hints("header", **words).session == "header"
    words["session_id"] = "body"
    assert hints("header", **words).session == "body"
    words["kv_hints"] = {"session": "hints", "ends": True, "of_later_versions": [1]}
    assert hints("header", **words) == Hints(session="hints", ends=True)


@pytest.mark.parametrize(
    ("retention", "said", "returns_after"),
    [
        ("24h", {}, 600), ("24h", {"returns_after": 30}, 30), ("24h", {"ends": True}, None),
        ("in_memory", {}, None), ("in-memory", {"returns_after": 120}, 120),
    ],
)  # fmt: skip
def test_24_hours_are_the_longest_class_where_nothing_else_is_said(
    retention: str, said: dict[str, Any], returns_after: int | None
) -> None:
    found = hints(prompt_cache_retention=retention, kv_hints=said)
    assert found == msgspec.convert({**said, "returns_after": returns_after}, Hints)


@pytest.mark.parametrize(
    ("header", "said", "param"),
    [("x" * 257, {}, HEADER), ("", {"ends": True, "returns_after": 30}, "kv_hints.returns_after")],
)
def test_what_cannot_be_is_refused_by_name(header: str, said: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        hints(header, kv_hints=said)
    assert (raised.value.status, raised.value.param) == (400, param)


@in_loop
async def test_a_front_s_workers_hear_of_a_session_in_its_salt_alone() -> None:
    async with (
        fronted(Texts(small_tokenizer(), CHAT_TEMPLATE)) as (front, asked),
        httpx.AsyncClient(base_url=front.server.url, timeout=PATIENCE_S) as client,
    ):
        body: dict[str, Any] = {
            "model": "small", "messages": [{"role": "user", "content": "Hello"}],
            "cache_salt": "tenant", "kv_hints": {"returns_after": 120},
        }  # fmt: skip
        answer = await client.post("/v1/chat/completions", json=body, headers={HEADER: "a/b"})
        assert answer.status_code == 200
        said = {"json": {"cache_salt": "tenant"}}, {}
        for more in said:
            answer = await client.post("/v1/sessions/a%2Fb", **more)
            assert (answer.status_code, answer.content) == (202, b"")
        generated, *announced = asked
        assert generated["hints"] == msgspec.to_builtins(Hints(session="a/b", returns_after=120))
        assert announced == [
            {"session": "a/b", "namespace": generated["namespace"]},
            {"session": "a/b", "namespace": ""},
        ]
        for path, content in (("a", b'{"ends": true}'), ("a" * 257, b"")):
            answer = await client.post(f"/v1/sessions/{path}", content=content)
            assert answer.status_code == 400
        assert len(asked) == 3
