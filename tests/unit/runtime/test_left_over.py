"""A room's number whose former request was on one side only, or ended on one side first, is used
again: both sides end at once and by name, or it works, whichever side hears of the next request
first. No deadline here is shorter than a test may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from prefixkv.config import ControlConfig, DecodeConfig, PrefillConfig
from prefixkv.errors import RequestError, TransferTimeoutError
from prefixkv.request import Request
from prefixkv.runtime.decode_node import DecodeNode
from prefixkv.runtime.prefill_node import PrefillNode
from tests.support.node_pair import NodePair, Tokens, left, make_pool, tokens_of

PATIENT = ControlConfig(
    bootstrap_timeout_s=300.0, waiting_timeout_s=300.0, transfer_timeout_s=300.0,
    parked_timeout_s=300.0, suspect_after_s=60.0,
)  # fmt: skip
ROOM = 7
FORMER, NEXT = tokens_of(1, 21), tokens_of(2, 21)


@pytest.fixture
def pair() -> Iterator[NodePair]:
    with (
        PrefillNode(make_pool(), PrefillConfig(control=PATIENT)) as prefill,
        DecodeNode(make_pool(), DecodeConfig(control=PATIENT)) as decode,
    ):
        pair = NodePair(decode, prefill)
        pair.submit("known", tokens_of(9, 9))
        pair.run("known")
        yield pair


def let_pass(pair: NodePair) -> None:
    """What was said has most likely arrived; nothing below depends on it."""
    end_s = time.monotonic() + 0.1
    while time.monotonic() < end_s:
        pair.step()
        time.sleep(0.005)


def request(pair: NodePair, tokens: Tokens) -> Request:
    node = pair.decode.peer_id.name
    return Request("former", tokens, room=ROOM, prefill=pair.prefill.endpoint, decode=node)


def to_decode(pair: NodePair, rid: str, tokens: Tokens) -> None:
    pair.submit(rid, tokens, room=ROOM, tell=False)


def to_prefill(pair: NodePair, rid: str, tokens: Tokens) -> None:
    pair.p.add(rid, tokens, ROOM)


# --- what a former request leaves -----------------------------------------------------------------


def prefill_waits(pair: NodePair) -> None:
    to_prefill(pair, "former", FORMER)
    pair.step()


def prefill_aborted(pair: NodePair) -> None:
    to_prefill(pair, "former", FORMER)
    pair.prefill.abort("former")
    pair.until(lambda: "former" in pair.p.failed)


def prefill_aborted_not_popped(pair: NodePair) -> None:
    to_prefill(pair, "former", FORMER)
    pair.prefill.abort("former")
    let_pass(pair)


def prefill_refused(pair: NodePair) -> None:
    pair.prefill.refuse(request(pair, FORMER), "no")
    let_pass(pair)


def decode_waits(pair: NodePair) -> None:
    to_decode(pair, "former", FORMER)
    let_pass(pair)


def decode_aborted(pair: NodePair) -> None:
    decode_waits(pair)
    pair.decode.abort("former")
    pair.until(lambda: "former" in pair.d.ended and pair.decode.idle)


def decode_refused(pair: NodePair) -> None:
    pair.decode.refuse(request(pair, FORMER), "no")
    pair.until(lambda: pair.decode.idle)


def prefill_aborted_then_decode(pair: NodePair) -> None:
    prefill_aborted(pair)
    to_decode(pair, "former", FORMER)
    pair.until(lambda: "former" in pair.d.ended)


def decode_aborted_then_prefill(pair: NodePair) -> None:
    decode_aborted(pair)
    to_prefill(pair, "former", FORMER)
    pair.until(lambda: "former" in pair.p.failed)


def both_aborted_on_decode(pair: NodePair) -> None:
    pair.p.hold = True
    to_decode(pair, "former", FORMER)
    to_prefill(pair, "former", FORMER)
    pair.until(lambda: "former" in pair.p.computing)
    pair.decode.abort("former")
    pair.until(lambda: "former" in pair.d.ended and "former" in pair.p.failed)
    pair.p.hold = False
    pair.until(lambda: not pair.decode.num_rooms)


def both_succeeded(pair: NodePair) -> None:
    to_decode(pair, "former", FORMER)
    to_prefill(pair, "former", FORMER)
    pair.run("former")


LEFT_OVER: list[Callable[[NodePair], None]] = [
    prefill_waits, prefill_aborted, prefill_aborted_not_popped, prefill_refused,
    decode_waits, decode_aborted, decode_refused, prefill_aborted_then_decode,
    decode_aborted_then_prefill, both_aborted_on_decode, both_succeeded,
]  # fmt: skip


class Ends:
    """How each side's half of the next request ended; None: it succeeded."""

    def __init__(self, pair: NodePair) -> None:
        self.pair = pair
        self.refused: dict[str, Exception] = {}

    def begin(self, side: str, tokens: Tokens) -> None:
        try:
            (to_decode if side == "decode" else to_prefill)(self.pair, "next", tokens)
        except RequestError as error:
            self.refused[side] = error
            if side == "decode":  # as an engine does, so that prefill hears of it
                with suppress(RequestError):
                    self.pair.decode.refuse(request(self.pair, tokens), str(error))

    def known(self, side: str) -> bool:
        if side in self.refused:
            return True
        if side == "decode":
            return "next" in self.pair.d.ended
        return "next" in self.pair.p.failed or "next" in self.pair.p.sent

    def of(self, side: str) -> Exception | None:
        ended = self.pair.d.ended if side == "decode" else self.pair.p.failed
        return self.refused.get(side) or ended.get("next")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["decode", "prefill"])
@pytest.mark.parametrize("tokens", [FORMER, NEXT], ids=["the same prompt", "another prompt"])
@pytest.mark.parametrize("left_over", LEFT_OVER, ids=lambda one: one.__name__)
def test_both_end_at_once_or_it_works(
    pair: NodePair, left_over: Callable[[NodePair], None], tokens: Tokens, first: str
) -> None:
    lives = "waits" in left_over.__name__
    if lives and (tokens is FORMER or (left_over is decode_waits and first == "prefill")):
        pytest.skip("the former request lives, and may be taken for this one")
    left_over(pair)
    ends = Ends(pair)
    sides = ["decode", "prefill"] if first == "decode" else ["prefill", "decode"]
    for side in sides:
        ends.begin(side, tokens)
        let_pass(pair)
    pair.until(lambda: ends.known("decode") and ends.known("prefill"), 8.0)
    errors = [ends.of(side) for side in sides]
    assert not any(isinstance(error, TransferTimeoutError) for error in errors), errors
    if tokens is NEXT and "waits" not in left_over.__name__ and not ends.refused:
        assert errors == [None, None], "what a former request left is not this one's"
    # And from then on the number is as good as any other.
    for rid in ("former", "next"):
        pair.decode.abort(rid)
        pair.prefill.abort(rid)
    pair.until(lambda: not left(pair.decode) and not left(pair.prefill), 10.0)
    to_decode(pair, "last", tokens_of(3, 21))
    to_prefill(pair, "last", tokens_of(3, 21))
    pair.until(lambda: "last" in pair.d.ended, 10.0)
    assert pair.d.ended["last"] is None
