"""Both sides' rooms over real NIXL, as SGLang's polls see them."""

from __future__ import annotations

from typing import Any

import pytest

from prefixkv.engines.sglang import sends as sends_module
from prefixkv.transfer import KVPoll
from tests.engines_sglang.conftest import PAGE, Servers
from tests.models.patience import lasting_address, until


@pytest.mark.parametrize("order", ["request first", "announced first", "promised first"])
def test_a_prompt_arrives_in_chunks_and_decodes_prefix_is_not_sent(
    servers: Servers, order: str
) -> None:
    """Six pages, of which decode has two."""
    if order == "request first":
        send = servers.begin(1, 6)
        assert send.poll is KVPoll.BOOTSTRAPPING
    if order == "promised first":
        receive = servers.open(1, 6, [11, 12, 13, 14])
    servers.sends.announce(1, "decode-0")
    if order != "request first":
        send = servers.begin(1, 6)
    if order != "promised first":
        receive = servers.open(1, 6, [11, 12, 13, 14])
    servers.until(lambda: send.poll is KVPoll.WAITING_FOR_INPUT)
    assert send.prefix_pages == 2
    assert receive.held
    servers.sends.send(send, [20, 21])
    assert send.poll is KVPoll.TRANSFERRING
    assert receive.outcome is None
    servers.sends.send(send, [25, 3], last=True, aux=b"row")
    servers.until(lambda: receive.outcome and send.poll.ended)
    assert (receive.outcome, send.poll) == (KVPoll.SUCCESS, KVPoll.SUCCESS)
    assert receive.aux == b"row"
    assert servers.holds([11, 12, 13, 14], [20, 21, 25, 3])
    assert not servers.target.buffers[0][:11].any()
    assert servers.sends.transfers.bytes_sent == 4 * 3 * 64
    assert not receive.held
    assert len(servers.sends) == len(servers.receives) == 0


def test_a_prompt_that_decode_has_sends_its_row_alone(servers: Servers) -> None:
    send, receive = servers.begin(1, 3), servers.open(1, 3, [])
    servers.sends.announce(1, "decode-0")
    servers.until(lambda: send.poll is KVPoll.WAITING_FOR_INPUT)
    assert send.prefix_pages == 3
    servers.sends.send(send, [], last=True, aux=b"row")
    servers.until(lambda: receive.outcome and send.poll.ended)
    assert (receive.outcome, receive.aux) == (KVPoll.SUCCESS, b"row")
    assert servers.sends.transfers.bytes_sent == 0


def test_two_prompts_under_one_room_fail_on_both_sides(servers: Servers) -> None:
    send, receive = servers.begin(1, 3, "one"), servers.open(1, 3, [5, 6, 7], "other")
    servers.sends.announce(1, "decode-0")
    servers.until(lambda: receive.outcome and send.poll.ended and not receive.held)
    assert send.poll is KVPoll.FAILED
    assert "PromptMismatchError" in send.error
    assert "PromptMismatchError" in receive.error
    assert not servers.target.buffers[0].any()


def test_an_abort_on_decode_holds_the_pages_until_the_room_is_drained(servers: Servers) -> None:
    send, receive = servers.begin(1, 3), servers.open(1, 3, [5, 6, 7])
    servers.sends.announce(1, "decode-0")
    servers.until(lambda: send.poll is KVPoll.WAITING_FOR_INPUT)
    servers.sends.send(send, [1])
    servers.receives.abort(receive, "enough")
    assert (receive.outcome, receive.error) == (KVPoll.FAILED, "enough")
    assert servers.receives.is_held(1)  # it has failed, and prefill may be writing
    again = servers.open(1, 3, [8, 9, 10])
    assert again.outcome is KVPoll.FAILED  # the number is in use
    assert "not over yet" in again.error
    assert servers.receives.is_held(1)
    servers.until(lambda: not servers.receives.is_held(1))
    servers.until(lambda: send.poll is KVPoll.FAILED)
    servers.sends.send(send, [2, 3], last=True)  # SGLang goes on computing: no-op
    assert len(servers.sends) == 0


def test_an_abort_on_prefill_ends_when_no_write_reads_its_pages(servers: Servers) -> None:
    send, receive = servers.begin(1, 3), servers.open(1, 3, [5, 6, 7])
    servers.sends.announce(1, "decode-0")
    servers.until(lambda: send.poll is KVPoll.WAITING_FOR_INPUT)
    servers.sends.send(send, [1])
    servers.sends.abort(send, "enough")
    assert send.poll is KVPoll.TRANSFERRING  # until it is known that its pages are free
    servers.until(lambda: send.poll is KVPoll.FAILED)
    assert send.error == "enough"
    servers.until(lambda: receive.outcome is KVPoll.FAILED and not receive.held)
    assert len(servers.sends) == len(servers.receives) == 0


def test_decode_hears_of_a_request_that_was_aborted_before_it_announced_itself(
    servers: Servers,
) -> None:
    send = servers.begin(1, 3)
    servers.sends.abort(send, "enough")
    assert send.poll is KVPoll.FAILED
    assert len(servers.sends) == 0
    receive = servers.open(1, 3, [5, 6, 7])
    servers.sends.announce(1, "decode-0")
    servers.until(lambda: receive.outcome and not receive.held)
    assert receive.outcome is KVPoll.FAILED


def test_prefill_hears_that_decode_will_promise_nothing(servers: Servers) -> None:
    send = servers.begin(1, 3)
    servers.sends.announce(1, "decode-0")
    servers.receives.refuse(1, servers.prefill, "no room", 1)
    servers.until(lambda: send.poll is KVPoll.FAILED)
    assert "no room" in send.error


def test_a_room_is_one_requests_and_one_decode_workers(servers: Servers) -> None:
    send = servers.begin(1, 3)
    other = servers.begin(1, 3)
    assert (other.poll, other.error) == (KVPoll.FAILED, "room 1 is another request's")
    servers.sends.announce(1, "decode-0")
    servers.sends.announce(1, "decode-1")  # is refused, and changes nothing
    servers.sends.announce(1, "decode-0")
    assert send.decode == "decode-0"
    servers.open(1, 3, [5, 6, 7])
    servers.until(lambda: send.poll is KVPoll.WAITING_FOR_INPUT)


def test_too_few_pages_end_a_room(servers: Servers) -> None:
    send, receive = servers.begin(1, 3), servers.open(1, 3, [5, 6, 7])
    servers.sends.announce(1, "decode-0")
    servers.until(lambda: send.poll is KVPoll.WAITING_FOR_INPUT)
    servers.sends.send(send, [1, 2], last=True)
    assert send.error == "2 pages were given for a prompt of 3"
    servers.until(lambda: send.poll is KVPoll.FAILED)
    servers.until(lambda: receive.outcome is KVPoll.FAILED and not receive.held)


@pytest.mark.parametrize(
    "change", [{"prefix_len": PAGE + 1}, {"pages": [5, 6]}, {"pages": [5, 6, 99]}]
)
def test_pages_that_cannot_be_promised_are_not_held(
    servers: Servers, change: dict[str, Any]
) -> None:
    send = servers.begin(1, 3)
    servers.sends.announce(1, "decode-0")
    receive = servers.open(1, 3, **{"pages": [5, 6, 7], "prefix_len": 0, **change})
    assert (receive.outcome, receive.held) == (KVPoll.FAILED, False)
    servers.until(lambda: send.poll is KVPoll.FAILED)
    assert receive.error in send.error  # prefill was told why, and did not find out by waiting


def test_prefill_that_has_gone_fails_decode_and_frees_its_pages(servers: Servers) -> None:
    send, receive = servers.begin(1, 3), servers.open(1, 3, [5, 6, 7])
    servers.sends.announce(1, "decode-0")
    servers.until(lambda: send.poll is KVPoll.WAITING_FOR_INPUT)
    servers.sends.transfers.close()

    def failed() -> bool:
        servers.receives.pump()
        return receive.outcome is KVPoll.FAILED and not receive.held

    until(failed)
    assert "PeerLostError" in receive.error


def test_a_prefill_worker_that_is_not_there_fails_the_room(servers: Servers) -> None:
    receive = servers.open(1, 3, [5, 6, 7], prefill=lasting_address())
    servers.until(lambda: receive.outcome and not receive.held)
    assert receive.outcome is KVPoll.FAILED


def test_what_is_kept_of_rooms_without_a_request_is_bounded(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sends_module, "MAX_ANNOUNCED", 3)
    for room in range(5):
        servers.sends.announce(room, "decode-0")
    for room in range(10, 15):
        servers.sends.abort(servers.begin(room, 1), "enough")
    assert servers.begin(1, 1).decode == ""  # forgotten
    assert servers.begin(2, 1).decode == "decode-0"
    assert [*servers.sends._gone] == [12, 13, 14]
