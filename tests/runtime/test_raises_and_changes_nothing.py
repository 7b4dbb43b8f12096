"""A call that raises has changed nothing: whatever an engine hands to a node, the story that was
under way runs to its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixkv.config import ControlConfig, DecodeConfig, PrefillConfig
from prefixkv.errors import CallerError, RequestError
from prefixkv.runtime.nodes import DecodeNode, PrefillNode
from tests.models.node_pair import NodePair, make_pool, tokens_of

PATIENT = ControlConfig(heartbeat_s=60.0, suspect_after_s=600.0, forget_after_s=900.0)


class Broken:
    """An event that cannot be asked."""

    def query(self) -> bool:
        raise OSError("the device is gone")


JUNK = st.sampled_from(
    [None, "text", b"bytes", -1, 2**40, 1.5, float("nan"), True, [], [1], {}, object(), Broken(),
     np.int64(3), np.array([1, 2])],
)  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> Iterator[NodePair]:
    """One request runs on decode, and one is computed on prefill, half of it sent."""
    with (
        PrefillNode(make_pool(256), PrefillConfig(control=PATIENT)) as prefill,
        DecodeNode(make_pool(256), DecodeConfig(control=PATIENT, reserve_tokens=0)) as decode,
    ):
        pair = NodePair(decode, prefill)
        pair.d.hold_running = pair.p.hold = True
        pair.submit("runs", tokens_of(1, 21), 8)
        pair.until(lambda: "runs" in pair.p.computing)
        while "runs" in pair.p.computing:
            pair.p.compute(pair.p.computing["runs"])
        pair.until(lambda: "runs" in pair.d.running and not pair.prefill.num_rooms)
        pair.submit("computes", tokens_of(2, 21), 4)
        pair.until(lambda: "computes" in pair.p.computing)
        pair.p.compute(pair.p.computing["computes"])
        yield pair
        pair.d.hold_running = pair.p.hold = False
        pair.run("runs", "computes")
        assert pair.d.ended == {"runs": None, "computes": None}
        pair.check_at_rest()


def state(pair: NodePair) -> Any:
    """What no call that raises may change."""
    found = []
    for node in (pair.decode, pair.prefill):
        node.audit()
        stats = node.stats()
        reqs = {
            rid: (req.state, req.pages.tolist()) for rid, req in node.scheduler.requests.items()
        }
        names = [
            name for name in stats if name.startswith(("pages_", "locks", "requests", "slots"))
        ]
        draining = node.scheduler.draining
        found.append(({name: stats[name] for name in names}, reqs, node.weights_version, draining))
    running, computing = pair.d.running["runs"], pair.p.computing["computes"]
    plan = computing.plan
    assert plan is not None
    sent = plan.computed, plan.cursor_page, plan.ended, computing.state_slot
    return found, list(running.output), sent


def calls(pair: NodePair) -> dict[str, Any]:
    """Each call, with the arguments that junk may take the place of."""
    running, computing = pair.d.running["runs"], pair.p.computing["computes"]
    return {
        "decode.add": (pair.decode.add, ["r"]),
        "decode.refuse": (pair.decode.refuse, ["r"]),
        "decode.append_many": (pair.decode.append_many, [[running], [-1]]),
        "decode.finish": (pair.decode.finish, [computing, None, None]),
        "decode.retract": (pair.decode.retract, ["runs", None]),
        "decode.retarget": (pair.decode.retarget, ["computes", "tcp://127.0.0.1:1"]),
        "decode.flush": (pair.decode.flush, [3, None]),
        "prefill.add": (pair.prefill.add, ["r"]),
        "prefill.refuse": (pair.prefill.refuse, ["r"]),
        "prefill.send_chunk": (pair.prefill.send_chunk, [computing, 99, True, "text", None, -1]),
        "decode.abort": (pair.decode.abort, ["nobody", None]),
        "decode.fence": (pair.decode.fence, ["nobody", -1]),
        "decode.drain": (pair.decode.drain, ["0"]),
        "decode.wait": (pair.decode.wait, ["0"]),
        "prefill.abort": (pair.prefill.abort, ["nobody"]),
        "prefill.fence": (pair.prefill.fence, ["nobody", -1]),
        "prefill.drain": (pair.prefill.drain, ["0"]),
        "prefill.pop_failed": (pair.prefill.pop_failed, [7]),
        "prefill.flush": (pair.prefill.flush, [3]),
        "prefill.pop_bootstrapped": (pair.prefill.pop_bootstrapped, [-1]),
    }


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_whatever_is_handed_over(pair: NodePair, data: st.DataObject) -> None:
    every = calls(pair)
    name = data.draw(st.sampled_from(sorted(every)))
    call, args = every[name]
    args = list(args)
    for at in data.draw(st.sets(st.integers(0, len(args) - 1), min_size=1)):
        args[at] = data.draw(JUNK)
    if name.endswith(("flush", "pop_bootstrapped")) and args[0] is None:
        return  # a call that is allowed
    if isinstance(args[0], str) and name.endswith("flush"):
        return
    if name.endswith(("drain", "wait")) and not isinstance(args[0], str | list | dict):
        return  # allowed, or long
    if name.endswith("pop_failed") and args[0] is None:
        return
    before = state(pair)
    try:
        call(*args)
    except Exception:
        assert state(pair) == before, (name, args)
    else:
        allowed = name in ("prefill.send_chunk", "decode.append_many", "prefill.pop_bootstrapped")
        assert allowed or state(pair) == before, (name, args)


@pytest.mark.parametrize(
    "wrong",
    [{"aux": "text"}, {"aux": 7}, {"aux": [1]}, {"ready": object()}, {"state_slot": "0"},
     {"end": 21.0}, {"end": "21"}, {"last": "yes"}],
    ids=lambda wrong: " ".join(f"{name}={type(value).__name__}" for name, value in wrong.items()),
)  # fmt: skip
def test_a_chunk_with_a_wrong_argument_is_not_begun(pair: NodePair, wrong: dict[str, Any]) -> None:
    computing = pair.p.computing["computes"]
    before = state(pair)
    with pytest.raises((RequestError, CallerError)):
        pair.prefill.send_chunk(**{"req": computing, "end": 21, "last": True, "aux": b"x", **wrong})
    assert state(pair) == before
