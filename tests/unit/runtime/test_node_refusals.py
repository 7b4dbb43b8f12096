"""Requests that prefill's engine does not take, and peers that one side does not work with: both
sides hear of it at once, with real nodes."""

from __future__ import annotations

import logging

import pytest

from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import DecodeConfig, ModelConfig, PrefillConfig
from prefixkv.errors import DrainingError, HandshakeError, PeerLostError, RequestError
from prefixkv.request import Request
from tests.support.node_pair import NodePair, make_pool, tokens_of
from tests.support.patience import until
from tests.unit.runtime.conftest import QUICK, MakePair

PROMPT = tokens_of(1, 30)


def for_prefill(rid: str, room: int, tokens: object = PROMPT) -> Request:
    return Request(rid, tokens, room=room, decode="decode-0")  # type: ignore[arg-type]


def test_decode_hears_at_once_what_prefills_add_refuses(pair: NodePair) -> None:
    pair.submit("twice", PROMPT, room=1, tell=False)
    pair.prefill.add(for_prefill("twice", 9))
    with pytest.raises(RequestError, match="is here already"):
        pair.prefill.add(for_prefill("twice", 1))
    pair.prefill.abort("twice")
    pair.run("twice")
    assert "is here already" in str(pair.d.ended["twice"])
    pair.submit("late", PROMPT, room=2, tell=False)
    pair.prefill.drain()
    with pytest.raises(DrainingError):
        pair.prefill.add(for_prefill("late", 2))
    pair.run("late")
    assert "is being drained" in str(pair.d.ended["late"])


def test_a_duplicate_does_not_harm_the_one_that_lives(pair: NodePair) -> None:
    pair.p.hold = True
    pair.submit("r", PROMPT, room=1)
    for request in (for_prefill("r", 1), for_prefill("another", 1)):
        with pytest.raises(RequestError):
            pair.prefill.add(request)
        with pytest.raises(RequestError, match="in use"):
            pair.prefill.refuse(request)
    pair.p.hold = False
    pair.run("r")
    assert pair.d.ended["r"] is None


# --- peers ----------------------------------------------------------------------------------------


def logged(caplog: pytest.LogCaptureFixture, *words: str) -> bool:
    return any(all(word in line for word in words) for line in caplog.messages)


def test_both_sides_log_whom_they_meet_and_that_they_do_not_fit(
    make_pair: MakePair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefixkv.peers")
    pair = make_pair()
    pair.submit("r", PROMPT)
    pair.run("r")
    until(lambda: logged(caplog, "decode-0: met: prefill-0 life", pair.prefill.endpoint))
    until(lambda: logged(caplog, "prefill-0: met: decode-0 life"))
    misfit = make_pair(
        decode={"model": ModelConfig(model="another", option_names={"model": "--name"})},
        prefill={"model": ModelConfig(option_names={"model": "--path"})},
    )
    misfit.submit("r", PROMPT, tell=False)
    misfit.run("r")
    assert isinstance(misfit.d.ended["r"], HandshakeError)
    until(lambda: logged(caplog, "decode-0: refused:", "model (--name) differs"))
    until(lambda: logged(caplog, "prefill-0: refused: decode-0 life", "model (--path) differs"))


def test_a_prefill_worker_that_was_fenced_and_lives_is_told(
    pair: NodePair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.p.hold = True
    pair.submit("r", PROMPT)
    pair.until(lambda: bool(pair.p.computing))
    assert pair.decode.lost_peers() == pair.prefill.lost_peers() == {}
    pair.decode.fence(*pair.prefill.peer_id)
    pair.until(lambda: "r" in pair.d.ended and "r" in pair.p.failed)
    error = pair.d.ended["r"]
    assert isinstance(error, PeerLostError)
    assert error.peer == pair.prefill.peer_id
    assert isinstance(pair.p.failed["r"], PeerLostError)
    assert "was fenced" in str(pair.p.failed["r"])
    assert pair.prefill.stats()["refused_by_peers"] == 1
    until(lambda: logged(caplog, "prefill-0: refused: decode-0 life", "was fenced"))
    until(lambda: logged(caplog, "decode-0: over: prefill-0 life", "was fenced"))


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_worker_that_is_closed_is_no_reason_to_warn(
    first: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefixkv")
    with (
        PrefillNode(make_pool(), PrefillConfig(control=QUICK)) as prefill,
        DecodeNode(make_pool(), DecodeConfig(control=QUICK)) as decode,
    ):
        pair = NodePair(decode, prefill)
        pair.submit("r", PROMPT)
        pair.run("r")
        until(lambda: logged(caplog, "prefill-0: met: decode-0 life"))
        leaves, stays = (prefill, decode) if first == "prefill" else (decode, prefill)
        leaves.close()
        left = f"{stays.peer_id.name}: left: {leaves.peer_id}"
        until(lambda: logged(caplog, left, "has left"))
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


class _Raises(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ZeroDivisionError("on purpose")


def test_a_log_handler_that_raises_breaks_nothing(pair: NodePair) -> None:
    logger = logging.getLogger("prefixkv.peers")
    handler, level = _Raises(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        pair.submit("r", PROMPT)
        pair.run("r")
        until(lambda: pair.decode.stats()["log_errors"] > 0)
        until(lambda: pair.prefill.stats()["log_errors"] > 0)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert pair.d.ended["r"] is None
    assert pair.decode.stats()["control_errors"] == 0
