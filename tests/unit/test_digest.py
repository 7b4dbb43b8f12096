"""The digest of a prompt, and its proof on one link."""

import enum
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prefixkv
from prefixkv.cache.radix_key import RadixKey
from prefixkv.digest import check_digest, prompt_digest
from prefixkv.errors import RequestError, TokenError
from prefixkv.request import Request
from tests.support.processes import run_python


class Tenant(enum.IntEnum):
    ONE = 1


NAMESPACES: list[Any] = [
    None, 0, 1, -1, 2**70, "", "a", "b", "1", "None", b"", b"a", b"1", (), ("a",), (b"a",),
    ("a", "b"), ("asb",),
    ("ab",), (("a",), "b"), ("a", ("b",)), (None,), (1,), "\ud800",
]  # fmt: skip
PROMPTS = [[], [0], [1], [0, 0], [1, 2], [2, 1], [2**31 - 1]]


def test_two_prompts_have_one_digest_only_if_tokens_and_namespace_are_equal() -> None:
    named = list(product(PROMPTS, NAMESPACES))
    for (a, b), (c, d) in combinations(named, 2):
        assert prompt_digest(a, b) != prompt_digest(c, d)
    assert all(len(prompt_digest(*one)) == 32 for one in named)


_texts = st.recursive(
    st.none() | st.integers() | st.text() | st.binary(), lambda inner: st.tuples(inner, inner)
)


@given(st.lists(st.integers(0, 2**31 - 1)), _texts, st.lists(st.integers(0, 2**31 - 1)), _texts)
def test_no_other_prompt_has_its_digest(a: list[int], b: Any, c: list[int], d: Any) -> None:
    assert (prompt_digest(a, b) == prompt_digest(c, d)) == ((a, b) == (c, d))


def test_every_form_of_the_same_prompt_has_one_digest() -> None:
    tokens = [7, 8, 9]
    forms: list[Any] = [
        tokens, tuple(tokens), np.array(tokens, np.int32), np.array(tokens, np.int64),
        RadixKey(tokens), Request("a", tokens, room=1).key,
    ]  # fmt: skip
    assert {prompt_digest(form) for form in forms} == {Request("a", tokens, room=1).digest}
    assert prompt_digest(RadixKey(tokens, "x")) == prompt_digest(tokens, "x")
    assert (
        prompt_digest(tokens, True) == prompt_digest(tokens, 1) == prompt_digest(tokens, Tenant.ONE)
    )
    assert prefixkv.prompt_digest is prompt_digest


def test_another_process_comes_to_the_same_digest() -> None:
    code = "from prefixkv import prompt_digest; print(prompt_digest([1, 2], ('lora', 7)).hex())"
    assert run_python(code).stdout.strip() == prompt_digest([1, 2], ("lora", 7)).hex()


@pytest.mark.parametrize("namespace", [1.5, object(), frozenset({1}), [1], ("a", 1.5), {}])
def test_a_namespace_that_no_other_process_would_name_alike_is_refused(namespace: Any) -> None:
    for make in (
        lambda: prompt_digest([1], namespace),
        lambda: Request("a", [1], room=1, namespace=namespace),
    ):
        with pytest.raises(RequestError, match="namespace is "):
            make()


def test_what_is_no_prompt_has_no_digest() -> None:
    for tokens in ([-1], [1.5], "text", np.array([-1], np.int32)):
        with pytest.raises(TokenError):
            prompt_digest(tokens)


def test_an_engines_own_digest_is_16_to_64_bytes() -> None:
    for size in (16, 64):
        assert check_digest(bytearray(size)) == bytes(size)
    for digest in (bytes(15), bytes(65), b"", "text", None, 7):
        with pytest.raises(RequestError, match="digest"):
            check_digest(digest)  # type: ignore[arg-type]
