"""Which prefill worker a request is for: moves between workers, alone and back, next attempts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prefixkv.config import ComputeConfig
from prefixkv.decode.lanes import ALONE, Lanes
from prefixkv.decode.request import DecodeRequest, DecodeState, Retries
from prefixkv.decode.targets import PrefillTargets
from prefixkv.errors import RequestError, TransferError
from prefixkv.protocol.commands import MeetPrefill, RefuseRoom
from tests.unit.decode.parts import Parts

BROKEN = TransferError("broken")


class Aiming(Parts):
    def __init__(
        self,
        compute: ComputeConfig | None = None,
        most: int = 0,
        retarget: Callable[[Any, Any], str | None] | None = None,
    ) -> None:
        super().__init__(compute, lanes=Lanes(gated=True))
        self.targets = PrefillTargets(
            self.lanes, self.shares, self.waiting, self.choice, self.sources, self.refusals,
            Retries(most, retarget, self.pages.errors), self.commands, self.counters,
        )  # fmt: skip

    def wait(self, num_tokens: int = 8, **fields: Any) -> DecodeRequest:
        req = self.request(num_tokens, **{"prefill": "p:1", **fields})
        self.waiting.add(req)
        return req

    def lane_of(self, req: DecodeRequest) -> list[str]:
        return [lane.address for lane in self.lanes.all() if req in self.waiting.at(lane.address)]

    def close(self, address: str) -> None:
        lane = self.lanes.of(address)
        self.lanes.ready(lane, 40)
        self.lanes.away(lane, 1.0)


def test_a_worker_is_asked_for_once() -> None:
    case = Aiming()
    case.wait()
    for _ in range(2):
        case.targets.meet("p:1")
        case.targets.meet("elsewhere:1")  # no request names it
    assert case.commands == [MeetPrefill("p:1")]


@pytest.mark.parametrize(
    ("ask", "is_refused"),
    [("both", True), ("late", False)],
)
def test_the_former_worker_is_told_unless_it_never_got_the_request(
    ask: Any, is_refused: bool
) -> None:
    case = Aiming(ComputeConfig(below=100, ask=ask))
    req = case.wait()
    case.targets.retarget(req, "q:1")
    assert req.prefill == "q:1"
    assert case.lane_of(req) == ["q:1"]
    assert MeetPrefill("q:1") in case.commands
    told = [one for one in case.commands if isinstance(one, RefuseRoom)]
    assert [(one.key.generation, one.address) for one in told] == [(0, "p:1")] * is_refused
    assert req.generation == 1, "what the former one answers is of another attempt"


def test_a_request_that_ran_has_no_attempt_open_that_would_be_refused() -> None:
    case = Aiming()
    req = case.request(8, prefill="p:1")
    req.become(DecodeState.PREALLOCATED)
    req.become(DecodeState.RETRACTED)
    case.waiting.add(req, first=True)
    case.targets.retarget(req, "q:1")
    assert not [one for one in case.commands if isinstance(one, RefuseRoom)]
    assert case.lane_of(req) == ["q:1"]


def test_a_worker_that_is_too_small_is_no_target() -> None:
    case = Aiming()
    req = case.wait(38)
    case.close("q:1")  # it holds 40 tokens; the request may come to 41
    with pytest.raises(RequestError, match="q:1 holds 40"):
        case.targets.retarget(req, "q:1")
    assert (req.prefill, req.generation, case.lane_of(req)) == ("p:1", 0, ["p:1"])
    req.output.append(7)  # it ran: what it may still become is no reason
    case.targets.retarget(req, "q:1")
    assert req.prefill == "q:1"


def test_it_goes_alone_once_and_comes_back() -> None:
    case = Aiming(ComputeConfig(below=8, down_below=8))
    req, long = case.wait(), case.wait(40, room=2)
    for _ in range(2):
        case.targets.go_alone(req)
        case.targets.go_alone(long)  # more than decode computes
    assert (case.lane_of(req), case.lane_of(long)) == ([ALONE], ["p:1"])
    assert case.counters["failovers"] == 1
    assert req.generation == 1
    assert case.commands, "the worker may have it, and may be back first"
    told = len(case.commands)
    case.targets.refuse_waiting(req, BROKEN)
    assert len(case.commands) == told, "once is enough"
    case.targets.come_back(req)
    assert case.lane_of(req) == ["p:1"]
    assert not req.is_alone
    assert not case.targets.may_have(req), "it was refused there"
    assert case.targets.may_have(long)


@pytest.mark.parametrize(
    ("most", "compute", "to", "num_tokens", "end"),
    [
        (1, None, None, 8, ("p:1", False, None)),
        (1, None, "q:1", 8, ("q:1", False, None)),
        (1, None, "q:1", 38, ("q:1", False, "holds 40")),
        (0, None, None, 8, ("p:1", False, "broken")),
        (0, ComputeConfig(below=8), None, 8, ("p:1", True, None)),
        (0, ComputeConfig(below=8, down_below=8), None, 9, ("p:1", False, "broken")),
        (1, ComputeConfig(below=100), "q:1", 38, ("q:1", True, None)),
    ],
)
def test_the_next_attempt(
    most: int,
    compute: ComputeConfig | None,
    to: str | None,
    num_tokens: int,
    end: tuple[str, bool, str | None],
) -> None:
    """Again at a worker as often as it may, then alone, then not at all."""
    case = Aiming(compute, most, lambda req, error: to)
    case.close("q:1")
    req = case.request(num_tokens, prefill="p:1")
    last = case.targets.next_attempt(req, BROKEN)
    prefill, is_alone, words = end
    assert (req.prefill, req.is_alone) == (prefill, is_alone)
    assert (last is None) == (words is None)
    assert words is None or words in str(last)
    assert req.retries == case.counters["retries"] == most
    assert case.counters["failovers"] == is_alone
