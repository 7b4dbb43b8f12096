"""Peers that do not answer, do not fit, or say what they must not; aborts from either side, at
every point of a request's life; rooms that are used again. Real NIXL, one process."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import zmq

from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import ControlConfig, CurveConfig, DecodeConfig, PrefillConfig, short_key
from prefixkv.errors import (
    AbortedError,
    ConfigError,
    HandshakeError,
    PeerLostError,
    TransferError,
    TransferTimeoutError,
)
from prefixkv.request import Request
from prefixkv.runtime.control_thread import REPEAT_S
from tests.support.node_pair import NodePair, left, make_pool, tokens_of
from tests.support.node_stages import (
    STAGES,
    Proceed,
    arrived,
    computing,
    end_of,
    full_hit,
    lone_decode,
    promised,
    queued,
    running,
    transferring,
)
from tests.support.patience import NEVER_S, SkippableClock, lasting_address, until
from tests.unit.runtime.conftest import QUICK, MakePair

# --- who does not answer, or does not fit ---------------------------------------------------------


def test_a_prefill_that_is_not_there(clock: SkippableClock) -> None:
    with lone_decode(replace(QUICK, connect_timeout_s=2 * NEVER_S)) as node:
        node.add(Request("r", list(range(30)), max_new_tokens=4, room=1, prefill=lasting_address()))
        node.pop_preallocated()
        until(node.peers)  # it was greeted, and the deadline runs
        clock.skip(NEVER_S / 2, [node])
        node.pop_preallocated()  # it is overdue by now, which this pass has found
        assert not node.wait(0.05)
        clock.skip(NEVER_S / 2, [node])
        assert isinstance(end_of(node, "r"), TransferTimeoutError)
        assert node.stats()["pages_free"] == 64
        until(lambda: not left(node))
        node.audit()


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_an_engine_that_never_comes(clock: SkippableClock, make_pair: MakePair, side: str) -> None:
    """The one side's deadline ends it on the other too."""
    soon = NEVER_S / 2
    pair = make_pair(control=replace(QUICK, bootstrap_timeout_s=soon, waiting_timeout_s=soon))
    if side == "prefill":
        pair.submit("r", tokens_of(1, 10), tell=False)
        pair.until(lambda: pair.prefill.stats()["rooms"] == 1)
        clock.skip(soon, [pair.decode])
        pair.until(lambda: "r" in pair.d.ended)
        assert isinstance(pair.d.ended["r"], TransferTimeoutError)
    else:
        pair.p.add("r", tokens_of(1, 10), room=1)
        until(
            lambda: (
                not pair.prefill.transfers.thread.inbox.pending
                and pair.prefill.stats()["rooms"] == 1
            )
        )
        clock.skip(soon, [pair.prefill])
        pair.until(lambda: "r" in pair.p.failed)
        assert isinstance(pair.p.failed["r"], TransferTimeoutError)
    pair.settle()


# --- junk, and strangers --------------------------------------------------------------------------


def test_keys_and_names(clock: SkippableClock, caplog: pytest.LogCaptureFixture) -> None:
    """A key opens the door under its own name only; the requests of others end at once, and both
    sides say which key."""
    server, alice, bob = (
        CurveConfig(*(key.decode() for key in zmq.curve_keypair())) for _ in range(3)
    )
    allowed = {alice.public_key: "alice", bob.public_key: "bob"}
    guarded = replace(QUICK, curve=replace(server, allowed_clients=allowed))

    def client(keys: CurveConfig | None) -> ControlConfig:
        curve = keys and replace(keys, server_key=keys.server_key or server.public_key)
        return replace(QUICK, connect_timeout_s=NEVER_S, curve=curve)

    unknown = CurveConfig(*(key.decode() for key in zmq.curve_keypair()))
    as_alice = "allowed_clients has for its key " + repr(short_key(alice.public_key))
    cases: list[tuple[str, CurveConfig | None, str, str]] = [
        ("bob", alice, as_alice, as_alice),
        ("carol", alice, as_alice, as_alice),
        ("bob", None, "ours 'no keys', theirs 'keys'", "ours 'keys', theirs 'no keys'"),
        ("alice", unknown, *[f"key {short_key(unknown.public_key)!r} is not in"] * 2),
    ]
    with PrefillNode(make_pool(), PrefillConfig(control=guarded)) as prefill:
        for attempt, (name, keys, ours, theirs) in enumerate(cases):
            caplog.clear()
            clock.skip(REPEAT_S, [prefill])  # a peer has a line a minute
            with lone_decode(client(keys), name=name) as impostor:
                impostor.add(Request("r", [1], max_new_tokens=1, room=1, prefill=prefill.endpoint))
                error = end_of(impostor, "r")
                assert isinstance(error, HandshakeError)
                assert ours in str(error)
                lines = f"{name}: refused: ", str(error), "prefill-0: shut out: "
                numbers = iter(range(2, 10_000))

                def ask_again(node=impostor, numbers=numbers) -> None:  # type: ignore[no-untyped-def]
                    """The end that sees it first closes the connection, maybe before the other."""
                    room = next(numbers)
                    at = prefill.endpoint
                    node.add(Request(f"r{room}", [1], max_new_tokens=1, room=room, prefill=at))
                    end_of(node, f"r{room}")
                    # The line may be of the client before, whose connection was still tried.
                    clock.skip(REPEAT_S, [prefill])

                def said(lines=lines, theirs=theirs) -> bool:  # type: ignore[no-untyped-def]
                    shut_out = caplog.text.split("shut out: ")[1:]
                    return all(line in caplog.text for line in lines) and any(
                        theirs in line for line in shut_out
                    )

                until(said, step=ask_again)
                assert prefill.stats()["handshakes_refused"] > attempt
            for known in (server, alice, bob, unknown):
                assert known.secret_key not in caplog.text + str(error)
        assert prefill.peers() == {}
        with lone_decode(client(alice), name="alice") as decode:
            pair = NodePair(decode, prefill)
            pair.submit("r", tokens_of(1, 10))
            pair.run("r")
            pair.check_at_rest()
            assert [peer.name for peer in prefill.peers()] == ["alice"]


# --- networks -------------------------------------------------------------------------------------


def test_a_prefill_on_another_network_needs_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, before anything is sent. Of prefill's own: test_refused.py."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with lone_decode(QUICK) as node:
        node.add(Request("r", [1, 2, 3], max_new_tokens=4, room=1, prefill="tcp://192.0.2.77:5000"))
        error = end_of(node, "r")
        assert isinstance(error, ConfigError)
        assert "interface=" in str(error)
        assert "192.0.2.77" in str(error)
        until(lambda: not left(node))


def test_a_request_whose_prefill_is_not_there_is_served_by_another_one(make_pair: MakePair) -> None:
    """By the hook where nothing answers, by a call before that is known; no page is taken."""
    lost: list[Exception] = []
    prefill = make_pair().prefill

    def elsewhere(req: object, error: Exception) -> str:
        lost.append(error)
        return prefill.endpoint

    config = DecodeConfig(
        name="other", max_running=1, reserve_tokens=0, max_retries=1, retarget=elsewhere,
        control=replace(QUICK, connect_timeout_s=0.05),
    )  # fmt: skip
    with DecodeNode(make_pool(), config) as node:
        pair = NodePair(node, prefill)
        for rid in ("hook", "call"):
            pair.d.submit(rid, tokens_of(1, 10), lasting_address(), 1, tell=False)
        assert node.pop_preallocated() == []
        node.retarget("call", prefill.endpoint)
        pair.run("hook", "call")
        assert pair.d.ended == {"hook": None, "call": None}
        assert sorted(pair.p.sent) == ["call.1", "hook.1"], "of generation 1"
        pair.check_at_rest()
    (error,) = lost
    assert isinstance(error, PeerLostError)
    assert "no answer" in str(error)


def test_a_loaded_service_serves_what_has_waited_longer_than_any_timeout(
    clock: SkippableClock, make_pair: MakePair
) -> None:
    """Prefill waits for a promise, and for its own engine; decode for pages, and for a chunk."""
    pair = make_pair(control=replace(QUICK, longest_wait_s=100 * NEVER_S))
    proceed = queued(pair)
    nodes: list[Any] = [pair.decode, pair.prefill]

    def heard_s() -> float:
        decode, prefill = (node.transfers.control for node in nodes)
        ends = [*decode._links.all(), *prefill._peers.all()]
        return min((end.live.heard_s for end in ends), default=-math.inf)

    for _ in range(5):
        clock.skip(0.6 * NEVER_S, nodes)
        now_s = clock.monotonic()
        until(lambda now_s=now_s: heard_s() >= now_s)
        pair.step()
    assert not pair.d.ended
    assert not pair.p.failed
    proceed()
    pair.until(lambda: pair.d.ended == {"big": None, "r": None})


def test_a_request_that_goes_elsewhere_is_refused_at_once_where_it_was(make_pair: MakePair) -> None:
    """The call alone says so: decode's engine does nothing else."""
    pair = make_pair(control=replace(QUICK, connect_timeout_s=0.2))
    proceed = queued(pair)
    pair.decode.retarget("r", lasting_address())
    until(lambda: (pair.p.step(), "r" in pair.p.failed)[1])
    assert isinstance(pair.p.failed["r"], AbortedError)
    pair.decode.abort("r")
    proceed()
    pair.until(lambda: pair.d.ended.keys() == {"big", "r"})


@pytest.mark.parametrize("stage", STAGES)
def test_decode_aborts(pair: NodePair, stage: Callable[[NodePair], Proceed]) -> None:
    proceed = stage(pair)
    assert pair.decode.abort("r")
    assert not pair.decode.abort("r")
    pair.until(lambda: "r" in pair.d.ended)
    assert isinstance(pair.d.ended["r"], AbortedError)
    if stage in (computing, transferring):  # else prefill may be done before it hears of it
        pair.until(lambda: "r" in pair.p.failed)
        assert "aborted" in str(pair.p.failed["r"])
    proceed()
    if stage is queued:
        pair.until(lambda: "big" in pair.d.ended)
        pair.until(lambda: "r" in pair.p.failed)  # which has never been promised anything
        assert "aborted" in str(pair.p.failed["r"])
    pair.settle()
    pair.d.hold_running = pair.p.hold = False
    if stage in (promised, full_hit):  # prefill's engine comes late, and hears of it at once
        pair.p.add("r", tokens_of(1, 28 if stage is full_hit else 30), 5)
        pair.until(lambda: "r" in pair.p.failed)
        assert isinstance(pair.p.failed["r"], AbortedError)
    pair.submit("next", tokens_of(1, 34))  # and life goes on
    pair.run("next")
    assert pair.d.ended["next"] is None


@pytest.mark.parametrize("stage", [queued, computing, transferring, arrived, running])
def test_prefill_aborts(pair: NodePair, stage: Callable[[NodePair], Proceed]) -> None:
    proceed = stage(pair)
    too_late = stage in (arrived, running)
    if stage is running:
        pair.until(lambda: not left(pair.prefill))
    assert pair.prefill.abort("r") is (stage is not running) or too_late
    proceed()
    pair.d.hold_running = pair.p.hold = False
    pair.until(lambda: "r" in pair.d.ended)
    if too_late:
        assert pair.d.ended["r"] is None
    else:
        assert isinstance(pair.d.ended["r"], TransferError)
        assert "aborted" in str(pair.d.ended["r"]), "also where decode had promised nothing yet"
    if stage is queued:
        pair.until(lambda: pair.d.ended.get("big", True) is None)
    pair.settle()


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_what_was_not_posted_yet_is_not_waited_for(pair: NodePair, side: str) -> None:
    """The device is never done with the second chunk: an abort is drained all the same."""
    transferring(pair)
    getattr(pair, side).abort("r")
    pair.until(lambda: "r" in pair.d.ended)
    pair.settle()
