"""A call that raises has changed nothing, and what it raises for a wrong argument is CallerError:
every public call of both nodes, in whatever state a pair of them is. Then what was under way ends
well. The transfer sides: test_transfers.py; constructors: test_refused.py."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixkv import ControlConfig, DecodeConfig, DecodeNode, PrefillConfig, PrefillNode, Request
from prefixkv.cache.eviction.plain import LeastRecentlyUsed
from prefixkv.errors import RequestError, shown
from tests.support.junk import EXAMPLES, Arguments, Broken, is_taken, put, with_junk
from tests.support.node_pair import NodePair, make_pool, scheduling, tokens_of
from tests.support.picture import picture

PATIENT = ControlConfig(heartbeat_s=60.0, suspect_after_s=600.0, forget_after_s=900.0)


def config_of(kind: Any, **more: Any) -> Any:
    """A new one, with a policy of its own: it serves one cache."""
    return kind(control=PATIENT, policy=LeastRecentlyUsed(), **more)


def of_decode() -> Any:
    return config_of(DecodeConfig, reserve_tokens=0)


def of_prefill() -> Any:
    return config_of(PrefillConfig)


def public_calls(*kinds: type) -> set[str]:
    return {
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


# --- nodes ----------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """See `Story.moment`."""

    events: int
    commands: int
    picture: Any

    def is_unchanged_in(self, later: Moment) -> bool:
        """Whether nothing has changed but what came in."""
        return later == self or later.events != self.events


class Story:
    """A pair of nodes whose engines do no more than they are told."""

    def __init__(self, decode: DecodeNode, prefill: PrefillNode) -> None:
        self.decode, self.prefill = decode, prefill
        self.pair = NodePair(decode, prefill)
        self._numbers = itertools.count(1)
        self.reqs: list[Any] = []
        self.commands = self.events = 0
        for node in (decode, prefill):
            node.leader.on = self._counting("events", node.leader.on)  # type: ignore[method-assign]
            node._command = self._counting("commands", node.transfers.thread.submit)
        self.hold(True)

    def _counting(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            setattr(self, what, getattr(self, what) + 1)
            return call(*args)

        return counted

    def hold(self, held: bool) -> None:
        self.pair.p.hold = self.pair.d.hold_running = held

    @property
    def live(self) -> set[str]:
        return self.pair.d.prompts.keys() - self.pair.d.ended.keys()

    def request(self, **fields: Any) -> Request:
        """A request that nobody has seen, for either side."""
        number = next(self._numbers)
        wanted = {"prefill": self.prefill.endpoint, "decode": "decode-0", **fields}
        return Request(f"r{number}", tokens_of(number, 21), 8, room=number, **wanted)

    def begin(self) -> None:
        number = next(self._numbers)
        req = self.pair.submit(f"r{number}", tokens_of(number, 21), room=number)
        self.reqs.append(req)

    def finish(self) -> None:
        """All requests run to their ends."""
        self.hold(False)
        self.pair.run(*self.live)
        assert not any(self.pair.d.ended.values()), self.pair.d.ended
        assert not self.pair.p.failed
        self.pair.check_at_rest()
        self.hold(True)

    def moment(self) -> Moment:
        """All that no call that raises may change, and what is counted up to this look: that takes
        in, too, what the control threads have to say, and it may come at any time."""
        self.decode.audit()
        self.prefill.audit()
        nodes = (self.decode, self.prefill)
        seen = picture(*((scheduling(node), node.transfers._undelivered) for node in nodes))
        return Moment(self.events, self.commands, seen)

    def calls(self) -> dict[str, Arguments]:
        """Every public call of both nodes with arguments that it would take, now or in a moment,
        or of requests that are over. None of them may harm the story, should it be taken."""
        past = [req for req in self.reqs if req.state.ended]
        running = next(iter([*self.pair.d.running.values(), *past, object()]))
        computing = next(iter(self.pair.p.computing.values()), running)
        slot = {"last": True, "aux": "text", "ready": None, "state_slot": -1}
        both: dict[str, Arguments] = {
            "pop_failed": ([], {"after": 7}),
            "fail": (["nobody", ValueError("bad")], {}),
            "abort": (["nobody"], {}),
            "flush": ([7], {}),
            "fence": (["nobody", 7], {}),
            "fence_rank": ([1], {}),
            "wait": (["0"], {}),
            "drain": (["0"], {}),
            "take_cache_events": ([False], {}),
            "take_log": ([], {}),
            "apply_rank_events": ([b"no message"], {}),
        }
        decode: dict[str, Arguments] = {
            "pop_preallocated": ([], {}),
            "pop_transferred": ([], {}),
            "pop_local": ([], {}),
            "computed": ([computing, 1], {"aux": b"", "after": None}),
            "save_state": ([computing, 1], {}),
            "save_states": ([[running]], {}),
            "give_up_prefill": (["nobody", "no"], {}),
            "pop_needs_prefill": ([], {}),
            "append_many": ([[running], [-1]], {}),
            "reserve_many": ([[running], 0], {}),
            "finish": ([computing], {"after": None, "continues": None, "keep_tokens": None}),
            "announce": (["nobody", "nowhere"], {}),
            "retract": (["nobody"], {"after": None}),
            "retarget": (["nobody", "tcp://127.0.0.1:1"], {}),
        }
        prefill: dict[str, Arguments] = {
            "pop_bootstrapped": ([0], {}),
            "send_chunk": ([computing, 99], slot),
            "save_state": ([computing, 99], {}),
            "pop_sent": ([], {}),
        }
        found: dict[str, Arguments] = {}
        for kind, own in (("DecodeNode", decode), ("PrefillNode", prefill)):
            for name, (args, named) in {**both, **own}.items():
                after = {"after": None} if kind == "DecodeNode" and name in _ENDS else {}
                found[f"{kind}.{name}"] = args, {**named, **after}
            found |= {
                f"{kind}.add": ([self.request()], {}),
                f"{kind}.refuse": ([self.request(), "no"], {}),
            }
        return found

    def odd(self) -> list[Any]:
        """Objects of the right types in the wrong places."""
        running, computing = self.pair.d.running.values(), self.pair.p.computing.values()
        return [
            *running, *computing, *[req for req in self.reqs if req.state.ended][-2:], Broken(),
            [*running] * 2, self.request(decode="another"), self.request(prefill=""),
            [*computing], self.decode, self.prefill, self.decode.pool, next(iter(self.live), "r"),
        ]  # fmt: skip


_ENDS = ("abort", "fail", "flush", "fence_rank")  # which on decode may wait for the device
# These take nothing, or end the story. Any function is a listener: what one raises is its own.
# Calls of the control plane and of audits: an engine makes none of them.
_NOT_TRIED = frozenset({
    "audit", "awaited_ranks", "close", "figures", "fileno", "lost_peers", "peers", "stats",
    "on_change", "on_close", "on_ended",
    "check_invariants", "check_own", "end_all", "feeds", "hear", "holders",
    "make_tier",
    "release_deferred", "room_drained", "settle_deferred",
    "take_commands", "take_orders",
})  # fmt: skip
# A number, a version and a request are arguments that these take: no more is tried then. What a
# limit lets `pop_bootstrapped` return would be lost to the story.
_TAKES = {
    "pop_bootstrapped": (Real, type(None)), "wait": (Real, type(None)), "drain": (Real,),
    "flush": (str, type(None)), "add": (Request,), "refuse": (Request,),
}  # fmt: skip


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with (
        PrefillNode(make_pool(256), of_prefill()) as prefill,
        DecodeNode(make_pool(256), of_decode()) as decode,
    ):
        story = Story(decode, prefill)
        story.begin()
        story.finish()
        yield story
        story.finish()


def test_every_public_call_is_tried(story: Story) -> None:
    public = public_calls(DecodeNode, PrefillNode)
    assert {one for one in public if one.partition(".")[2] not in _NOT_TRIED} == {*story.calls()}


def _hand_over(story: Story, data: st.DataObject) -> None:
    """One call with junk in the place of some of its arguments."""
    # All is drawn before the state is looked at: how far the nodes are differs from run to run.
    every = story.calls()
    name = data.draw(st.sampled_from(sorted(name for name, (args, _) in every.items() if args)))
    args, named = put(with_junk(data, *every[name], num_odd=12), *every[name], story.odd())
    kind, _, call = name.partition(".")
    if isinstance(args[0], _TAKES.get(call, ())):
        return
    if isinstance(args[0], str) and args[0] in story.live:
        return  # such a call ends a request of the story
    before = story.moment()
    node = story.decode if kind == "DecodeNode" else story.prefill
    taken = is_taken(name, getattr(node, call), args, named)
    # What the control threads have to say comes in with any call, and with the look.
    assert before.is_unchanged_in(story.moment()) or taken, (name, shown((args, named)))


@settings(
    max_examples=max(8, EXAMPLES // 8), deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data())
def test_whatever_is_handed_over(story: Story, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 2))):
        story.begin()
    # Somewhere on their way: queued, promised, computed, on decode.
    for number in range(data.draw(st.integers(0, 6))):
        story.pair.step()
        for req in [*story.pair.p.computing.values()] if number > 2 else ():
            story.pair.p.compute(req)
        story.decode.wait(0.002)
    for _ in range(6):
        _hand_over(story, data)
    story.finish()


def test_a_request_of_another_node_is_refused_by_name(story: Story) -> None:
    """Also one that has ended there: of its own a node takes it, and does nothing."""
    decode, prefill = story.decode, story.prefill
    with (
        PrefillNode(make_pool(), of_prefill()) as prefills,
        DecodeNode(make_pool(), of_decode()) as decodes,
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
