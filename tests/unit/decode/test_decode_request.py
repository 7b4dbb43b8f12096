"""The table of a decode request's states."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.errors import InternalError
from prefixkv.pages.manager import PageManager
from prefixkv.protocol.ids import RoomKey
from prefixkv.request import Request


def new() -> DecodeRequest:
    request = Request(
        "a", [1, 2, 3, 4, 5], max_new_tokens=4, room=9, generation=2, prefill="p", namespace="lora"
    )
    return DecodeRequest(request, PageManager(8, 4, 2), 1.0)


def test_every_state_has_a_row_and_the_ended_ones_lead_nowhere() -> None:
    assert set(DecodeRequest.TRANSITIONS) == set(DecodeState)
    for state, nexts in DecodeRequest.TRANSITIONS.items():
        assert state.ended == (not nexts)
        assert state.ended or DecodeState.ABORTED in nexts, (
            "an abort is possible wherever a request is"
        )


@pytest.mark.parametrize(("before", "after"), list(product(DecodeState, DecodeState)))
def test_only_what_is_in_the_table_happens(before: DecodeState, after: DecodeState) -> None:
    req = new()
    req.state = before
    if after in DecodeRequest.TRANSITIONS[before]:
        req.become(after)
        assert req.state is after
    else:
        with pytest.raises(
            InternalError, match=f"'a' cannot go from {before.value} to {after.value}"
        ):
            req.become(after)
        assert req.state is before


def test_a_new_request_counts_its_tokens_and_holds_no_pages() -> None:
    req = new()
    assert (req.prompt_len, req.kv_len, req.fill_len, req.max_pages) == (5, 5, 5, 2)
    assert (req.pages.tolist(), req.row, req.resumed, req.room_key) == (
        [],
        -1,
        False,
        RoomKey(9, 2),
    )
    assert req.key.namespace == "lora"
    req.key.append(6)
    assert len(req.request.key) == 5, "its key is its own"
    req.output += [6, 7]
    tokens = req.tokens
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert tokens.dtype == np.int32
    assert req.resumed
