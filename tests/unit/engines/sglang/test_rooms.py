"""Both sides' rooms over real NIXL, as SGLang's polls see them."""

from typing import Any

import pytest

from prefixkv.engines.sglang import rooms as rooms_module
from prefixkv.engines.sglang.rooms import Receive, RoomSend
from prefixkv.transfer import KVPoll
from tests.support.patience import until
from tests.unit.engines.sglang.conftest import PAGE, Servers, digest


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
    servers.announce(1)
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
    servers.announce(1)
    servers.until(lambda: send.poll is KVPoll.WAITING_FOR_INPUT)
    assert send.prefix_pages == 3
    servers.sends.send(send, [], last=True, aux=b"row")
    servers.until(lambda: receive.outcome and send.poll.ended)
    assert (receive.outcome, receive.aux) == (KVPoll.SUCCESS, b"row")
    assert servers.sends.transfers.bytes_sent == 0


def test_an_abort_on_decode_holds_the_pages_until_the_room_is_drained(servers: Servers) -> None:
    send, receive = servers.both(waits=True)
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
    send, receive = servers.both(waits=True)
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
    servers.announce(1)
    servers.until(lambda: receive.outcome and not receive.held)
    assert receive.outcome is KVPoll.FAILED


def test_a_room_is_one_requests_and_one_decode_workers(servers: Servers) -> None:
    send = servers.begin(1, 3)
    other = servers.begin(1, 3)
    assert (other.poll, other.error) == (KVPoll.FAILED, "room 1 is another request's")
    servers.announce(1)
    servers.announce(1, "decode-1")  # is refused, and changes nothing
    servers.announce(1)
    assert send.decode == "decode-0"
    servers.open(1, 3, [5, 6, 7])
    servers.until(lambda: send.poll is KVPoll.WAITING_FOR_INPUT)


def test_too_few_pages_end_a_room(servers: Servers) -> None:
    send, receive = servers.both(waits=True)
    servers.sends.send(send, [1, 2], last=True)
    assert send.error == "2 pages were given for a prompt of 3"
    servers.until(lambda: send.poll is KVPoll.FAILED)
    servers.until(lambda: receive.outcome is KVPoll.FAILED and not receive.held)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"prefix_len": PAGE + 1}, {"pages": [5, 6]}, {"pages": [5, 6, 99]}]
)
def test_pages_that_cannot_be_promised_are_not_held(
    servers: Servers, change: dict[str, Any]
) -> None:
    send = servers.begin(1, 3)
    servers.announce(1)
    receive = servers.open(1, 3, **{"pages": [5, 6, 7], "prefix_len": 0, **change})
    assert (receive.outcome, receive.held) == (KVPoll.FAILED, False)
    servers.until(lambda: send.poll is KVPoll.FAILED)
    assert receive.error in send.error  # prefill was told why, and did not find out by waiting


def test_prefill_that_has_gone_fails_decode_and_frees_its_pages(servers: Servers) -> None:
    _, receive = servers.both(waits=True)
    servers.sends.transfers.close()

    def failed() -> bool:
        servers.receives.pump()
        return receive.outcome is KVPoll.FAILED and not receive.held

    until(failed)
    assert "PeerLostError" in receive.error


def test_what_is_kept_of_rooms_without_a_request_is_bounded(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms_module, "MAX_ANNOUNCED", 3)
    for room in range(5):
        servers.announce(room)
    for room in range(10, 15):
        servers.sends.abort(servers.begin(room, 1), "enough")
    assert servers.begin(1, 1).decode == ""  # forgotten
    first = servers.begin(20, 1)
    monkeypatch.setattr(rooms_module, "MAX_DUPLICATES", 2)
    servers.announce(20)
    for number in range(5):
        servers.sends.decline(20, digest(str(number)), "no")
        servers.announce(20, prompt=str(number))
    assert len(first.duplicates) == len(first.later_announcements) == 2
    assert servers.begin(2, 1).decode == "decode-0"
    assert [*servers.sends._declined] == [12, 13, 14]


# --- one number, several requests -----------------------------------------------------------------


def finish(servers: Servers, send: RoomSend, receive: Receive, source: list[int]) -> None:
    """A request to its end, of which prefill's engine has not asked yet."""
    servers.until(lambda: send.poll is KVPoll.WAITING_FOR_INPUT)
    servers.sends.send(send, source, last=True, aux=b"row")

    def arrived() -> bool:
        servers.receives.pump()
        return receive.outcome is KVPoll.SUCCESS and not receive.held

    until(arrived)
    assert len(servers.sends) == 1


@pytest.mark.parametrize("announced", [True, False])
def test_decode_hears_of_a_request_that_prefill_refused(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    monkeypatch.setattr(rooms_module, "GRACE_S", 0.0)
    receive = servers.open(1, 3, [5, 6, 7])
    if announced:
        servers.announce(1)
    servers.sends.decline(1, b"", "the prompt is too long")
    if not announced:
        servers.announce(1)
    servers.until(lambda: receive.outcome and not receive.held)
    assert receive.outcome is KVPoll.FAILED
    assert "the prompt is too long" in receive.error


@pytest.mark.parametrize("prompt", ["prompt", "another"])
def test_a_number_is_free_when_its_request_has_ended_on_prefill(
    servers: Servers, prompt: str
) -> None:
    """Decode is the first to say that it is in use again."""
    servers.sends.abort(servers.begin(1, 3), "enough")
    receive = servers.open(1, 3, [5, 6, 7], prompt)
    servers.announce(1, prompt=prompt)
    servers.sends.pump()
    send = servers.begin(1, 3, prompt)
    finish(servers, send, receive, [1, 2, 3])
    servers.until(lambda: send.poll is KVPoll.SUCCESS)


def test_what_ended_on_prefill_is_refused_after_a_grace(servers: Servers) -> None:
    servers.sends.decline(1, digest("prompt"), "enough")
    receive = servers.open(1, 3, [5, 6, 7])
    servers.announce(1)
    servers.now_s += rooms_module.GRACE_S / 2
    servers.sends.pump()
    assert [*servers.sends._unclaimed] == [1]
    servers.now_s += rooms_module.GRACE_S / 2
    servers.until(lambda: receive.outcome and not receive.held)
    assert "enough" in receive.error
    assert not servers.sends._unclaimed


def test_a_second_request_of_a_number_fails_alone_on_both_sides(servers: Servers) -> None:
    """Decode has done with the first, and prefill's engine has not asked yet."""
    send, receive = servers.both()
    finish(servers, send, receive, [1, 2, 3])
    second = servers.begin(1, 3, "second")
    assert (second.poll, second.error) == (KVPoll.FAILED, "room 1 is another request's")
    other = servers.open(1, 3, [8, 9, 10], "second")
    servers.announce(1, prompt="second")
    servers.until(lambda: other.outcome and not other.held)
    assert other.outcome is KVPoll.FAILED
    assert send.poll is KVPoll.SUCCESS
    assert servers.holds([5, 6, 7], [1, 2, 3])
    assert len(servers.sends) == len(servers.receives) == 0


def test_decode_uses_a_number_again_before_prefill_knows_that_it_is_over(servers: Servers) -> None:
    send, receive = servers.both()
    finish(servers, send, receive, [1, 2, 3])
    other = servers.open(1, 3, [8, 9, 10], "second")
    servers.announce(1, prompt="second")
    servers.until(lambda: send.poll is KVPoll.SUCCESS)
    second = servers.begin(1, 3, "second")
    finish(servers, second, other, [4, 5, 6])
    servers.until(lambda: second.poll is KVPoll.SUCCESS)
    assert servers.holds([8, 9, 10], [4, 5, 6])


@pytest.mark.parametrize("promised", ["first", "last"])
def test_a_number_that_decode_gave_up_ends_or_serves_its_next_request(
    servers: Servers, promised: str
) -> None:
    """Prefill never had the first one's request. The next one may be taken for its other half."""
    met, receive = servers.both(2)
    assert served(servers, met, receive)
    receive = servers.open(1, 3, [5, 6, 7])
    servers.announce(1)
    servers.receives.abort(receive, "waited for long enough")
    servers.until(lambda: not receive.held)
    if promised == "first":
        receive = servers.open(1, 3, [5, 6, 7])
    send = servers.begin(1, 3)
    if promised == "last":
        servers.until(lambda: send.poll is KVPoll.FAILED)
        receive = servers.open(1, 3, [5, 6, 7])
    servers.announce(1)
    if not served(servers, send, receive):
        assert "waited for long enough" in send.error
        assert "waited for long enough" in receive.error
        # For a while the number's next use may end likewise, at once and on both sides.
        send, receive = servers.both()
        served(servers, send, receive)
        send, receive = servers.both(3)
        assert served(servers, send, receive)


def served(servers: Servers, send: RoomSend, receive: Receive) -> bool:
    servers.until(lambda: send.poll in (KVPoll.WAITING_FOR_INPUT, KVPoll.FAILED))
    if send.poll is KVPoll.FAILED:
        servers.until(lambda: receive.outcome and not receive.held)
        return False
    finish(servers, send, receive, [1, 2, 3])
    servers.until(lambda: send.poll is KVPoll.SUCCESS)
    return True


# --- what decode has ended before it promised anything --------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("known", ["prompt", ""])
@pytest.mark.parametrize("order", ["request first", "withdrawn first"])
def test_a_request_that_decode_has_ended_fails_now_or_as_it_comes(
    servers: Servers, order: str, known: str
) -> None:
    named = digest(known) if known else b""
    if order == "request first":
        send = servers.begin(1, 3)
    servers.sends.withdraw(1, "decode-0", named, "no room")
    if order != "request first":
        send = servers.begin(1, 3)
    assert (send.poll, send.error) == (KVPoll.FAILED, "decode: no room")
    assert len(servers.sends) == 0
    again, receive = servers.both()
    assert served(servers, again, receive)


def test_what_is_withdrawn_of_a_number_fails_no_other_request(servers: Servers) -> None:
    """1. Of another prompt. 2. Of a use of the number that comes after this one. 3. What ended on
    both sides. 4. What came too long ago."""
    servers.sends.withdraw(1, "decode-0", digest("another"), "no room")
    send, receive = servers.both(waits=True)
    servers.sends.withdraw(1, "decode-0", b"", "no room")
    servers.sends.withdraw(1, "decode-1", b"", "no room")
    second = servers.begin(1, 3, "second")
    assert second.error == "room 1 is another request's"
    assert served(servers, send, receive)
    assert servers.begin(1, 3, "another").error == "decode: no room"
    assert not servers.sends._withdrawn
    servers.sends.decline(1, digest("prompt"), "no room here")
    servers.sends.withdraw(1, "decode-0", b"", "no room")
    servers.sends.withdraw(2, "decode-0", b"", "no room")
    servers.sends.decline(2, digest("prompt"), "no room here")
    assert not servers.sends._withdrawn
    assert not servers.sends._declined
    servers.sends.withdraw(3, "decode-0", b"", "no room")
    servers.now_s += rooms_module.WITHDRAWN_S
    for room in (1, 2, 3):
        send, receive = servers.both(room)
        assert served(servers, send, receive)


@pytest.mark.parametrize("ended", ["aborted", "declined"])
def test_a_late_word_about_the_former_use_of_a_number_takes_nothing_from_the_next(
    servers: Servers, ended: str
) -> None:
    """Both servers have ended it and said so; the number is in use again on prefill before decode's
    withdrawal arrives there."""
    if ended == "aborted":
        servers.sends.abort(servers.begin(1, 3), "enough")
    else:
        servers.sends.decline(1, b"", "enough")
    again = servers.begin(1, 3)
    servers.sends.withdraw(1, "decode-0", digest("prompt"), "enough")
    assert again.poll is KVPoll.BOOTSTRAPPING
    receive = servers.open(1, 3, [5, 6, 7])
    servers.announce(1)
    assert served(servers, again, receive)
    assert len(servers.sends) == 0


@pytest.mark.parametrize("how", ["in time", "twice", "another prompt", "long ago"])
def test_a_withdrawal_that_may_be_of_a_former_use_ends_the_room_all_the_same(
    servers: Servers, how: str
) -> None:
    """If decode does not announce the room: soon; at once, where it cannot be of the former one."""
    servers.sends.abort(servers.begin(1, 3, "another" if how == "another prompt" else "prompt"), "")
    servers.now_s += rooms_module.GRACE_S if how == "long ago" else rooms_module.GRACE_S / 2
    again = servers.begin(1, 3)
    for _ in range(2 if how == "twice" else 1):
        servers.sends.withdraw(1, "decode-0", digest("prompt"), "no room")
    if how == "in time":
        servers.sends.pump()
        assert again.poll is KVPoll.BOOTSTRAPPING
        servers.now_s += rooms_module.GRACE_S / 2
        servers.sends.pump()
    assert (again.poll, again.error) == (KVPoll.FAILED, "decode: no room")
    servers.now_s += rooms_module.GRACE_S
    servers.sends.pump()
    assert not servers.sends._doubted
    assert len(servers.sends) == 0


def test_two_requests_of_a_number_that_came_crosswise_all_end(servers: Servers) -> None:
    """Decode has the first and refused the second, prefill has the second and then the first."""
    receive = servers.open(1, 3, [5, 6, 7], "first")
    second = servers.begin(1, 3, "second")
    servers.announce(1, prompt="first")
    servers.sends.withdraw(1, "decode-0", digest("second"), "room 1 is another request's")
    first = servers.begin(1, 3, "first")
    for send in (second, first):
        assert send.poll is KVPoll.FAILED
        assert "PromptMismatchError" in send.error
    servers.until(lambda: receive.outcome and not receive.held)
    assert "PromptMismatchError" in receive.error
    assert len(servers.sends) == 0
    until(lambda: not [*servers.sends.transfers.control.rooms()])  # decode's word is on its way
    send, receive = servers.begin(1, 3, "third"), servers.open(1, 3, [5, 6, 7], "third")
    servers.announce(1, prompt="third")
    assert served(servers, send, receive)


@pytest.mark.parametrize("comes", ["before", "behind"])
def test_of_two_requests_alike_the_second_ends_on_prefill_too(servers: Servers, comes: str) -> None:
    """Decode has refused it while the first was in its queue. Prefill gets it when the first is
    over, or before."""
    send, receive = servers.begin(1, 3), servers.open(1, 3, [5, 6, 7])
    servers.sends.withdraw(1, "decode-0", digest("prompt"), "twice", rooms_module.SILENT)
    assert send.poll is KVPoll.BOOTSTRAPPING
    if comes == "before":
        assert servers.begin(1, 3).error == "room 1 is another request's"
    servers.announce(1)
    assert served(servers, send, receive)
    if comes == "behind":
        assert servers.begin(1, 3).error == "decode: twice"
    assert not servers.sends._withdrawn
    assert bool(servers.sends._declined) == (comes == "behind")
    send, receive = servers.both()
    assert served(servers, send, receive)


@pytest.mark.parametrize("prompt", ["prompt", "second"])
def test_what_decode_says_of_a_second_takes_nothing_from_the_first(
    servers: Servers, prompt: str
) -> None:
    """Both come to prefill when decode has promised pages for the first and refused the second. Of
    two that are alike the first to come is the one that is refused."""
    receive = servers.open(1, 3, [5, 6, 7])
    servers.announce(1)
    servers.sends.withdraw(1, "decode-0", digest(prompt), "twice", rooms_module.ANNOUNCED)
    if prompt == "prompt":
        assert servers.begin(1, 3).error == "decode: twice"
    send = servers.begin(1, 3)
    assert served(servers, send, receive)
    if prompt == "second":
        assert servers.begin(1, 3, "second").error == "decode: twice"
    assert not servers.sends._withdrawn


def test_a_room_that_the_first_has_done_with_is_the_seconds(servers: Servers) -> None:
    """Decode has not: it refused the second, and says that the first was announced long ago."""
    send = servers.begin(1, 3)
    servers.sends.withdraw(1, "decode-0", digest("prompt"), "twice", rooms_module.ANNOUNCED)
    assert send.error == "decode: twice"
    assert len(servers.sends) == 0


def test_a_use_that_decode_ended_while_prefill_was_at_the_one_before(servers: Servers) -> None:
    send, receive = servers.both()
    finish(servers, send, receive, [1, 2, 3])
    servers.sends.withdraw(1, "decode-0", digest("second"), "no room")
    servers.until(lambda: send.poll is KVPoll.SUCCESS)
    assert servers.begin(1, 3, "second").error == "decode: no room"
