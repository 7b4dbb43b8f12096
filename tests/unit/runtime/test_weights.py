"""`flush(weights_version=)` of real nodes: what is of the other version ends by name on both sides
at once, and the pair works again when both have the new one."""

from __future__ import annotations

import pytest

from prefixkv.config import ControlConfig
from prefixkv.errors import WeightsVersionError
from tests.support.node_pair import NodePair, tokens_of
from tests.unit.runtime.conftest import MakePair

# No deadline here is shorter than a test may take: what ends, ends for another reason.
PATIENT = ControlConfig(bootstrap_timeout_s=300.0, waiting_timeout_s=300.0, parked_timeout_s=300.0)


@pytest.fixture
def pair(make_pair: MakePair) -> NodePair:
    return make_pair(decode={"reserve_tokens": 0}, control=PATIENT)


def moved(error: Exception | None) -> tuple[str, str]:
    assert isinstance(error, WeightsVersionError), repr(error)
    return error.versions


def works(pair: NodePair, rid: str) -> None:
    pair.submit(rid, tokens_of(1, 21))
    pair.run(rid)
    assert pair.d.ended[rid] is None
    pair.check_at_rest()


def test_what_runs_and_what_is_on_its_way_ends_on_both_sides(pair: NodePair) -> None:
    pair.d.hold_running = True
    pair.submit("runs", tokens_of(1, 21))
    pair.until(lambda: "runs" in pair.d.running)
    pair.p.hold = True
    for rid in ("way", "joins"):
        pair.submit(rid, tokens_of(2, 21))
    joined = "shared_flights"
    pair.until(lambda: "way" in pair.p.computing and pair.decode.stats()[joined] == 1)
    pair.decode.flush(weights_version="v2")
    pair.until(lambda: {"runs", "way", "joins"} <= pair.d.ended.keys())
    assert {moved(pair.d.ended[rid]) for rid in ("runs", "way", "joins")} == {("0", "v2")}
    pair.until(lambda: {"way", "joins"} <= pair.p.failed.keys())
    assert {moved(pair.p.failed[rid]) for rid in ("way", "joins")} == {("0", "v2")}
    pair.d.hold_running = pair.p.hold = False
    pair.prefill.flush(weights_version="v2")
    works(pair, "after")
