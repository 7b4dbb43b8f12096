"""A call that raises has changed nothing, and what it raises for a wrong argument is CallerError:
every public call of both nodes, in whatever state a pair of them is. Then its requests end well."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import ControlConfig, DecodeConfig, PrefillConfig
from prefixkv.errors import CallerError, CapacityError, RequestError, shown
from prefixkv.prefill.request import PrefillState
from prefixkv.request import Request
from tests.support.junk import JUNK, Broken, OwnError
from tests.support.node_pair import NodePair, left, make_pool, scheduling, tokens_of
from tests.support.patience import until
from tests.support.picture import picture

EXAMPLES = int(os.environ.get("PREFIXKV_JUNK_EXAMPLES", "60"))  # more for a long run
PATIENT = ControlConfig(heartbeat_s=60.0, suspect_after_s=600.0, forget_after_s=900.0)


class Moment(NamedTuple):
    """See `Story.moment`."""

    events: int
    commands: int
    picture: Any

    def is_unchanged_in(self, later: Moment) -> bool:
        """Whether nothing has changed but what came in."""
        return later == self or later.events != self.events


class Story:
    """A decode and a prefill node, and an engine for both that does no more than it is told."""

    def __init__(self, decode: DecodeNode, prefill: PrefillNode) -> None:
        self.decode, self.prefill = decode, prefill
        self._numbers = itertools.count(1)
        self.live: set[str] = set()
        self.running: dict[str, Any] = {}
        self.computing: dict[str, Any] = {}
        self.past: list[Any] = []  # requests that have ended
        self.failed: list[Any] = []
        self.commands = self.events = 0
        for node in (decode, prefill):
            node._take = self._counting("events", node._take)  # type: ignore[method-assign]
            submit = node.transfers.submit
            node._command = self._counting("commands", submit)

    def _counting(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            setattr(self, what, getattr(self, what) + 1)
            return call(*args)

        return counted

    def request(self, rid: str = "", **fields: Any) -> Request:
        """A request that nobody has seen, for either side."""
        number = next(self._numbers)
        wanted = {"prefill": self.prefill.endpoint, "decode": "decode-0", **fields}
        return Request(rid or f"r{number}", tokens_of(number, 21), 8, room=number, **wanted)

    def begin(self) -> None:
        request = self.request()
        self.prefill.add(request)
        self.decode.add(request)
        self.live.add(request.rid)

    def step(self) -> None:
        self.decode.pop_preallocated()
        for req in self.decode.pop_transferred():
            self.running[req.rid] = req
        for req in self.prefill.pop_bootstrapped():
            self.computing[req.rid] = req
        self.past += self.prefill.pop_sent()
        for node in (self.decode, self.prefill):
            ended = node.pop_failed()
            self.failed += ended
            self.live -= {req.rid for req in ended}
            for reqs in (self.computing, self.running):
                for req in ended:
                    reqs.pop(req.rid, None)

    def finish(self) -> None:
        """All requests run to their ends."""

        def go_on() -> None:
            self.step()
            for req in list(self.computing.values()):
                self.computing.pop(req.rid)
                if req.state is PrefillState.COMPUTING:
                    self.prefill.send_chunk(req, req.num_tokens, last=True, aux=b"x")
            for req in list(self.running.values()):
                self.decode.append_many([req], [7])
                self.decode.finish(req)
                self.past.append(self.running.pop(req.rid))
                self.live.discard(req.rid)

        until(lambda: not self.live, step=go_on, state=lambda: str(self.live))
        until(lambda: not left(self.decode) and not left(self.prefill), step=self.step)
        assert not self.failed, [(req.rid, req.error) for req in self.failed]
        self.decode.audit()
        self.prefill.audit()

    def moment(self) -> Moment:
        """All that no call that raises may change, and what is counted up to this look: that takes
        in, too, what the control threads have to say, and it may come at any time."""
        seen = self.picture()
        return Moment(self.events, self.commands, seen)

    def picture(self) -> Any:
        """All that no call that raises may change."""
        self.decode.audit()
        self.prefill.audit()
        sides = (
            (scheduling(node), node.transfers._undelivered) for node in (self.decode, self.prefill)
        )
        return picture(*sides)

    def calls(self) -> dict[str, tuple[list[Any], dict[str, Any]]]:
        """Every public call of both nodes with arguments that it would take, now or in a moment,
        or of requests that are over. None of them may harm the story, should it be taken."""
        reqs = [*self.running.values(), *self.past, object()]
        running = reqs[0]
        computing = next(iter(self.computing.values()), running)
        return {
            "decode.add": ([self.request()], {}),
            "decode.refuse": ([self.request(), "no"], {}),
            "decode.pop_preallocated": ([], {}),
            "decode.pop_transferred": ([], {}),
            "decode.pop_failed": ([], {"after": 7}),
            "decode.pop_local": ([], {}),
            "decode.computed": ([computing, 1], {"aux": b"", "after": None}),
            "decode.save_state": ([computing, 1], {}),
            "decode.save_states": ([[running]], {}),
            "decode.give_up_prefill": (["nobody", "no"], {}),
            "decode.pop_needs_prefill": ([], {}),
            "decode.append_many": ([[running], [-1]], {}),
            "decode.reserve_many": ([[running], 0], {}),
            "decode.finish": ([computing], {"after": None, "continues": None, "keep_tokens": None}),
            "decode.announce": (["nobody", "nowhere"], {}),
            "decode.retract": (["nobody"], {"after": None}),
            "decode.abort": (["nobody"], {"after": None}),
            "decode.fail": (["nobody", ValueError("bad")], {"after": None}),
            "decode.flush": ([7], {"after": None}),
            "decode.retarget": (["nobody", "tcp://127.0.0.1:1"], {}),
            "decode.take_log": ([], {}),
            "decode.apply_rank_events": ([b"no message"], {}),
            "decode.fence": (["nobody", 7], {}),
            "decode.fence_rank": ([1], {"after": None}),
            "decode.wait": (["0"], {}),
            "decode.drain": (["0"], {}),
            "decode.take_cache_events": ([False], {}),
            "prefill.add": ([self.request()], {}),
            "prefill.refuse": ([self.request(), "no"], {}),
            "prefill.pop_bootstrapped": ([0], {}),
            "prefill.send_chunk": (
                [computing, 99],
                {"last": True, "aux": "text", "ready": None, "state_slot": -1},
            ),
            "prefill.save_state": ([computing, 99], {}),
            "prefill.pop_sent": ([], {}),
            "prefill.pop_failed": ([], {"after": 7}),
            "prefill.abort": (["nobody"], {}),
            "prefill.fail": (["nobody", ValueError("bad")], {}),
            "prefill.flush": ([7], {}),
            "prefill.fence": (["nobody", 7], {}),
            "prefill.fence_rank": ([1], {}),
            "prefill.wait": (["0"], {}),
            "prefill.drain": (["0"], {}),
            "prefill.take_cache_events": ([False], {}),
            "prefill.take_log": ([], {}),
            "prefill.apply_rank_events": ([b"no message"], {}),
        }

    def odd(self) -> list[Any]:
        """Objects of the right types in the wrong places."""
        return [
            *self.running.values(), *self.computing.values(), *self.past[-2:], Broken(),
            [*self.running.values()] * 2, self.request(decode="another"), self.request(prefill=""),
            [*self.computing.values()], self.decode, self.prefill, self.decode.pool,
            next(iter(self.live), "r"),
        ]  # fmt: skip


class _Odd(NamedTuple):
    """One of `Story.odd`, by number."""

    number: int


_ODD = st.builds(_Odd, st.integers(0, 11))

# These take nothing, or end the story.
_WITHOUT_ARGUMENTS = {
    "audit", "awaited_ranks", "close", "figures", "fileno", "lost_peers", "peers", "stats",
}  # fmt: skip
# Any function is a listener: what one raises is its own.
# Calls of the control plane and of audits: an engine makes none of them.
CONTROL = frozenset({
    "check_invariants", "check_own", "end_all", "feeds", "hear", "holders",
    "prefill_away", "prefill_lost", "prefill_ready", "release_deferred", "room_bootstrapped",
    "room_drained", "room_ended", "room_overdue", "settle_deferred", "source_free",
    "take_commands", "take_orders",
})  # fmt: skip
_NOT_TRIED = _WITHOUT_ARGUMENTS | CONTROL | {"on_change", "on_close", "on_ended"}
# A number, a version and a request are arguments that these take: no more is tried then. What a
# limit lets `pop_bootstrapped` return would be lost to the story.
_TAKES = {
    "pop_bootstrapped": (Real, type(None)),
    "wait": (Real, type(None)), "drain": (Real,), "flush": (str, type(None)),
    "add": (Request,), "refuse": (Request,),
}  # fmt: skip


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with (
        PrefillNode(make_pool(256), PrefillConfig(control=PATIENT)) as prefill,
        DecodeNode(make_pool(256), DecodeConfig(control=PATIENT, reserve_tokens=0)) as decode,
    ):
        story = Story(decode, prefill)
        story.begin()
        story.finish()
        yield story
        story.finish()


def test_every_public_call_is_tried(story: Story) -> None:
    public = {
        f"{side}.{name}"
        for side, kind in (("decode", DecodeNode), ("prefill", PrefillNode))
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in _NOT_TRIED
    }
    assert public == story.calls().keys()


def _hand_over(story: Story, data: st.DataObject) -> None:
    """One call with junk in the place of some of its arguments."""
    # All is drawn before the state is looked at: how far the nodes are differs from run to run.
    every = story.calls()
    name = data.draw(st.sampled_from(sorted(name for name, (args, _) in every.items() if args)))
    args, named = list(every[name][0]), dict(every[name][1])
    drawn = {
        place: data.draw(st.one_of(JUNK, _ODD))
        for place in sorted(
            data.draw(st.sets(st.sampled_from([*range(len(args)), *named]), min_size=1)), key=str
        )
    }
    odd = story.odd()
    for place, junk in drawn.items():
        value = odd[junk.number % len(odd)] if isinstance(junk, _Odd) else junk
        if isinstance(place, int):
            args[place] = value
        else:
            named[place] = value
    if isinstance(args[0], _TAKES.get(name.partition(".")[2], ())):
        return
    if isinstance(args[0], str) and args[0] in story.live:
        return  # such a call ends a request of the story
    side, _, call = name.partition(".")
    before = story.moment()
    try:
        getattr(getattr(story, side), call)(*args, **named)
    except (CallerError, OwnError, CapacityError):
        # What the control threads have to say comes in with any call, and with the look.
        assert before.is_unchanged_in(story.moment()), (name, shown((args, named)))
    except Exception as error:
        raise AssertionError(f"{name}: {shown((args, named))} raised {error!r}") from error
    else:
        story.picture()


@settings(
    max_examples=max(8, EXAMPLES // 8), deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data())
def test_whatever_is_handed_over(story: Story, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 2))):
        story.begin()
    # Somewhere on their way: queued, promised, computed, on decode.
    for _ in range(data.draw(st.integers(0, 6))):
        story.step()
        story.decode.wait(0.002)
    for _ in range(6):
        _hand_over(story, data)
    story.finish()


def test_a_request_of_another_node_is_refused_by_name(story: Story) -> None:
    """Also one that has ended there: of its own a node takes it, and does nothing."""
    decode, prefill = story.decode, story.prefill
    with (
        PrefillNode(make_pool(), PrefillConfig(control=PATIENT)) as prefills,
        DecodeNode(make_pool(), DecodeConfig(control=PATIENT)) as decodes,
    ):
        pair = NodePair(decodes, prefills)
        pair.p.hold = True
        theirs = pair.submit("r", tokens_of(1, 21))
        pair.until(lambda: "r" in pair.p.computing)
        computing = prefills.requests["r"]
        for is_over in (False, True):
            if is_over:
                decodes.abort("r")
                pair.until(lambda: "r" in pair.d.ended and "r" in pair.p.failed)
            before = story.moment()
            for call in (
                lambda: decode.append_many([theirs], [7]),
                lambda: decode.reserve_many([theirs], 1),
                lambda: decode.finish(theirs),
                lambda: prefill.send_chunk(computing, 21, last=True),
            ):
                with pytest.raises(RequestError, match="'r' is another node's"):
                    call()
            assert before.is_unchanged_in(story.moment())
        assert prefills.send_chunk(computing, 21) == 0
