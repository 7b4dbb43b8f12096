"""A request whose transfer fails is asked for again, also at another prefill worker."""

from typing import Any

import pytest

from prefixkv.config import DecodeConfig
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.errors import ConfigError, RequestError
from prefixkv.protocol.commands import OpenRoom, RefuseRoom
from prefixkv.protocol.ids import RoomKey
from tests.unit.decode.desk import BROKEN, Desk


def opened(desk: Desk) -> list[tuple[str, int]]:
    """Where rooms were opened since the last call, and of which generation."""
    return [
        (command.address, command.promise.generation)
        for command in desk.commands()
        if isinstance(command, OpenRoom)
    ]


def asks(desk: Desk) -> list[tuple[str, str, int]]:
    return [(ask.rid, ask.prefill, ask.generation) for ask in desk.scheduler.pop_needs_prefill()]


def ended(desk: Desk, req: DecodeRequest) -> None:
    desk.finish(req)
    desk.carry_out_aborts()
    desk.at_rest()


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_request_is_asked_for_again_as_often_as_is_said(most: int) -> None:
    desk = Desk(max_retries=most)
    req = desk.add("a")
    for number in range(most + 1):
        assert desk.admit() == ["a"]
        assert opened(desk) == [("p", number)]
        assert asks(desk) == ([("a", "p", number)] if number else [])
        desk.fail(req.room_key, drained=True)
    assert (desk.admit(), desk.pop_failed(), req.error) == ([], [req], BROKEN)
    assert (req.retries, desk.scheduler.counters["retries"]) == (most, most)


def test_the_policy_says_how_often_where_no_number_does() -> None:
    assert DecodeConfig().num_retries == 0
    assert DecodeConfig(failure_policy="retry").num_retries == 1
    assert DecodeConfig(failure_policy="retry", max_retries=0).num_retries == 0
    assert DecodeConfig(max_retries=3).num_retries == 3
    for wrong in (-1, 1.5, True):
        with pytest.raises(ConfigError, match="max_retries: "):
            DecodeConfig(max_retries=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="retarget: "):
        DecodeConfig(retarget="tcp://b")  # type: ignore[arg-type]


def test_the_engines_hook_names_the_next_prefill_worker() -> None:
    seen: list[Any] = []

    def hook(req: DecodeRequest, error: Exception) -> str | None:
        seen.append((req.rid, req.prefill, error))
        return None if len(seen) == 1 else "q"

    desk = Desk(max_retries=3, retarget=hook)
    req = desk.add("a")
    for _ in range(3):
        desk.admit()
        desk.fail(req.room_key, drained=True)
    desk.admit()
    assert opened(desk) == [("p", 0), ("p", 1), ("q", 2), ("q", 3)]
    assert asks(desk) == [("a", "p", 1), ("a", "q", 2), ("a", "q", 3)]
    assert seen == [("a", "p", BROKEN), ("a", "p", BROKEN), ("a", "q", BROKEN)]
    desk.arrive(req)
    ended(desk, req)


@pytest.mark.parametrize("said", [ZeroDivisionError("mine"), 7, ""])
def test_a_hook_that_raises_or_names_no_address_changes_nothing_and_is_told(said: Any) -> None:
    def hook(req: DecodeRequest, error: Exception) -> str | None:
        if isinstance(said, Exception):
            raise said
        return said

    desk = Desk(max_retries=1, retarget=hook)
    req = desk.admitted("a")
    desk.fail(req.room_key, drained=True)
    assert desk.pages.errors.num == 1
    with pytest.raises((ZeroDivisionError, RequestError)):
        desk.admit()
    assert desk.admit() == ["a"]
    assert asks(desk) == [("a", "p", 1)]


def test_a_request_that_waits_to_be_asked_for_again_is_sent_elsewhere() -> None:
    desk = Desk(max_retries=1)
    req = desk.admitted("a")
    desk.fail(req.room_key)
    desk.scheduler.retarget("a", "q")
    desk.admit()
    assert opened(desk) == [("p", 0), ("q", 1)]
    assert asks(desk) == [("a", "q", 1)]
    assert req.request.prefill == "p", "what the engine submitted stays as it was"


def test_a_request_that_was_never_admitted_is_refused_where_it_was_and_asked_for_elsewhere() -> (
    None
):
    desk = Desk(16)
    hog = desk.start("H", 60, max_new=1)
    req = desk.add("a")
    assert desk.admit() == []
    desk.commands()
    desk.scheduler.retarget("a", "q")
    [refused] = desk.commands()
    assert isinstance(refused, RefuseRoom)
    assert (refused.key, refused.address) == (RoomKey(req.room, 0), "p")
    desk.scheduler.retarget("a", "q")
    assert desk.commands() == [], "it goes there already"
    desk.finish(hog)
    assert desk.admit() == ["a"]
    assert opened(desk) == [("q", 1)]
    assert asks(desk) == [("a", "q", 1)]
    desk.arrive(req)
    desk.finish(req)
    assert req.room in desk.scheduler.rooms, "until the first worker has answered"
    desk.drain(refused.key)


def test_what_is_on_its_way_or_not_here_is_not_sent_elsewhere() -> None:
    desk = Desk()
    req = desk.admitted("a")
    before = desk.snapshot()
    for rid, prefill in (("a", "q"), ("b", "q")):
        with pytest.raises(RequestError, match=r"on its way from 'p'|not here"):
            desk.scheduler.retarget(rid, prefill)
    assert desk.snapshot() == before
    desk.succeed(req.room_key)
    desk.transferred()
    for wrong in ("", 7):
        with pytest.raises(RequestError, match="prefill"):
            desk.scheduler.retarget("a", wrong)  # type: ignore[arg-type]
    assert (req.prefill, req.state) == ("p", DecodeState.TRANSFERRED)
