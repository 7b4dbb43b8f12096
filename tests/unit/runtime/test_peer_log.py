"""The log of peers: a line for each thing that becomes of one, and never a flood."""

from __future__ import annotations

import logging

import pytest

from prefixkv.control.lives import PeerChange
from prefixkv.protocol.ids import PeerId
from prefixkv.runtime import control_thread as peer_log
from prefixkv.runtime.control_thread import REPEAT_S, PeerLog

P = PeerId("p", 0x3F2A)


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prefixkv.peers")


def test_a_line_names_the_worker_the_peer_and_why(caplog: pytest.LogCaptureFixture) -> None:
    log = PeerLog("d0")
    log.write(
        [PeerChange("met", P, "at tcp://x"), PeerChange("refused", P, "page_size differs")], 0.0
    )
    assert caplog.messages == [
        "d0: met: p life 3f2a at tcp://x",
        "d0: refused: p life 3f2a page_size differs",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_a_peer_that_is_refused_again_and_again_is_a_line_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = PeerLog("d0")
    for second in range(int(REPEAT_S) + 1):  # started again each second, and says another reason
        log.write([PeerChange("refused", PeerId("p", second), f"no, {second}")], float(second))
    assert caplog.messages == [
        "d0: refused: p life 0 no, 0",
        f"d0: refused: p life 3c no, 60 ({int(REPEAT_S) - 1} more since the last line)",
    ]


def test_each_life_that_is_met_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    log = PeerLog("d0")
    log.write([PeerChange("met", PeerId("p", life)) for life in (1, 2, 1)], 0.0)
    assert len(caplog.messages) == 2


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_log, "_MAX_KEYS", 3)
    log = PeerLog("d0")
    log.write([PeerChange("met", PeerId(f"p{number}", 1)) for number in range(9)], 0.0)
    assert len(log._written) == 3
