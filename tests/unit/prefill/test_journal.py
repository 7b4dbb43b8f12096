"""What the prefill scheduler writes down of its requests, with a clock moved by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefixkv.errors import TransferError
from prefixkv.pages.manager import PageManager
from prefixkv.prefill.request import PrefillRequest, timeline
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol.events import Bootstrapped, RoomEnded
from prefixkv.protocol.ids import KVPoll, PeerId
from prefixkv.request import Request
from tests.support.schedulers import prefill_scheduler

PAGE_BYTES = 100


@pytest.fixture
def ended() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def scheduler(ended: list[dict[str, Any]]) -> PrefillScheduler:
    scheduler = prefill_scheduler(PageManager(16, 4, 8))

    def write(req: PrefillRequest, now_s: float) -> None:
        ended.append(json.loads(json.dumps(timeline(req, PAGE_BYTES, 4))))

    scheduler.journal.on_ended = [write]
    return scheduler


def test_a_request_from_arrival_to_sent(
    scheduler: PrefillScheduler, ended: list[dict[str, Any]]
) -> None:
    scheduler.now_s = 5.0
    req = scheduler.add(Request("a", list(range(10)), room=3, decode="decode-1", namespace="lora"))
    scheduler.hear(Bootstrapped(req.room_key, PeerId("decode-1", 1), 4), 6.0)
    scheduler.now_s = 8.0
    scheduler.pop_bootstrapped()
    scheduler.now_s = 9.0
    scheduler.send_chunk(req, 4)
    scheduler.now_s = 11.0
    scheduler.send_chunk(req, 10, last=True)
    scheduler.hear(RoomEnded(req.room_key, KVPoll.SUCCESS, None), 15.0)
    assert ended == [
        {
            "side": "prefill",
            "rid": "a",
            "room": 3,
            "generation": 0,
            "namespace": "lora",
            "outcome": "sent",
            "error": None,
            "peer": "decode-1",
            "prompt_tokens": 10,
            "hit_tokens": 0,
            "decode_hit_tokens": 4,
            "chunks": 2,
            "sent_bytes": 2 * PAGE_BYTES,
            "skipped_bytes": PAGE_BYTES,
            "promised_s": 1.0,
            "started_s": 3.0,
            "computed_s": 6.0,
            "ended_s": 10.0,
        }
    ]
    journal = scheduler.journal
    assert {reason: waits.total for reason, waits in journal.waits.items()} == {
        "decode": 1.0, "pages": 2.0, "compute": 3.0, "send": 4.0,
    }  # fmt: skip
    assert journal.transfers["success"].read() == {"decode-1": [1]}
    assert journal.tokens.read()["lora"][:2] == [10, 0]
    assert [name for name, _ in scheduler.holders()] == ["a"]


def test_what_fails_or_is_aborted_is_written_down_once(
    scheduler: PrefillScheduler, ended: list[dict[str, Any]]
) -> None:
    first = scheduler.add(Request("a", list(range(10)), room=1, decode="d"))
    scheduler.add(Request("b", list(range(10)), room=2, decode="d"))
    scheduler.hear(Bootstrapped(first.room_key, PeerId("d", 1), 0), 1.0)
    scheduler.hear(RoomEnded(first.room_key, KVPoll.FAILED, TransferError("broken")), 2.0)
    scheduler.hear(RoomEnded(first.room_key, KVPoll.FAILED, TransferError("again")), 3.0)
    scheduler.now_s = 4.0
    scheduler.abort("b")
    assert [
        (record["rid"], record["outcome"], record["error"], record["ended_s"]) for record in ended
    ] == [
        ("a", "failed", "TransferError: broken", 2.0),
        ("b", "aborted", "AbortedError: request 'b' was aborted", 4.0),
    ]
    transfers = {name: tally.read() for name, tally in scheduler.journal.transfers.items()}
    assert transfers == {
        "success": {},
        "failed": {"d": [1]},
        "aborted": {},
    }  # the other had met no peer
