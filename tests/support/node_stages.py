"""Real nodes brought to a point of a request's life, for tests of what goes wrong there."""

import time
from collections.abc import Callable
from typing import Any

from prefixkv import DecodeNode
from prefixkv.config import ControlConfig, DecodeConfig
from tests.support.gates import Gate
from tests.support.node_pair import NodePair, make_pool, tokens_of
from tests.support.patience import PATIENCE_S, until

# How far "r" gets before it is aborted. Each returns what lets everything under way go on.

Proceed = Callable[[], None]


def nothing() -> None:
    pass


def queued(pair: NodePair) -> Proceed:
    pair.p.hold = True
    pair.submit("big", tokens_of(9, 236))
    pair.until(lambda: "big" in pair.p.computing)
    pair.submit("r", tokens_of(1, 30))
    pair.step()

    def proceed() -> None:
        pair.p.hold = False

    return proceed


def promised(pair: NodePair) -> Proceed:
    """Decode has promised its pages; prefill's engine has not got the request."""
    pair.submit("r", tokens_of(1, 30), room=5, tell=False)
    pair.until(lambda: pair.prefill.stats()["rooms"] == 1)
    return nothing


def computing(pair: NodePair) -> Proceed:
    pair.p.hold = True
    pair.submit("r", tokens_of(1, 30))
    pair.until(lambda: "r" in pair.p.computing)
    return nothing


def transferring(pair: NodePair) -> Proceed:
    """One chunk is there, the next waits for the device, and the last is queued behind it."""
    gate = pair.p.ready["r", 1] = Gate()
    pair.submit("r", tokens_of(1, 30))
    pair.until(lambda: gate.queries and not pair.p.computing)

    def proceed() -> None:
        gate.answer = True

    return proceed


def arrived(pair: NodePair) -> Proceed:
    """Decode's control thread knows that it is complete, the scheduler does not."""
    pair.submit("r", tokens_of(1, 30))
    pair.until(lambda: pair.p.computing.keys() == {"r"})
    while pair.p.computing:
        pair.p.step()
    until(lambda: len(pair.decode.transfers.thread.events))
    return nothing


def complete(pair: NodePair) -> Proceed:
    """The scheduler knows, the engine does not."""
    arrived(pair)
    pair.decode.pop_failed()
    return nothing


def running(pair: NodePair) -> Proceed:
    pair.d.hold_running = True
    pair.submit("r", tokens_of(1, 30))
    pair.until(lambda: "r" in pair.d.running)
    return nothing


def full_hit(pair: NodePair) -> Proceed:
    """No pages are promised, so none are held; the room is open all the same."""
    pair.submit("before", tokens_of(1, 28), max_new_tokens=1)
    pair.run("before")
    pair.submit("r", tokens_of(1, 28), room=5, tell=False)
    pair.until(lambda: pair.prefill.stats()["rooms"] == 1)
    return nothing


STAGES = [queued, promised, computing, transferring, arrived, complete, running, full_hit]


def lone_decode(control: ControlConfig, **config: Any) -> DecodeNode:
    return DecodeNode(make_pool(), DecodeConfig(control=control, **config))


def end_of(node: DecodeNode, rid: str) -> Exception:
    """Poll until the request has failed; returns why."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        node.pop_preallocated()
        assert not node.pop_transferred()
        for req in node.pop_failed():
            assert req.rid == rid
            assert req.error is not None
            return req.error
        node.wait(0.05)
    raise AssertionError(f"{rid} has not ended")
