"""A request on prefill that names another decode worker than the one that promises its pages: both
sides hear both names, at once; but two workers that count alike are left alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from prefixkv.config import CurveConfig
from prefixkv.errors import AbortedError, WrongWorkerError
from prefixkv.protocol.commands import AbortRoom
from prefixkv.protocol.events import Bootstrapped, RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Outcome, PromiseAck
from tests.control.wire import HELLO, SENT, DecodePeer, add_room, kinds
from tests.protocol.rooms import DECODE, TIMING, promise

OTHER = PeerId("decode-1", 7)
WRONG = RoomKey(*SENT.numbers, OTHER.name)
NUM_TOKENS = promise().fill_len


def ended(out: list[Any]) -> list[RoomEnded]:
    return [one for one in out if isinstance(one, RoomEnded)]


@pytest.fixture(params=["the promise first", "the request first"])
def peer(request: pytest.FixtureRequest) -> DecodePeer:
    peer = DecodePeer().known()
    if request.param == "the promise first":
        peer.say(promise())
        peer.on(add_room(WRONG, NUM_TOKENS))
    else:
        peer.on(add_room(WRONG, NUM_TOKENS))
        assert [type(body) for body in peer.say(promise())] == [PromiseAck]
    peer.take_said()
    return peer


def test_a_name_that_no_worker_has_ends_both_sides_with_both_names(peer: DecodePeer) -> None:
    assert not ended(peer.after(0.3)), "that worker may be about to say Hello"
    out = peer.after(0.3)
    [end] = ended(out)
    assert (end.key, end.poll) == (WRONG, KVPoll.FAILED)
    assert isinstance(end.error, WrongWorkerError)
    [outcome] = [one for one in out if isinstance(one, Outcome)]
    assert not outcome.ok
    for text in (str(end.error), outcome.error):
        assert "'decode-0'" in text
        assert "'decode-1'" in text
    assert SourceFree(WRONG) in out


def test_a_worker_that_prefill_knows_has_longer(peer: DecodePeer) -> None:
    peer.say(HELLO, OTHER)
    peer.say(promise(8))
    peer.on(add_room(RoomKey(8, 0, OTHER.name), NUM_TOKENS))
    out = peer.after(0.6)
    assert [end.key for end in ended(out)] == [WRONG], "it was not known when the two met"
    assert not ended(peer.after(1.0))
    assert [end.key for end in ended(peer.after(0.6))] == [RoomKey(8, 0, OTHER.name)]


def test_two_workers_that_count_alike_are_left_alone(peer: DecodePeer) -> None:
    """The same number, the same prompt: the other halves come a little later."""
    peer.say(HELLO, OTHER)
    assert ended(peer.say(promise(), OTHER)) == []
    assert [one.key for one in peer.on(add_room(SENT, NUM_TOKENS)) if isinstance(one, Bootstrapped)]
    for _ in range(5):
        assert not ended(peer.after(1.0))
    assert peer.control.counters["frames_dropped"] == 0


def test_a_worker_that_has_not_started_is_waited_for() -> None:
    peer = DecodePeer().known()
    peer.on(add_room(WRONG, NUM_TOKENS))
    peer.say(promise(8))  # of another room
    for _ in range(3):
        assert not ended(peer.after(1.0))
    peer.say(HELLO, OTHER)
    assert "Bootstrapped" in kinds(peer.say(promise(), OTHER))


def test_a_promise_for_another_prompt_says_nothing_of_the_name() -> None:
    peer = DecodePeer().known()
    peer.on(add_room(WRONG, NUM_TOKENS, b"another prompt's"))
    peer.say(promise())
    for _ in range(3):
        assert not ended(peer.after(1.0))


def test_what_has_ended_meanwhile_is_not_ended_again(peer: DecodePeer) -> None:
    out = peer.on(AbortRoom(WRONG, "enough"))
    assert [type(end.error) for end in ended(out)] == [AbortedError]
    assert not ended(peer.after(5.0))


def test_where_names_belong_to_keys_no_worker_ends_a_request_of_another() -> None:
    key = "x" * 40
    curve = CurveConfig(key, key, allowed_clients={key: DECODE.name, "y" * 40: OTHER.name})
    peer = DecodePeer(timing=dataclasses.replace(TIMING, curve=curve))
    peer.say(HELLO, credential=key)
    peer.on(add_room(WRONG, NUM_TOKENS))
    peer.say(promise(), credential=key)
    out = peer.after(5.0)
    assert not ended(out)
    assert [one.ok for one in out if isinstance(one, Outcome)] == [False]
