"""What clients say of their sessions, wherever they say it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from prefixkv import Hints
from prefixkv.serving.hints import HEADER, SessionFields
from prefixkv.serving.http import ApiError


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
    [
        ("x" * 257, {}, HEADER),
        ("", {"ends": True, "returns_after": 30}, "kv_hints.returns_after"),
    ],
)
def test_what_cannot_be_is_refused_by_name(header: str, said: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        hints(header, kv_hints=said)
    assert (raised.value.status, raised.value.param) == (400, param)
