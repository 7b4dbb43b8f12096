"""Law 10 on prefill: what a request has written since it was cached last enters no tree and no
checkpoint once the engine has failed or aborted it; where its peer has failed it, it does."""

import pytest

from prefixkv.errors import AbortedError, NotFiniteError, TransferTimeoutError
from prefixkv.prefill.request import PrefillRequest, PrefillState
from prefixkv.protocol.commands import AbortRoom
from prefixkv.protocol.events import SourceFree
from tests.laws.auditor import assert_at_rest
from tests.unit.prefill.test_prefill_scheduler import BROKEN, Desk
from tests.unit.prefill.test_state_checkpoints import Worker

NAN = NotFiniteError("NaN in 'a'")
HOW = pytest.mark.parametrize("how", ["abort", "fail"])


def end(desk: Desk, req: PrefillRequest, how: str) -> bool:
    if how == "peer":
        desk.end(req, ok=False)
        return True
    scheduler = desk.scheduler
    ended = scheduler.fail(req.rid, NAN) if how == "fail" else scheduler.abort(req.rid)
    return desk._checked(ended)


def cached(desk: Desk, req: PrefillRequest) -> int:
    return desk.pages.cache.match_prefix(req.key).prefix_len


@pytest.mark.parametrize(("how", "kept"), [("abort", 4), ("fail", 4), ("peer", 12)])
def test_only_what_was_cached_before_stays(how: str, kept: int) -> None:
    desk = Desk()
    req = desk.computing("a", 14)
    desk.send(req, 6)
    assert desk.next_pass() == []
    desk.send(req, 10)
    desk.scheduler.take_commands()
    assert end(desk, req, how)
    told = [one.reason for one in desk.scheduler.take_commands() if isinstance(one, AbortRoom)]
    says = {"abort": "request 'a' was aborted", "fail": "NotFiniteError: NaN in 'a'", "peer": ""}
    assert told == [says[how]] * (how != "peer")
    assert desk.send(req, 14, last=True) == 0, "the engine may not know yet"
    assert desk.next_pass() == []
    assert desk.pop_failed() == [req]
    assert req.error is {"fail": NAN, "peer": BROKEN}.get(how, req.error)
    assert isinstance(req.error, AbortedError if how == "abort" else Exception)
    desk.source_free(req)
    assert cached(desk, req) == kept
    assert_at_rest(desk.scheduler)


@pytest.mark.parametrize("is_sent", [False, True])
@HOW
def test_the_last_chunk_is_not_cached_whatever_becomes_of_its_room(how: str, is_sent: bool) -> None:
    desk = Desk()
    req = desk.computing("a", 10)
    desk.send(req, 10, last=True)
    assert end(desk, req, how)
    assert req.state is PrefillState.SENDING
    desk.end(req, ok=is_sent)
    assert desk.next_pass() == []
    desk.source_free(req)
    assert (desk.pop_sent(), desk.pop_failed()) == (([req], []) if is_sent else ([], [req]))
    if how == "fail" and not is_sent:
        assert req.error is NAN, "the engine's own word, not that of its room"
    assert cached(desk, req) == 0
    assert_at_rest(desk.scheduler)


@pytest.mark.parametrize("ended", ["sent", "failed"])
def test_a_failure_that_is_said_after_the_end_is_heard_until_that_is_cached(ended: str) -> None:
    for is_late in (False, True):
        desk = Desk()
        req = desk.computing("a", 10)
        desk.send(req, 10, last=True)
        desk.end(req, ok=ended == "sent")
        if is_late:
            desk.next_pass()
        assert not end(desk, req, "fail")
        assert desk.next_pass() == []
        desk.source_free(req)
        assert len(desk.pop_sent()) + len(desk.pop_failed()) == 1
        assert cached(desk, req) == (8 if is_late else 0)
        assert not end(desk, req, "fail")
        assert_at_rest(desk.scheduler)


def test_one_past_its_deadline_is_cached_as_far_as_it_was_computed() -> None:
    desk = Desk()
    req = desk.computing("a", 10, deadline_s=5.0)
    desk.send(req, 9)
    desk.scheduler.now_s = 6.0
    desk.scheduler.pop_bootstrapped()
    assert isinstance(req.error, TransferTimeoutError)
    assert desk.pop_failed() == [req]
    desk.source_free(req)
    assert cached(desk, req) == 8


@HOW
def test_those_that_follow_it_compute_what_it_has_not_left(how: str) -> None:
    desk = Desk(64, follow_s=1.0)
    common = list(range(20))
    first = desk.computing("a", [*common, 1, 2])
    second = desk.add("b", [*common, 3, 4])
    assert desk.bootstrap(second) == []
    desk.send(first, 8)
    assert desk.next_pass() == []
    desk.send(first, 16)
    assert end(desk, first, how)
    assert desk.next_pass() == ["b"]
    assert second.prefix_len == 8
    assert desk.pop_failed() == [first]
    desk.source_free(first)
    assert cached(desk, second) == 8


@HOW
def test_no_state_is_kept(how: str) -> None:
    worker = Worker()
    tokens = list(range(17))
    req = worker.add("a", tokens)
    assert worker.begin() == [req]
    worker.compute(req, 5)
    assert not worker.compute(req, 12), "it ends at its stop"
    assert worker.points is not None
    assert worker.points.taken
    if how == "fail":
        worker.scheduler.fail("a", NAN)
    else:
        worker.scheduler.abort("a")
    assert worker.begin() == []
    assert worker.scheduler.pop_failed() == [req]
    worker.scheduler.hear(SourceFree(req.room_key), worker.scheduler.now_s)
    assert not worker.points.taken
    assert len(worker.points) == 0
    assert worker.pages.cache.num_pages == 0
    worker.check()
