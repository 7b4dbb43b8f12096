"""Weights that are changed in place while both sides serve: what is of another version ends by name
on both sides at once, nothing is mixed, and the pair works again once both have the new version.
The long profile is `fuzz/run.py weights`."""

from typing import Any

import msgspec
import pytest

from prefixkv.decode.request import DecodeState
from prefixkv.digest import prompt_digest
from prefixkv.errors import WeightsVersionError
from prefixkv.protocol.commands import AbortRoom, MoveWeights, OfferRoom
from prefixkv.protocol.events import RoomEnded
from prefixkv.protocol.messages import Abort, Drained, Outcome, OutcomeAck
from tests.support.sim_weights import WeightsSim, weights_pair, weights_simulation
from tests.unit.control.wire import (
    KEY,
    TIMING,
    DecodePeer,
    PrefillPeer,
    add_room,
    kinds,
    of,
    promise,
)
from tests.unit.protocol.rooms import PROMPT

OF_OLD = promise()  # the version "", which both sides begin with
OF_NEW = msgspec.structs.replace(promise(), weights_version="v2", ticket=9)
MOVE = MoveWeights("v2")
KEEP = MoveWeights("v2", ends_waiting=False)
OLD_AND_NEW = "", "v2"
NEW_AND_OLD = "v2", ""


def versions(said: list[Any], kind: type) -> tuple[str, str]:
    """The room's, and the other's, as one RoomEnded or one word says it."""
    (one,) = of(said, kind)
    if isinstance(one, RoomEnded):
        assert isinstance(one.error, WeightsVersionError)
        return one.error.versions
    assert not isinstance(one, Outcome) or (not one.ok and one.drained)
    return one.versions


# --- prefill --------------------------------------------------------------------------------------


def test_a_promise_of_other_weights_is_refused_before_and_after_the_request() -> None:
    """And whichever comes first, both hear of it at once."""
    peer = DecodePeer().known()
    assert versions(peer.say(OF_NEW), Outcome) == NEW_AND_OLD
    assert versions(peer.on(add_room()), RoomEnded) == NEW_AND_OLD

    peer = DecodePeer().known()
    assert peer.on(add_room()) == []
    said = peer.say(OF_NEW)
    assert kinds(said) == ["RoomEnded", "Outcome", "SourceFree"]
    assert versions(said, RoomEnded) == versions(said, Outcome) == NEW_AND_OLD
    peer.say(OutcomeAck(*KEY.numbers, 0, OF_NEW.ticket))
    assert peer.control.num_rooms == 0


@pytest.mark.parametrize("move", [MOVE, KEEP])
def test_a_move_ends_what_was_promised_and_what_is_sent(move: MoveWeights) -> None:
    for chunks in (0, 1):
        peer = DecodePeer().bootstrapped()
        jobs = [job for _ in range(chunks) for job in peer.chunk(1, [30])]
        said = peer.on(move)
        assert versions(said, RoomEnded) == OLD_AND_NEW
        (outcome,) = of(said, Outcome)
        assert outcome.versions == OLD_AND_NEW
        assert outcome.drained is not bool(chunks)
        assert peer.chunk(1, [30], last=True) == [], "computed before the move, or after: not sent"
        for job in jobs:
            peer.ended(job.job_id)
        peer.say(OutcomeAck(*KEY.numbers, 0))
        peer.say(Abort(*KEY.numbers, "", 0))
        assert peer.control.num_rooms == 0
        said = peer.say(OF_NEW) + peer.on(add_room())
        assert kinds(said) == ["PromiseAck", "Bootstrapped"], "the number under the new version"


def test_a_promise_that_waits_for_its_request_ends_with_the_move() -> None:
    peer = DecodePeer().known()
    assert kinds(peer.say(OF_OLD)) == ["PromiseAck"]
    assert versions(peer.on(KEEP), Outcome) == OLD_AND_NEW
    assert versions(peer.on(add_room()), RoomEnded) == OLD_AND_NEW
    peer.say(OutcomeAck(*KEY.numbers, 0))
    peer.after(TIMING.parked_timeout_s)
    assert peer.control.num_rooms == 0


def test_a_request_that_waits_for_its_promise_goes_on_if_nothing_was_computed() -> None:
    peer = DecodePeer().known()
    peer.on(add_room())
    assert peer.on(KEEP) == []
    assert kinds(peer.say(OF_NEW)) == ["Bootstrapped"]
    # An engine that computes before the promise has old KV by now, or may have.
    for chunks, move in ((0, MOVE), (1, KEEP)):
        peer = DecodePeer().known()
        peer.on(add_room())
        for _ in range(chunks):
            peer.chunk(0, [30], clip=True)
        assert versions(peer.on(move), RoomEnded) == OLD_AND_NEW


def test_the_version_that_it_has_already_moves_nothing() -> None:
    peer = DecodePeer().bootstrapped()
    assert peer.on(MoveWeights("")) == []
    assert kinds(peer.chunk(1, [30])) == ["WriteJob"]


def test_an_offer_is_of_the_weights_that_computed_it() -> None:
    offer = OfferRoom(KEY, 10, PROMPT, 30.0)
    peer = DecodePeer().known()
    peer.on(offer)
    assert versions(peer.on(MOVE), RoomEnded) == OLD_AND_NEW
    assert versions(peer.say(OF_OLD), Outcome) == OLD_AND_NEW
    peer = DecodePeer().known()
    peer.on(offer)
    said = peer.say(OF_NEW)
    assert kinds(said) == ["RoomEnded", "SourceFree", "Outcome"]
    assert versions(said, RoomEnded) == versions(said, Outcome) == NEW_AND_OLD
    peer = DecodePeer().known()
    peer.on(offer)
    unproved = msgspec.structs.replace(OF_NEW, digest=prompt_digest(range(9)))
    assert versions(peer.say(unproved), Outcome) == NEW_AND_OLD
    assert kinds(peer.say(OF_OLD)) == ["PromiseAck", "Bootstrapped"], "it does not know the prompt"


def test_decode_says_that_it_has_moved() -> None:
    """Before the request, and after it."""
    word = Abort(*KEY.numbers, "moved", 0, OLD_AND_NEW)
    peer = DecodePeer().bootstrapped()
    said = peer.say(word)
    assert versions(said, RoomEnded) == OLD_AND_NEW
    assert kinds(said) == ["RoomEnded", "Drained", "SourceFree"]
    peer = DecodePeer().known()
    peer.say(word)
    assert versions(peer.on(add_room()), RoomEnded) == OLD_AND_NEW


def test_a_success_that_was_said_stands() -> None:
    """Decode had promised under the old weights, has them still, and has all of their KV."""
    peer = DecodePeer().bootstrapped()
    (job,) = peer.chunk(1, [30, 31], last=True)
    assert kinds(peer.ended(job.job_id)) == ["RoomEnded", "Outcome", "SourceFree"]
    assert peer.on(MOVE) == []


# --- decode ---------------------------------------------------------------------------------------


def test_a_move_of_decode_ends_its_rooms_and_tells_prefill() -> None:
    peer = PrefillPeer().opened()
    said = peer.on(MOVE)
    assert versions(said, RoomEnded) == versions(said, Abort) == OLD_AND_NEW
    assert kinds(peer.say(Drained(*KEY.numbers, 0))) == ["RoomDrained"]
    assert kinds(peer.open(OF_NEW)) == ["Promise"]


def test_a_room_that_was_not_promised_yet_ends_too_and_prefill_hears_why() -> None:
    peer = PrefillPeer()
    peer.open()
    peer.open(promise(8))
    peer.on(AbortRoom(KEY, "enough"))
    assert kinds(peer.on(MOVE)) == ["RoomEnded", "RoomDrained"], "one has ended"
    told = peer.greet()
    assert [body.versions for body in told] == [None, OLD_AND_NEW]
    assert kinds(told) == ["Abort"] * 2


def test_prefill_says_that_its_weights_are_others() -> None:
    peer = PrefillPeer().opened()
    refusal = msgspec.structs.replace(peer.outcome(ok=False), versions=OLD_AND_NEW)
    said = peer.say(refusal)
    assert versions(said, RoomEnded) == OLD_AND_NEW
    assert "prefill has 'v2'" in str(of(said, RoomEnded)[0].error)


# --- whole workers --------------------------------------------------------------------------------


def works_again(sim: WeightsSim) -> None:
    """Once both have moved. A rank that was silent at the end of the storm may cost a first try its
    deadline."""
    sim.catch_up()
    ends: list[set[DecodeState]] = []
    for first in (0, 3, 6):
        asked = sim.ask(first)
        for taken in range(60_000):
            sim.step()
            if sim.is_over(taken):
                break
        sim.assert_at_rest()
        ends.append({sim.decode.outcomes[rid] for rid in asked})
        if ends[-1] == {DecodeState.FINISHED}:
            return
    raise AssertionError(ends)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2, 7])
def test_no_answer_is_of_two_versions(seed: int) -> None:
    """Under drops, aborts, failing writes, restarts with either version, retractions, joined
    flights, several ranks that move at different times. Every byte and token is checked."""
    sim = weights_simulation(seed)
    sim.run()
    works_again(sim)


@pytest.mark.slow
def test_what_ends_for_a_move_ends_by_name_and_not_by_a_deadline() -> None:
    found: dict[str, set[str]] = {"decode": set(), "prefill": set()}
    for seed in range(4):
        sim = weights_pair(seed)
        sim.run()
        for side, errors in sim.ends.items():
            found[side] |= errors
        works_again(sim)
    assert found["prefill"] <= {"WeightsVersionError", "AbortedError"}, found
    assert found["decode"] <= found["prefill"] | {"AdmissionTimeoutError"}, found
    assert "WeightsVersionError" in found["decode"] & found["prefill"], "nothing was tried"
