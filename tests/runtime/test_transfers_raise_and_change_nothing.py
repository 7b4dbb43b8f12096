"""A call of the transfer sides that raises has changed nothing: the open rooms run to their ends,
and the control thread hears of nothing that it cannot carry out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixkv.config import ControlConfig, DecodeConfig, PrefillConfig
from prefixkv.errors import ClosedError
from prefixkv.transfer import (
    DecodeTransfers,
    KVPoll,
    PrefillTransfers,
    RoomEnded,
    prompt_digest,
)
from tests.models.junk import JUNK, Broken
from tests.models.node_pair import make_pool
from tests.models.patience import until
from tests.models.picture import picture

PATIENT = ControlConfig(heartbeat_s=60.0, suspect_after_s=600.0, forget_after_s=900.0)
DIGEST = prompt_digest(range(30), "lora")
DECODE, ROOM, PAGES = "decode-0", 5, [5, 6, 50, 51, 1, 12, 13, 60]


class Pair:
    """A room whose first pages are sent; the rest is not."""

    def __init__(self) -> None:
        self.prefill = PrefillTransfers(make_pool(), PrefillConfig(control=PATIENT))
        self.decode = DecodeTransfers(make_pool(), DecodeConfig(control=PATIENT))
        self.prefill.add(ROOM, 0, 30, DECODE, DIGEST)
        self.decode.open(ROOM, 0, 30, 0, PAGES, self.prefill.endpoint, DIGEST)
        self.prefill.send_chunk(ROOM, 9, PAGES, decode=DECODE)

    def held(self) -> Any:
        prefill = self.prefill
        return picture(
            sorted(self.decode._keys), prefill._rooms, prefill._last, prefill._undelivered
        )

    def finish(self) -> None:
        self.prefill.send_chunk(ROOM, 30, PAGES, decode=DECODE, last=True, aux=b"x")
        ended: dict[str, RoomEnded] = {}

        def both() -> bool:
            for side in (self.prefill, self.decode):
                for event in side.take_events():
                    if isinstance(event, RoomEnded) and event.key.room == ROOM:
                        ended[type(side).__name__] = event
            return len(ended) == 2

        until(both)
        assert {event.poll for event in ended.values()} == {KVPoll.SUCCESS}, ended
        assert self.decode.stats()["control_errors"] == 0
        assert self.prefill.stats()["control_errors"] == 0

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    try:
        yield pair
        pair.finish()
    finally:
        pair.close()


def calls(pair: Pair) -> dict[str, tuple[Any, list[Any], dict[str, Any]]]:
    """Each call; as it stands, it is refused, or of no room that is here."""
    decode, prefill = pair.decode, pair.prefill
    here = prefill.endpoint
    return {
        "open": (decode.open, [ROOM, 0, 30, 0, PAGES, here, DIGEST], {"ticket": 7}),
        "decode.abort": (decode.abort, [99, 0, "why"], {}),
        "decode.refuse": (decode.refuse, [ROOM, 0, here, "why", 7, DIGEST], {}),
        "decode.fence": (decode.fence, ["nobody", 7], {}),
        "decode.move_weights": (decode.move_weights, [7], {}),
        "add": (prefill.add, [ROOM, 0, 30, DECODE, DIGEST], {}),
        "send_chunk": (
            prefill.send_chunk,
            [ROOM, 99, PAGES],
            {"decode": DECODE, "last": False, "aux": b"x", "ready": Broken(), "generation": 0},
        ),
        "prefill.abort": (prefill.abort, [99, 0, "why"], {"decode": DECODE}),
        "prefill.refuse": (prefill.refuse, [ROOM, 0, "why"], {"decode": DECODE}),
        "prefill.fence": (prefill.fence, ["nobody", 7], {}),
        "prefill.move_weights": (prefill.move_weights, [7], {}),
        "offer": (prefill.offer, [98, 0, 30, DIGEST, -1.0], {}),
        "withdraw": (prefill.withdraw, [99, 0, "why"], {}),
    }


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_whatever_is_handed_over(pair: Pair, data: st.DataObject) -> None:
    every = calls(pair)
    name = data.draw(st.sampled_from(sorted(every)))
    call, given_args, given_named = every[name]
    args, named = list(given_args), dict(given_named)
    places: list[Any] = [*range(len(args)), *named]
    for place in data.draw(st.sets(st.sampled_from(places), min_size=1)):
        junk = data.draw(JUNK)
        if name.endswith("move_weights") and isinstance(junk, str):
            return  # a call that is allowed, and ends the rooms
        if isinstance(place, int):
            args[place] = junk
        else:
            named[place] = junk
    before = pair.held()
    try:
        call(*args, **named)
    except Exception:
        assert pair.held() == before, (name, args, named)


def test_a_closed_side_takes_nothing_in() -> None:
    pair = Pair()
    pair.close()
    before = pair.held()
    every = calls(pair)
    every["open"][1][0] = every["add"][1][0] = every["decode.refuse"][1][0] = 77
    every["prefill.refuse"][1][0] = 77
    every["send_chunk"] = (pair.prefill.send_chunk, [ROOM, 20, PAGES], {"decode": DECODE})
    every["offer"][1][-1] = 1.0
    every["decode.move_weights"][1][0] = every["prefill.move_weights"][1][0] = "2"
    every["prefill.abort"][1][0] = ROOM
    for name, (call, args, named) in every.items():
        with pytest.raises(ClosedError):
            call(*args, **named)
        assert pair.held() == before, name
