"""A call of the transfer sides that raises has changed nothing, and what it raises for a wrong
argument is CallerError: the open rooms run to their ends, and the control thread hears of nothing
that it cannot carry out."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixkv.config import ControlConfig, DecodeConfig, PrefillConfig
from prefixkv.errors import CallerError, shown
from prefixkv.transfer import DecodeTransfers, KVPoll, PrefillTransfers, RoomEnded, prompt_digest
from tests.support.junk import JUNK, Broken, OwnError
from tests.support.node_pair import make_pool
from tests.support.patience import until
from tests.support.picture import picture

PATIENT = ControlConfig(heartbeat_s=60.0, suspect_after_s=600.0, forget_after_s=900.0)
DIGEST = prompt_digest(range(30), "lora")
EXAMPLES = int(os.environ.get("PREFIXKV_JUNK_EXAMPLES", "100"))  # more for a long run
DECODE, ROOM, PAGES = "decode-0", 5, [5, 6, 50, 51, 1, 12, 13, 60]


class Pair:
    """A room whose first pages are sent; the rest is not."""

    def __init__(self) -> None:
        self.prefill = PrefillTransfers(make_pool(), PrefillConfig(control=PATIENT))
        self.decode = DecodeTransfers(make_pool(), DecodeConfig(control=PATIENT))
        self.prefill.add(ROOM, 0, 30, DECODE, DIGEST)
        self.decode.open(ROOM, 0, 30, 0, PAGES, self.prefill.endpoint, DIGEST)
        self.prefill.send_chunk(ROOM, 9, PAGES, decode=DECODE)
        self.commands = 0
        for side in (self.prefill, self.decode):
            side.submit = self._counting(side.submit)  # type: ignore[method-assign]

    def _counting(self, submit: Callable[[Any], None]) -> Callable[[Any], None]:
        def counted(command: Any) -> None:
            submit(command)
            self.commands += 1

        return counted

    def held(self) -> Any:
        """All that no call that raises may change, with what the control threads were told."""
        prefill, decode = self.prefill, self.decode
        return self.commands, picture(
            sorted(decode._rooms), prefill._rooms, prefill._undelivered,
            decode._undelivered, decode._weights_version, prefill._weights_version,
        )  # fmt: skip

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
        "open": (decode.open, [ROOM, 0, 30, 0, PAGES, here, DIGEST], {"ticket": 7, "windows": ()}),
        "decode.abort": (decode.abort, [99, 0, "why"], {}),
        "decode.wait": (decode.wait, ["0"], {}),
        "decode.refuse": (decode.refuse, [ROOM, 0, here, "why", 7, DIGEST], {}),
        "decode.fence": (decode.fence, ["nobody", 7], {}),
        "decode.move_weights": (decode.move_weights, [7], {}),
        "prefill.wait": (prefill.wait, ["0"], {}),
        "add": (prefill.add, [ROOM, 0, 30, DECODE, DIGEST], {}),
        "send_chunk": (
            prefill.send_chunk,
            [ROOM, 99, PAGES],
            {
                "decode": DECODE,
                "last": False,
                "aux": b"x",
                "ready": Broken(),
                "generation": 0,
                "windows": (),
            },
        ),
        "prefill.abort": (prefill.abort, [99, 0, "why"], {"decode": DECODE}),
        "prefill.refuse": (prefill.refuse, [ROOM, 0, "why"], {"decode": DECODE}),
        "prefill.fence": (prefill.fence, ["nobody", 7], {}),
        "prefill.move_weights": (prefill.move_weights, [7], {}),
        "offer": (prefill.offer, [98, 0, 30, DIGEST, -1.0], {}),
        "withdraw": (prefill.withdraw, [99, 0, "why"], {}),
    }


# These take nothing, or a node's commands.
_WITHOUT_ARGUMENTS = {
    "check_open", "close", "fileno", "lost_peers", "notify",
    "peers", "stats", "submit", "take_events",
}  # fmt: skip


def test_every_public_call_is_tried(pair: Pair) -> None:
    tried = {
        f"{type(call.__self__).__name__}.{call.__name__}" for call, _, _ in calls(pair).values()
    }
    assert tried == {
        f"{kind.__name__}.{name}"
        for kind in (DecodeTransfers, PrefillTransfers)
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in _WITHOUT_ARGUMENTS
    }


@settings(
    max_examples=EXAMPLES, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(data=st.data())
def test_whatever_is_handed_over(pair: Pair, data: st.DataObject) -> None:
    every = calls(pair)
    name = data.draw(st.sampled_from(sorted(every)))
    call, given_args, given_named = every[name]
    args, named = list(given_args), dict(given_named)
    places: list[Any] = [*range(len(args)), *named]
    odd = [pair.decode, pair.prefill, pair.prefill.endpoint, DIGEST, PAGES, PAGES * 2, [64] * 8]
    for place in data.draw(st.sets(st.sampled_from(places), min_size=1)):
        junk = data.draw(st.one_of(JUNK, st.sampled_from(range(len(odd))).map(odd.__getitem__)))
        if name.endswith("move_weights") and isinstance(junk, str):
            return  # a call that is allowed, and ends the rooms
        if name.endswith("wait") and isinstance(junk, Real | None):
            return  # a time to wait
        if isinstance(place, int):
            args[place] = junk
        else:
            named[place] = junk
    before = pair.held()
    try:
        call(*args, **named)
    except (CallerError, OwnError):
        assert pair.held() == before, (name, shown((args, named)))
    except Exception as error:
        raise AssertionError(f"{name}: {shown((args, named))} raised {error!r}") from error
