"""Room numbers that are used twice or are none, and requests that one server refuses: each fails
alone and by name, under SGLang's own tables, and the other server hears of it."""

import gc
import logging
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.utils import KVClassType

from prefixkv.engines.sglang import plugin, rooms, transfer
from prefixkv.engines.sglang.transfer import CLASSES
from tests.integration.sglang.inside.pair import PAGE, Pair, request
from tests.integration.sglang.stubs import CONTEXT
from tests.support.patience import until

ALL = [1, 2, 3, 4, 5, 6]


pytestmark = pytest.mark.usefixtures("this_machine")


def receiver(pair: Pair, req: Any) -> Any:
    """Of a request that may fail as its receiver is made."""
    made = CLASSES[KVClassType.RECEIVER](
        mgr=pair.decode, bootstrap_addr=pair.address, bootstrap_room=req.bootstrap_room
    )
    made.prefixkv_begin(req)
    return made


def fails(pair: Pair, poller: Any, why: str) -> None:
    """As SGLang's queues end a request that polls as failed."""
    pair.until_polls(poller, KVPoll.Failed)
    with pytest.raises(KVTransferError, match=why):
        poller.failure_exception()
    poller.clear()


def serve(pair: Pair, sender: Any, receiver: Any, room: int) -> None:
    receiver.send_metadata(ALL, 0, [], decode_prefix_len=0)
    pair.until_polls(sender, KVPoll.WaitingForInput)
    sender.init(6, 0)
    pair.write_row(0, room=room, token=1)
    sender.send(ALL)
    for poller in (receiver, sender):
        pair.until_polls(poller, KVPoll.Success)
        poller.clear()


def is_empty(pair: Pair) -> bool:
    held = len(pair.prefill.sends) + len(pair.decode.receives)
    tables = [table for side in (pair.prefill, pair.decode) for table in (side.request_status,)]
    return not held and not any(tables)


def test_a_second_request_of_a_number_fails_alone(pair: Pair) -> None:
    """SGLang would give both one entry of its tables, and the first to be cleared would end the
    server as the other is polled."""
    sender, first = pair.sender(request(9)), pair.receiver(request(9))
    others = [pair.sender(request(9, 50)), receiver(pair, request(9, 50))]
    others += [pair.sender(request(9)), receiver(pair, request(9))]
    for other in others:
        fails(pair, other, "room 9 is another request's")
    assert (sender.poll(), first.poll()) == (KVPoll.Bootstrapping, KVPoll.WaitingForInput)
    serve(pair, sender, first, 9)
    assert is_empty(pair)
    serve(pair, pair.sender(request(9)), pair.receiver(request(9)), 9)
    assert is_empty(pair)


def test_a_request_that_sglang_drops_from_its_queue_frees_its_number(pair: Pair) -> None:
    """Its sender is neither polled nor cleared, and somebody may still hold the request."""
    req = request(9)
    sender, first = pair.sender(req), pair.receiver(request(9))
    first.send_metadata(ALL, 0, [], decode_prefix_len=0)
    pair.until_polls(sender, KVPoll.WaitingForInput)
    sender.abort()  # `release_aborted_prefill_waiting_req`, and the hook behind it
    plugin._after_waiting_abort(None, None, req)
    fails(pair, first, "Aborted by AbortReq")
    gc.collect()
    assert req.disagg_kv_sender is sender
    assert is_empty(pair)
    serve(pair, pair.sender(request(9)), pair.receiver(request(9)), 9)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_what_is_cleared_twice_leaves_its_number_to_the_next(pair: Pair, side: str) -> None:
    """SGLang clears a failed request as it reads the error, and again as it leaves the queue."""
    first = pair.sender(request(9)) if side == "prefill" else pair.receiver(request(9))
    first.abort()
    pair.until_polls(first, KVPoll.Failed)
    with pytest.raises(KVTransferError):
        first.failure_exception()
    others = [pair.sender(request(9, 50)), pair.receiver(request(9, 50))]
    states = [other.poll() for other in others]
    first.clear()
    assert [other.poll() for other in others] == states
    for other in others:
        other.abort()
        pair.until_polls(other, KVPoll.Failed)
        other.clear()
    assert is_empty(pair)


# --- what one server refuses ----------------------------------------------------------------------


def refused(room: int, told: str, where: str = "finished_reason") -> Any:
    """SGLang puts a stub in the place of the prompt of some."""
    more = {where: SimpleNamespace(message=told), "disagg_prefill_dp_rank": None}
    return request(room, 1, bootstrap_port=0, **more)


@pytest.mark.parametrize("is_first", [True, False])
def test_prefill_hears_of_what_decode_refuses(pair: Pair, is_first: bool) -> None:
    req = refused(9, "the prompt is too long", "to_finish")
    req.bootstrap_host, req.bootstrap_port = pair.address.split(":")
    if is_first:
        pair.decode.decline(req)
        assert not pair.decode.request_status
    sender = pair.sender(request(9))
    if not is_first:
        pair.decode.decline(req)
    fails(pair, sender, "the prompt is too long")
    pair.until_polls(pair.sender(request(10)), KVPoll.Bootstrapping)  # of the next nothing is said
    assert len(pair.decode.receives) == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_decode_hears_of_what_prefill_refuses(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    monkeypatch.setattr(rooms, "GRACE_S", 0.0)
    if is_first:
        pair.prefill.decline(refused(9, "the prompt is too long"))
    first = pair.receiver(request(9))
    first.send_metadata(ALL, 0, [], decode_prefix_len=0)
    if not is_first:
        pair.until(lambda: pair.prefill.sends._announced)
        pair.prefill.decline(refused(9, "the prompt is too long"))
    fails(pair, first, "the prompt is too long")
    pair.until(lambda: is_empty(pair))


def test_a_bootstrap_server_that_is_not_there_is_asked_now_and_then(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's scheduler stands still while it asks."""
    asked = []

    def ask(address: str) -> bool:
        asked.append(address)
        if address == "other:0":
            raise RuntimeError("Page size mismatch")
        return False

    monkeypatch.setattr(pair.decode, "try_ensure_parallel_info", ask)
    monkeypatch.setattr(transfer, "MAX_ASKED", 2)
    with caplog.at_level(logging.WARNING, "prefixkv.sglang"):
        for host in ("gone", "gone", "other", "other", "third"):
            req = refused(9, "the prompt is too long")
            req.bootstrap_host = host
            pair.decode.decline(req)
    assert asked == ["gone:0", "other:0", "third:0"]
    assert "gone:0 could not be informed that 9 ended" in caplog.text
    assert "other:0: Page size mismatch" in caplog.text
    assert [*pair.decode._asked_s] == ["third:0"]


# --- hooks ----------------------------------------------------------------------------------------


def test_a_prefill_that_polls_nothing_hears_decode(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue is empty: what it has of the room has ended."""
    monkeypatch.setattr(rooms, "GRACE_S", 0.0)
    pair.prefill.decline(refused(9, "the prompt is too long"))
    first = pair.receiver(request(9))
    first.send_metadata(ALL, 0, [], decode_prefix_len=0)

    def polled() -> bool:
        plugin._before_bootstrapped(SimpleNamespace(kv_manager=pair.prefill))
        plugin._before_bootstrapped(SimpleNamespace(kv_manager=object()))  # another backend's
        return bool(first.poll() == KVPoll.Failed)

    until(polled)


@pytest.mark.parametrize("side", ["prefill_bootstrap", "decode_prealloc"])
def test_what_comes_to_no_queue_is_declined(side: str) -> None:
    """1. It was given a room. 2. It was declined. 3. It waits for its grammar. 4. SGLang refused it
    on its way, under a name that was used before."""
    declined: list[Any] = []
    manager = SimpleNamespace(decline=declined.append, last_handled_rid="")
    scheduler = SimpleNamespace(grammar_manager=SimpleNamespace(grammar_queue=[]))
    setattr(scheduler, f"disagg_{side}_queue", SimpleNamespace(kv_manager=manager))
    given, waits, gone = request(1), request(2), request(1)
    scheduler.grammar_manager.grammar_queue.append(request(2))
    manager.last_handled_rid = "1"
    for req in (given, waits, gone):
        plugin._after_request(None, scheduler, req, None)
    assert [req is gone for req in declined] == [True]
    scheduler = SimpleNamespace(grammar_manager=scheduler.grammar_manager)
    plugin._after_request(None, scheduler, gone, None)  # neither side's server
    assert len(declined) == 1


def test_a_room_that_is_begun_or_declined_is_heard_of(pair: Pair) -> None:
    pair.sender(request(9))
    pair.receiver(request(10))
    assert (pair.prefill.last_handled_rid, pair.decode.last_handled_rid) == ("9", "10")
    for side in (pair.prefill, pair.decode):
        side.decline(refused(2**70, "no"))
        assert side.last_handled_rid == str(2**70)


def test_tickets_are_alike_on_all_ranks_and_differ_for_each_use() -> None:
    """Also of one request that is sent again, with its name and its room."""
    ranks = Pair(), Pair()
    ranks[1].decode._secret = ranks[0].decode._secret
    drawn = [[receiver(pair, request(9))._ticket for _ in range(3)] for pair in ranks]
    for pair in ranks:
        pair.close()
    assert drawn[0] == drawn[1]
    assert len({*drawn[0]}) == 3


def test_what_a_queue_did_not_take_is_declined() -> None:
    declined: list[Any] = []
    manager = SimpleNamespace(decline=declined.append)
    decode = SimpleNamespace(queue=[], kv_manager=manager)
    prefill = SimpleNamespace(queue=[], kv_manager=manager)
    taken, fails, fake, none = request(1), request(2), request(3), request(4)
    fake.bootstrap_host, none.bootstrap_room = "2.2.2.2", None
    decode.queue.append(SimpleNamespace(req=taken))
    prefill.queue.append(taken)
    for req in (taken, fails, fake, none):
        plugin._after_add(None, decode, req)
        plugin._after_prefill_add(None, prefill, req, 2)
    assert declined == [fails, fails]
    plugin._after_add(None, decode, fails, is_retracted=True)
    plugin._after_add(None, decode, fails, is_rebootstrap=True)
    plugin._after_add(None, SimpleNamespace(queue=[], kv_manager=object()), fails)
    assert declined == [fails, fails]


@pytest.mark.parametrize(
    ("num_tokens", "outputs", "again", "fits"),
    [
        (64 * PAGE - 32, 0, False, True),
        (64 * PAGE - 31, 0, False, False),  # a page more
        (64 * PAGE, 0, False, False),
        (64 * PAGE - 31, 1, False, True),  # it has run, and is to go on
        (64 * PAGE - 40, 20, True, False),  # its output is asked for too
    ],
)
def test_a_prompt_that_can_never_be_admitted_is_refused(
    num_tokens: int, outputs: int, again: bool, fits: bool
) -> None:
    said: list[Any] = []
    queue = SimpleNamespace(
        kv_manager=SimpleNamespace(decline=None),
        num_reserved_decode_tokens=32,
        token_to_kv_pool_allocator=SimpleNamespace(size=64 * PAGE, page_size=PAGE),
        scheduler=SimpleNamespace(
            output_streamer=SimpleNamespace(stream_output=lambda reqs, *_: said.extend(reqs))
        ),
        _pre_alloc_fill_len=DecodePreallocQueue._pre_alloc_fill_len,
    )
    queue._required_alloc_tokens = lambda **lens: DecodePreallocQueue._required_alloc_tokens(
        queue, **lens
    )
    req = request(9, num_tokens, return_logprob=False, pd_rebootstrap_in_progress=again)
    req.output_ids, req.finished_reason = array("q", range(outputs)), None
    refuses = plugin._around_capacity(lambda *_: False, queue, req)
    assert refuses == (not fits)
    assert said == ([] if fits else [req])
    if not fits:
        assert req.finished_reason is not None
    assert plugin._around_capacity(lambda *_: True, queue, req)
    queue.kv_manager = object()  # another backend's
    assert not plugin._around_capacity(lambda *_: False, queue, req)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ""),
        ({"bootstrap_room": None}, ""),
        ({"bootstrap_room": 2**63 - 1}, ""),
        ({"is_single": False, "batch_size": 2, "bootstrap_room": [5, 6]}, ""),
        ({"is_single": False, "batch_size": 2, "bootstrap_room": [None, None]}, ""),
        ({"parallel_sample_num": 2}, "n is 2"),
        ({"bootstrap_room": 0}, "bootstrap_room is 0"),
        ({"bootstrap_room": 0, "bootstrap_host": "2.2.2.2"}, ""),
        ({"bootstrap_room": -1}, "bootstrap_room is -1"),
        ({"bootstrap_room": 2**63}, "bootstrap_room is 9223372036854775808"),
        ({"bootstrap_room": True}, "bootstrap_room is True"),
        ({"bootstrap_room": [5]}, "a number is needed"),
        ({"is_single": False, "batch_size": 2, "bootstrap_room": [5]}, "1 entries for 2"),
        ({"is_single": False, "batch_size": 2, "bootstrap_room": [5, 5]}, "twice"),
        ({"is_single": False, "batch_size": 2, "bootstrap_room": [5, None]}, "is None"),
        (
            {"is_single": False, "batch_size": 2, "bootstrap_room": [5, 6],
             "bootstrap_host": ["a"]}, "bootstrap_host has 1 entries for 2",
        ),
        (
            {"is_single": False, "batch_size": 2, "bootstrap_room": [5, 6],
             "bootstrap_port": [1, 2, 3]}, "bootstrap_port has 3 entries for 2",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_what_no_room_can_be_opened_for_is_refused_before_any_is(
    change: dict[str, Any], told: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind SGLang's own normalizing, which has made lists of what several prompts share."""
    monkeypatch.setattr(CONTEXT.disagg, "disaggregation_mode", mode)
    asked = {
        "parallel_sample_num": 1, "is_single": True, "batch_size": 1, "bootstrap_room": 5,
        "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, **change,
    }  # fmt: skip

    def normalize() -> None:
        plugin._around_normalize(lambda _: None, SimpleNamespace(**asked))

    if told:
        with pytest.raises(ValueError, match=told):
            normalize()
        monkeypatch.setattr(CONTEXT.disagg, "disaggregation_transfer_backend", "nixl")
    normalize()
    monkeypatch.setattr(CONTEXT.disagg, "disaggregation_mode", "null")
    normalize()
