"""Any bytes as a body: they are refused in OpenAI's form, or what is made of them can be done."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.engines.hf import Sampling
from prefixkv.engines.hf.small import CHAT_TEMPLATE, small_tokenizer
from prefixkv.serving.http import ApiError
from prefixkv.serving.openai import _NEUTRAL, ChatRequest, CompletionRequest, parse
from prefixkv.serving.text import TextError, Texts

KINDS = (ChatRequest, CompletionRequest)
KNOWN = sorted({field.name for kind in KINDS for field in msgspec.structs.fields(kind)})
TEXTS = Texts(small_tokenizer(), CHAT_TEMPLATE)

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**40]),
    st.floats(), st.text(max_size=20), st.sampled_from(["", "\0", "small", "user", "{{ 1/0 }}"]),
)  # fmt: skip
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | anything},
        optional={
            "content": st.text(max_size=30) | anything,
            "name": anything,
            "more": anything,
            "tool_calls": anything
            | st.lists(
                st.fixed_dictionaries({"function": st.fixed_dictionaries({"arguments": anything})}),
                max_size=2,
            ),
        },
    ),
    max_size=4,
)
prompts = (
    st.text(max_size=30) | anything
    | st.lists(st.text(max_size=3) | st.integers() | st.lists(st.integers() | anything, max_size=3))
)  # fmt: skip
names = st.sampled_from([*KNOWN, *_NEUTRAL]) | st.text(max_size=8)
bodies = st.builds(
    lambda base, more: {**base, **more},
    st.fixed_dictionaries(
        {"model": st.just("small")}, optional={"messages": messages, "prompt": prompts}
    ),
    st.dictionaries(names, anything, max_size=4),
)
plausible = st.fixed_dictionaries(
    {"model": st.just("small"), "messages": messages, "prompt": st.just("x")},
    optional={
        "max_tokens": st.integers(-2, 2**32), "temperature": st.floats(-1, 101),
        "top_p": st.floats(-0.1, 1.1), "top_k": st.integers(-3, 2**32), "n": st.integers(-1, 200),
        "seed": st.integers(-(2**64), 2**65), "stop": st.text(max_size=3) | st.lists(st.text()),
        "stream": st.booleans() | st.none(), "ignore_eos": st.booleans(),
        "min_tokens": st.integers(-1, 9), "stop_token_ids": st.lists(st.integers(-1, 2**31)),
        "chat_template_kwargs": anything, "reasoning_effort": anything, "tools": anything,
        "documents": anything, "stream_options": anything,
    },
)  # fmt: skip


def check(body: bytes, kind: type[Any]) -> bool:
    """Whether it is taken."""
    try:
        asked = parse(body, kind)
        if isinstance(asked, ChatRequest):
            with contextlib.suppress(TextError):
                assert TEXTS.chat(asked.messages, variables=asked.variables) is not None
    except ApiError as error:
        told = json.loads(msgspec.json.encode(error.body()))
        assert error.status == 400
        assert set(told["error"]) == {"message", "type", "param", "code"}
        assert error.response().status_code == 400
        return False
    Sampling(**msgspec.structs.asdict(asked.sampling()))  # the engine takes it
    assert asked.most_tokens is None or asked.most_tokens >= 1
    assert 1 <= asked.n <= 128
    assert isinstance(asked.stream, bool)
    return True


@pytest.mark.parametrize("kind", KINDS)
@given(body=st.binary(max_size=200))
def test_any_bytes(kind: type[Any], body: bytes) -> None:
    assert not check(body, kind), "a model's name and a prompt do not come about so"


@pytest.mark.parametrize("kind", KINDS)
@given(body=bodies)
def test_any_object(kind: type[Any], body: dict[str, Any]) -> None:
    check(json.dumps(body).encode("utf-8", "surrogatepass"), kind)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_what_is_nested_deeply(opening: bytes, closing: bytes) -> None:
    for depth in (2_000, 1_000_000):
        nested = opening * depth + b"1" + closing * depth
        assert not check(b'{"model":"small","messages":' + nested + b"}", ChatRequest)


@given(body=plausible)
def test_what_is_nearly_right(body: dict[str, Any]) -> None:
    for kind, other in ((ChatRequest, "prompt"), (CompletionRequest, "messages")):
        check(json.dumps({k: v for k, v in body.items() if k != other}).encode(), kind)


@given(body=plausible, cut=st.integers(0, 400), byte=st.integers(0, 255))
def test_what_was_right_with_a_byte_changed(body: dict[str, Any], cut: int, byte: int) -> None:
    raw = bytearray(json.dumps(body).encode())
    raw[cut % len(raw)] = byte
    check(bytes(raw), ChatRequest)
