"""Law 10 on decode: what a request has written since its last commit enters no tree, no checkpoint
and no host memory once the engine has failed or aborted it."""

import pytest

from prefixkv.cache.checkpoints import Checkpoints
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.errors import AbortedError, CallerError, NotFiniteError
from tests.support.gates import Gate
from tests.unit.decode.desk import AbortRoom, Desk
from tests.unit.decode.test_compute import Alone
from tests.unit.decode.test_host_tier import HostDesk
from tests.unit.decode.test_sent_ends import SLOTS, computed, depths, desk_of, local

NAN = NotFiniteError("NaN in 'a'")


def end(desk: Desk, req: DecodeRequest, how: str, after: Gate | None = None) -> None:
    scheduler = desk.scheduler
    if how == "fail":
        assert desk._checked(scheduler.fail(req.rid, NAN, after))
    else:
        assert desk.abort(req, after=after)
    (ended,) = desk.pop_failed()
    assert ended is req
    assert req.state is (DecodeState.FAILED if how == "fail" else DecodeState.ABORTED)
    assert isinstance(req.error, NotFiniteError if how == "fail" else AbortedError)


pytestmark = pytest.mark.parametrize("how", ["abort", "fail"])


@pytest.mark.parametrize("is_late", [False, True])
def test_of_one_that_runs_the_prompt_stays(how: str, is_late: bool) -> None:
    desk = Desk()
    req = desk.start("a", 8, 12, outputs=9)
    after = Gate() if is_late else None
    end(desk, req, how, after)
    if after is not None:
        assert desk.states()["OWNED"] == 3
        after.answer = True
        desk.admit()
    assert desk.prefix_of(req) == 8
    assert desk.states() == {"FREE": 14, "CACHED": 2}
    desk.token(req)
    desk.scheduler.reserve_many([req], 2)
    assert len(req.output) == 9, "a step may have been under way"


def test_what_a_retraction_has_cached_stays_and_what_it_would_still_cache_does_not(
    how: str,
) -> None:
    for is_done in (True, False):
        desk = Desk()
        desk.start("o", 4, outputs=1)
        req = desk.start("a", 8, 12, outputs=6)
        event = Gate()
        event.answer = is_done
        desk.retract(req, after=event)
        end(desk, req, how)
        event.answer = True
        desk.admit()
        assert desk.prefix_of(req) == (12 if is_done else 8)


@pytest.mark.parametrize("is_whole", [False, True])
def test_what_is_computed_here_goes_to_no_tree_and_to_none_that_joined(
    how: str, is_whole: bool
) -> None:
    desk = Alone()
    req = desk.compute("a", 12)
    joined = desk.admitted("a2", [*req.tokens.tolist(), 1, 2])
    assert joined.prefix_len == 12
    desk.computed(req, 12 if is_whole else 8)
    end(desk, req, how)
    assert desk.transferred() == []
    assert desk.pages.cache.num_pages == 0
    assert joined.state is DecodeState.RETRACTED
    assert desk.admit() == ["a2"]
    assert joined.prefix_len == 0
    assert desk.local() == ["a2"]
    desk.computed(joined, 14)
    assert desk.transferred() == ["a2"]


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("where", ["computed", "running"])
def test_no_state_and_no_window_is_kept(how: str, window: int, where: str) -> None:
    desk = desk_of(below=40, window=window)
    req = desk.admitted("a", 8, 12)
    assert local(desk) == [req]
    if not window:
        assert desk.scheduler.save_state(req, 8) == SLOTS
    computed(desk, req, 8)
    before: list[int] = []
    if where == "running":
        assert desk.transferred() == ["a"]
        before = depths(desk)
        assert before == [8]
        for _ in range(6):
            desk.scheduler.save_states([req])
            desk.token(req)
        desk.scheduler.save_states([req])
    end(desk, req, how)
    assert depths(desk) == before
    assert isinstance(desk.pages.saves, Checkpoints)
    assert desk.pages.saves.taken == []
    assert desk.prefix_of(req) == (8 if where == "running" else 0)


def test_nothing_is_copied_to_host_memory(how: str) -> None:
    desk = HostDesk()
    req = desk.start("a", 8, 12, outputs=9)
    end(desk, req, how)
    for _ in range(3):
        desk.admit()
        assert desk.scheduler.take_orders() == []


def test_prefill_is_told_the_reason_and_what_it_sends_goes_on_for_others(how: str) -> None:
    desk = Desk()
    for others in (0, 1):
        req = desk.add(f"a{others}")
        desk.admit()
        if others:
            joined = desk.admitted("b", [*req.tokens.tolist(), 1, 2])
            desk.succeed(joined.room_key)
        desk.commands()
        end(desk, req, how)
        told = [one.reason for one in desk.commands() if isinstance(one, AbortRoom)]
        says = "NotFiniteError: NaN in 'a'" if how == "fail" else str(req.error)
        assert told == ([] if others else [says])
        if others:
            desk.succeed(req.room_key)
            assert desk.transferred() == ["b"], "this engine wrote nothing of it"


def test_one_that_is_unknown_or_has_ended_is_no_error(how: str) -> None:
    desk = Desk()
    desk.finish(desk.start("a", 8, outputs=1))
    before = desk.states()
    for rid in ("a", "nobody"):
        if how == "fail":
            assert not desk.scheduler.fail(rid, NAN)
        else:
            assert not desk.scheduler.abort(rid)
    assert desk.scheduler.counters["aborts_of_unknown"] == 2
    assert desk.states() == before
    for error in (None, "NaN", NotFiniteError):
        with pytest.raises(CallerError, match="exception"):
            desk.scheduler.fail("a", error)  # type: ignore[arg-type]
