"""Keys: every form in which an engine has tokens packs to the same bytes, and what is no token is
refused."""

import array

import numpy as np
import pytest
import torch

from prefixkv.cache.radix_key import RadixKey, token_list
from prefixkv.errors import TokenError

TOKENS = [5, 0, 1, 150_000, 2**31 - 1]
PACKED = b"".join(token.to_bytes(4, "little") for token in TOKENS)


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        tuple(TOKENS),
        array.array("i", TOKENS),
        array.array("q", TOKENS),
        np.array(TOKENS, np.int32),
        np.array(TOKENS, np.int64),
        np.array(TOKENS, np.uint32),
        np.array(TOKENS, ">i4"),
        np.repeat(np.array(TOKENS, np.int32), 2)[::2],
        [np.int64(token) for token in TOKENS],
        torch.tensor(TOKENS, dtype=torch.int32),
        torch.tensor(TOKENS, dtype=torch.int64),
        RadixKey(TOKENS),
    ],
    ids=lambda tokens: type(tokens).__name__ + str(getattr(tokens, "dtype", "")),
)
def test_every_form_packs_alike(tokens):
    key = RadixKey(tokens)
    assert key.data == PACKED
    assert len(key) == len(TOKENS)
    assert key.tokens().tolist() == TOKENS
    listed = token_list(tokens)
    assert (listed, {type(token) for token in listed}) == (TOKENS, {int})
    assert listed is not tokens


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2.0],
        [1, True],
        [False],
        [1, np.bool_(True)],
        [2**31],
        [-(2**31) - 1],
        ["a"],
        "ab",
        b"ab",
        5,
        None,
        [[1]],
        np.array([1.0]),
        np.array([True]),
        np.array([[1]], np.int32),
        np.array([2**31], np.int64),
        np.array([-1], np.int64),
        torch.tensor([1.5]),
    ],
    ids=repr,
)
def test_what_is_no_token_is_refused(tokens):
    for make in (RadixKey, token_list):
        with pytest.raises(TokenError):
            make(tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        [3, 4, -7],
        np.array([3, 4, -7], np.int32),
        array.array("i", [3, 4, -7]),
        torch.tensor([3, 4, -7]),
    ],
    ids=["list", "numpy", "array", "torch"],
)
def test_negative_tokens_are_found_where_they_enter(tokens):
    key = RadixKey([3])
    for take in (RadixKey, token_list, key.extend):
        with pytest.raises(TokenError, match="token -7 at 2 "):
            take(tokens)
    assert len(key) == 1


def test_a_key_grows_and_keeps_what_was_taken_of_it():
    key = RadixKey([1, 2])
    before = key.data
    key.append(3)
    key.append(np.int64(4))
    key.extend([5, 6])
    assert len(key) == 6
    assert key.tokens().tolist() == [1, 2, 3, 4, 5, 6]
    assert len(before) == 8
    for wrong in (True, -1, 2**31, 1.5):
        with pytest.raises(TokenError):
            key.append(wrong)
    with pytest.raises(TokenError):
        key.extend([7, -1])
    assert len(key) == 6


def test_arrays_are_copied_both_ways():
    tokens = np.array([1, 2, 3], np.int32)
    key = RadixKey(tokens)
    tokens[0] = 9
    out = key.tokens()
    out[1] = 9
    assert key.tokens().tolist() == [1, 2, 3]


def test_a_key_of_a_key_is_independent():
    key = RadixKey([1], namespace="a")
    copy = RadixKey(key)
    copy.append(2)
    assert (len(key), len(copy), copy.namespace) == (1, 2, "a")
    assert RadixKey(key, namespace="b").namespace == "b"


@pytest.mark.parametrize("bad", [-1, -(2**31), -(2**40), 2**31, 2**32, 2**62])
def test_one_value_in_many_that_is_no_token_is_found(bad):
    values = np.arange(1000)
    values[700] = bad
    with pytest.raises(TokenError, match=f"token {bad} at 700 "):
        RadixKey(values)
    key = RadixKey([1])
    with pytest.raises(TokenError, match=f"token {bad} at 700 "):
        key.extend(array.array("q", values.tolist()))
    assert len(key) == 1


def test_what_the_caller_has_packed_is_taken_as_it_is():
    key = RadixKey.of_packed(PACKED, "lora")
    key.extend_packed(PACKED)
    assert key.tokens().tolist() == TOKENS * 2
    assert key.namespace == "lora"
