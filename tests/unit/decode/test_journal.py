"""What the decode scheduler writes down of its requests, with a clock moved by hand."""

from __future__ import annotations

import json
from typing import Any

from prefixkv.decode.request import DecodeRequest, timeline
from tests.unit.decode.desk import PAGE_SIZE, AbortRoom, Desk

PAGE_BYTES = 100


class Watched(Desk):
    """A desk that keeps the timelines of what has ended."""

    def __init__(self, num_pages: int = 16, **settings: Any) -> None:
        super().__init__(num_pages, **settings)
        self.ended: dict[str, dict[str, Any]] = {}
        self.scheduler.journal.on_ended = [self._write]

    def _write(self, req: DecodeRequest, now_s: float) -> None:
        assert now_s == self.now_s
        assert req.rid not in self.ended
        self.ended[req.rid] = json.loads(json.dumps(timeline(req, PAGE_BYTES, PAGE_SIZE)))

    def at(self, now_s: float) -> Watched:
        self.now_s = now_s
        return self

    def times(self, rid: str) -> list[float | None]:
        record = self.ended[rid]
        return [
            record[f"{name}_s"]
            for name in ("admitted", "transferred", "committed", "first_token", "ended")
        ]

    def waited(self, reason: str) -> tuple[int, float]:
        histogram = self.scheduler.journal.waits[reason]
        return histogram.cumulative()[-1], histogram.total

    def transfers(self) -> dict[str, dict[str, list[float]]]:
        return {
            name: rows
            for name, tally in self.scheduler.journal.transfers.items()
            if (rows := tally.read())
        }


def test_a_request_from_arrival_to_its_end() -> None:
    desk = Watched()
    desk.start("first", 8, max_new=1)
    desk.token(desk.scheduler.requests["first"])
    desk.finish(desk.scheduler.requests["first"])

    req = desk.at(10.0).add(
        "f2", [*(ord("f") * 1000 + place for place in range(8)), 1, 2], namespace=None
    )
    desk.at(11.0).admit()
    desk.at(13.0).succeed(req.room_key)
    desk.at(13.5).transferred()
    desk.at(14.0).token(req)
    desk.at(15.0).token(req)
    desk.at(20.0).finish(req)
    assert desk.times("f2") == [1.0, 3.0, 3.5, 4.0, 10.0]
    assert desk.ended["f2"] == desk.ended["f2"] | {
        "side": "decode", "rid": "f2", "room": 2, "generation": 0, "namespace": "",
        "outcome": "finished", "error": None, "peer": "p", "prompt_tokens": 10, "hit_tokens": 8,
        "shared_tokens": 0, "output_tokens": 2, "asked_bytes": PAGE_BYTES,
        "skipped_bytes": 2 * PAGE_BYTES, "retractions": 0, "retries": 0,
    }  # fmt: skip
    assert desk.scheduler.journal.tokens.read()[""][:2] == [18, 8]
    assert desk.scheduler.journal.pages_received == 3
    assert desk.transfers() == {"success": {"p": [2]}}
    assert [
        desk.waited(reason) for reason in ("pages", "transfer", "flight", "engine", "first_token")
    ] == [
        (2, 1.0),
        (2, 2.0),
        (0, 0.0),
        (2, 1.0),
        (2, 4.0),
    ]


def test_a_request_that_joins_a_flight_waits_for_it_and_its_tokens_are_shared() -> None:
    desk = Watched()
    first, second = desk.add("a1", 12), desk.add("a2", 12)
    assert desk.at(1.0).admit() == ["a1", "a2"]
    desk.at(2.0).succeed(second.room_key)
    assert desk.transferred() == []
    desk.at(5.0).succeed(first.room_key)
    assert desk.at(6.0).transferred() == ["a1", "a2"]
    desk.at(7.0).token(first, second)
    for req in (first, second):
        desk.finish(req)
    assert desk.times("a2") == [1.0, 2.0, 6.0, 7.0, 7.0]
    assert (desk.ended["a1"]["shared_tokens"], desk.ended["a2"]["shared_tokens"]) == (0, 12)
    assert (desk.ended["a1"]["hit_tokens"], desk.ended["a2"]["hit_tokens"]) == (0, 0)
    assert (desk.ended["a1"]["asked_bytes"], desk.ended["a2"]["asked_bytes"]) == (3 * PAGE_BYTES, 0)
    assert desk.waited("flight") == (1, 4.0)
    assert desk.waited("engine") == (
        2,
        2.0 + 1.0,
    )  # the first one's pages were there at 5, but nobody popped them
    assert desk.scheduler.journal.tokens.read()[""][-1] == 12
    assert desk.scheduler.journal.pages_received == 3


def test_a_retraction_and_what_it_asks_for_again_are_counted_but_times_stay_the_first() -> None:
    desk = Watched(num_pages=8)
    oldest = desk.start("o", 4, max_new=8, outputs=1)
    req = desk.at(1.0).start("r", 8, max_new=8, outputs=2)
    desk.at(2.0).retract(req)
    desk.scheduler.flush()
    desk.at(3.0)
    assert desk.admit() == ["r"]
    desk.at(4.0).succeed(req.room_key)
    desk.transferred()
    desk.at(5.0).token(req)
    desk.finish(req)
    desk.finish(oldest)
    assert desk.times("r") == [0.0, 0.0, 0.0, 0.0, 4.0]
    assert desk.ended["r"] == desk.ended["r"] | {
        "retractions": 1, "generation": 1, "asked_bytes": 5 * PAGE_BYTES, "output_tokens": 3,
    }  # fmt: skip
    assert desk.scheduler.journal.tokens.read()[""][0] == 12
    assert desk.waited("first_token")[0] == 2


def test_a_retry_says_what_went_wrong_first_and_both_transfers_are_counted() -> None:
    desk = Watched(max_retries=1)
    req = desk.admitted("a", 8)
    desk.at(1.0).fail(req.room_key, drained=True)
    assert desk.at(2.0).admit() == ["a"]
    desk.at(3.0).succeed(req.room_key)
    desk.transferred()
    desk.token(req)
    desk.finish(req)
    assert desk.times("a") == [0.0, 3.0, 3.0, 3.0, 3.0]
    assert desk.ended["a"] == desk.ended["a"] | {
        "outcome": "finished", "retries": 1, "error": "TransferError: broken",
        "asked_bytes": 4 * PAGE_BYTES,
    }  # fmt: skip
    assert desk.transfers() == {"success": {"p": [1]}, "failed": {"p": [1]}}


def test_what_fails_or_is_aborted_is_written_down_at_once_wherever_it_is() -> None:
    desk = Watched(num_pages=4)
    moving = desk.admitted("m", 8)
    waiting = desk.add("w", 12)
    desk.at(2.0).abort(waiting)
    assert desk.times("w") == [None, None, None, None, 2.0]
    assert desk.ended["w"]["outcome"] == "aborted"
    desk.at(3.0).abort(moving)
    assert desk.times("m") == [0.0, None, None, None, 3.0]
    assert any(isinstance(command, AbortRoom) for command in desk.commands())
    desk.fail(moving.room_key, drained=True)
    failing = desk.admitted("f", 8)
    desk.at(4.0).fail(failing.room_key, drained=True)
    assert desk.ended["f"]["outcome"] == "failed"
    assert desk.ended["f"]["error"] == "TransferError: broken"
    assert desk.transfers() == {"aborted": {"p": [1]}, "failed": {"p": [1]}}
    assert desk.waited("first_token") == (0, 0.0)


def test_whoever_has_pages_is_named() -> None:
    class Never:
        def query(self) -> bool:
            return False

    desk = Desk()
    assert desk.scheduler.holders() == []
    desk.add("queued", 8)
    assert desk.scheduler.holders() == []
    desk.admit()
    desk.start("running", 8)
    leaving = desk.start("leaving", 8)
    desk.finish(leaving, after=Never())
    assert [name for name, _ in desk.scheduler.holders()] == ["queued", "running", "leaving"]
    oldest = desk.pages.cache.oldest_lock()
    assert oldest is not None
    owners = [name for name, pages in desk.scheduler.holders() if pages.lock is oldest]
    assert owners


def test_a_flight_whose_request_has_gone_is_named_by_its_room() -> None:
    desk = Desk()
    first, _ = desk.add("a1", 12), desk.add("a2", 12)
    desk.admit()
    desk.abort(first)
    assert sorted(name for name, _ in desk.scheduler.holders()) == [
        "a2",
        f"sent {first.room}",
    ]
