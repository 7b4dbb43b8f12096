"""Both sides over real NIXL, in stand-ins of vLLM that look at every token's KV. Of tensor
parallel ranks each has a share of every block; a request is over when all are."""

import logging
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from prefixkv.engines.vllm import scheduler
from prefixkv.engines.vllm.options import ServerSetup
from prefixkv.engines.vllm.orders import WorkerReport
from prefixkv.errors import ConfigError, RequestError
from tests.support.patience import lasting_address, until
from tests.unit.engines.vllm.conftest import MakeServers, Servers
from tests.unit.engines.vllm.standin import BLOCK, Engine, Request, side_of

PROMPT = list(range(100, 130))  # 7 blocks and a half


def blocks_sent(servers: Servers) -> int:
    layout = servers.prefill.worker.prefill.control  # counted at the source
    return layout.counters["bytes_sent"] // (2 * 2 * BLOCK * 8 * 4)


def compute(servers: Servers, send: Request, num_tokens: int) -> None:
    """Prefill steps until it has computed this much of a prompt, which decode has asked for."""
    until(lambda: [servers.prefill.step(), send.computed][1])
    while send.computed < num_tokens:
        servers.prefill.step()
    assert send.computed == num_tokens


def error_of(request: Request) -> str:
    """What the answer says went wrong."""
    assert request.answer is not None
    return str(request.answer["prefixkv"]["error"])


def test_only_what_decode_lacks_is_sent_and_it_is_right(servers: Servers) -> None:
    """Three turns of one conversation, each prompt the one before and ten tokens."""
    first = servers.ask("1", PROMPT)
    servers.until_ended("1")
    assert (first.status, first.loaded_from, first.recomputed) == ("done", 0, False)
    assert servers.decode.wrong_tokens(first, len(PROMPT)) == 0
    assert blocks_sent(servers) == 8
    second = servers.ask("2", PROMPT + list(range(10)))
    servers.until_ended("2")
    assert second.loaded_from == 7 * BLOCK
    assert servers.decode.wrong_tokens(second, 40) == 0
    assert blocks_sent(servers) == 8 + 3
    assert servers.decode.scheduler.take_counts() == {"loads_done": 2}


def test_chunks_are_sent_before_the_last_is_computed(servers: Servers) -> None:
    """Prefill stops in the middle: what it has computed arrives nevertheless."""
    load, send = servers.requests("1", PROMPT)
    servers.decode.add(load)
    servers.decode.step()
    servers.prefill.add(send)
    compute(servers, send, 14)
    until(lambda: blocks_sent(servers) == 3)
    servers.until_ended("1")


def test_a_load_waits_for_another_of_the_same_blocks(servers: Servers) -> None:
    requests = [servers.ask(str(i), [*PROMPT, i, i, i]) for i in range(4)]
    servers.until_ended("0", "1", "2", "3")
    # 33 tokens: 9 blocks for the first, 2 for each of the others.
    assert [one.loaded_from for one in requests] == [0, 28, 28, 28]
    assert blocks_sent(servers) == 9 + 3 * 2
    assert servers.decode.scheduler.take_counts()["flights_joined"] == 3


def test_those_that_waited_for_a_load_that_fails_load_themselves(servers: Servers) -> None:
    lost = Request("lost", PROMPT, _load(9, lasting_address()))
    servers.decode.add(lost)
    servers.decode.step()
    waits = servers.ask("waits", PROMPT)
    servers.step()
    assert waits.loaded_from is None
    servers.until_ended("lost", "waits")
    assert lost.recomputed
    assert lost.answer is not None
    assert "prefixkv" in lost.answer
    assert servers.decode.wrong_tokens(lost, len(PROMPT)) == 0
    assert servers.decode.wrong_tokens(waits, len(PROMPT)) == 0


def _load(room: int, address: str) -> dict[str, object]:
    return {"do_remote_prefill": True, "room": room, "prefill": address}


@pytest.mark.parametrize("loads", [True, False], ids=["while it loads", "before it is admitted"])
def test_the_client_leaves_decode(servers: Servers, loads: bool) -> None:
    """Prefill is told, and computes on for nothing at most."""
    load, send = servers.requests("1", PROMPT)
    servers.decode.add(load)
    if loads:
        servers.prefill.add(send)
        servers.step()
    servers.decode.abort("1")
    if not loads:
        servers.prefill.add(send)
    servers.settle()
    assert load.status == "FINISHED_ABORTED"
    assert servers.prefill.scheduler.take_counts()["sends_failed"] == 1


def test_a_client_that_left_before_its_request_came_is_known_by_its_notice(
    servers: Servers,
) -> None:
    """vLLM adds a request of the same parameters, and ends it at once: prefill hears of it."""
    load, send = servers.requests("1", PROMPT)
    notice = Request("notice", [0], load.kv_transfer_params, abort_immediately=True)
    servers.decode.add(notice)
    servers.decode.abort("notice")
    servers.prefill.add(send)
    servers.settle()
    assert servers.decode.scheduler.take_counts()["loads_refused"] == 1
    assert servers.prefill.scheduler.take_counts()["sends_failed"] == 1


def test_without_a_promise_nothing_is_computed_or_held(servers: Servers) -> None:
    """Decode never has the request. The order law: what waits for decode holds nothing that others
    may need."""
    _, send = servers.requests("1", PROMPT)
    servers.prefill.add(send)
    load = servers.ask("2", PROMPT)
    servers.until_ended("2")
    assert not load.recomputed
    assert (send.computed, send.blocks) == (0, [])
    gauges = servers.prefill.scheduler.gauges()
    assert gauges["sends_unpromised"] == 1
    assert gauges["oldest_unpromised_timestamp_seconds"] > 0
    servers.prefill.abort("1")
    servers.settle()
    assert send.computed == 0


@pytest.mark.parametrize("of", ["decode", "prefill"])
def test_the_notice_of_a_request_that_was_there_changes_nothing(servers: Servers, of: str) -> None:
    load = servers.ask("1", PROMPT)
    servers.step()
    engine: Engine = getattr(servers, of)
    room = {"room": 1, "prefill": servers.address, "decode": "decode-0"}
    asks = {"do_remote_prefill": of == "decode", "do_remote_decode": of == "prefill"}
    for rid in ("while it lives", "when it has ended"):
        engine.add(Request(rid, [0], room | asks, abort_immediately=True))
        engine.abort(rid)
        assert engine.outputs[rid].answer is None
        servers.until_ended("1")
    assert not load.recomputed


def test_rooms_that_were_seen_are_not_kept_for_ever(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "RECENT_ROOMS", 2)
    for room in range(5):
        servers.decode.add(Request(str(room), PROMPT, _load(room, servers.address)))
        servers.decode.abort(str(room))
    assert [*servers.decode.scheduler._recent] == [3, 4]


@pytest.mark.parametrize(
    "end",
    [
        lambda servers: servers.prefill.abort("1"),
        lambda servers: servers.decode.scheduler.flush(),  # what comes of old weights is not used
        lambda servers: servers.prefill.scheduler.flush(),
    ],
    ids=["the client leaves prefill", "decode is flushed", "prefill is flushed"],
)
def test_what_ends_while_prefill_computes_is_computed_by_decode(
    servers: Servers, end: Callable[[Servers], None]
) -> None:
    load = servers.ask("1", PROMPT)
    servers.step()
    end(servers)
    servers.until_ended("1")
    assert load.recomputed
    assert servers.decode.wrong_tokens(load, len(PROMPT)) == 0
    servers.settle()
    del servers.decode.outputs["1"]
    again = servers.ask("1", [*range(500, 530)])  # that it has failed is of the former alone
    servers.until_ended("1")
    assert not again.recomputed


def test_blocks_of_a_failed_load_are_held_until_no_write_can_land(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof is kept back: until it is there vLLM computes in other blocks, and gives these to
    nobody."""
    worker, kept = servers.decode.worker, []

    def without_proof() -> WorkerReport | None:
        news = real()
        if news is not None:
            kept.extend(news.settled)
            news.settled = []
        return news

    real = worker.take_report
    monkeypatch.setattr(worker, "take_report", without_proof)
    load = servers.ask("1", PROMPT)
    servers.step()
    promised = {block.block_id for block in load.blocks}
    servers.prefill.abort("1")
    servers.until_ended("1")
    assert load.recomputed
    assert not promised & {block.block_id for block in load.blocks}
    assert servers.decode.wrong_tokens(load, len(PROMPT)) == 0
    servers.until(lambda: kept == ["1"])
    assert servers.decode.num_used == len(promised) == 8
    assert servers.decode.scheduler.busy
    servers.decode.scheduler.take_reports(WorkerReport(overdue=["1"]), ())
    assert not servers.decode.scheduler.busy  # the engine may rest; the blocks stay
    assert servers.decode.num_used == 8
    servers.decode.scheduler.take_reports(WorkerReport(settled=["1"]), ())


@pytest.mark.parametrize("num_computed", [14, 28], ids=["half of it", "all but the last chunk"])
@pytest.mark.parametrize("caching", [True, False])
def test_a_request_preempted_on_prefill_is_sent_right(
    make_servers: MakeServers, caching: bool, num_computed: int
) -> None:
    """Its blocks are held, so no other request's tokens get into what is on its way; computed anew
    it goes on where it was."""
    servers = make_servers(prefill={"caching": caching})
    load, send = servers.requests("1", PROMPT)
    servers.decode.add(load)
    servers.decode.step()
    servers.prefill.add(send)
    compute(servers, send, num_computed)
    before = [block.block_id for block in send.blocks]
    servers.prefill.preempt("1")
    taken = [block for block in before[:3] if servers.prefill.pool.blocks[block].ref_cnt == 0]
    assert taken == []  # those of the two chunks
    servers.until_ended("1")
    assert (load.status, load.recomputed) == ("done", False)
    assert servers.decode.wrong_tokens(load, len(PROMPT)) == 0
    servers.settle()


def test_a_request_preempted_on_decode_is_not_loaded_again(servers: Servers) -> None:
    """What it had is in vLLM's cache, and the rest it computes."""
    load = servers.ask("1", PROMPT)
    servers.until(lambda: servers.decode.running)
    servers.decode.preempt("1")
    servers.until_ended("1")
    assert load.status == "done"
    assert servers.decode.wrong_tokens(load, len(PROMPT)) == 0
    assert blocks_sent(servers) == 8


@pytest.mark.parametrize(
    ("of", "params", "words"),
    [
        ("decode", [7], "an object is needed"),
        ("decode", {"do_remote_prefill": True, "prefill": "tcp://a:1"}, "field `room`"),
        ("decode", {"do_remote_prefill": True, "room": -1, "prefill": "tcp://a:1"}, "room"),
        (
            "decode",
            {"do_remote_prefill": True, "room": 1, "prefill": "tcp://a:1", "nonce": "0" * 65},
            "nonce",
        ),
        ("prefill", {"do_remote_decode": True, "decode": "decode-0"}, "field `room`"),
        ("decode", {"do_remote_prefill": True, "room": True, "prefill": "tcp://a:1"}, "room"),
        ("decode", {"do_remote_prefill": True, "room": 1}, "field `prefill`"),
        ("decode", {"do_remote_decode": True, "room": 1, "decode": "d"}, "no kv_producer"),
        ("prefill", {"do_remote_decode": True, "room": 1, "decode": ""}, "`$.decode`"),
        ("prefill", {"do_remote_decode": True, "room": 2**64, "decode": "d"}, "room is"),
        ("prefill", {"do_remote_decode": True, "do_remote_prefill": True}, "do_remote_prefill"),
    ],
)
def test_wrong_parameters_are_answered(
    servers: Servers, of: str, params: object, words: str
) -> None:
    engine: Engine = getattr(servers, of)
    engine.add(Request("1", PROMPT, params))
    servers.until(lambda: "1" in engine.outputs)
    request = engine.outputs["1"]
    assert request.status == "done"  # computed here
    assert words in error_of(request)


def test_an_address_that_is_none_fails_the_load_alone(servers: Servers) -> None:
    servers.decode.add(Request("1", PROMPT, _load(1, "carrier pigeon")))
    servers.until_ended("1")
    ended = servers.decode.outputs["1"]
    assert ended.recomputed
    assert "carrier pigeon" in error_of(ended)


def test_a_room_in_use_is_refused(servers: Servers) -> None:
    load, send = servers.requests("1", PROMPT)
    twin = Request("2", PROMPT[1:], dict(load.kv_transfer_params))
    again = Request("2", PROMPT[1:], dict(send.kv_transfer_params))
    servers.decode.add(load)
    servers.decode.add(twin)
    servers.prefill.add(send)
    servers.prefill.add(again)
    servers.until_ended("1", "2")
    assert not load.recomputed
    for engine in (servers.decode, servers.prefill):
        servers.until(lambda engine=engine: "2" in engine.outputs)
        answer = engine.outputs["2"].answer
        assert answer is not None
        assert "in use" in answer["prefixkv"]["error"]


def test_a_room_that_is_not_over_cannot_be_opened(servers: Servers) -> None:
    """It was refused, and nobody at that address has heard so yet."""
    nowhere = _load(1, lasting_address())
    servers.decode.add(Request("1", PROMPT, nowhere))
    servers.decode.abort("1")
    servers.decode.step()
    servers.decode.add(Request("2", PROMPT, nowhere))
    servers.until_ended("2")
    ended = servers.decode.outputs["2"]
    assert ended.recomputed
    assert "not over yet" in error_of(ended)
    assert servers.decode.wrong_tokens(ended, len(PROMPT)) == 0


@pytest.mark.parametrize("join", [True, False])
def test_choices_of_one_prompt_are_loaded_once(make_servers: MakeServers, join: bool) -> None:
    """vLLM makes a request of each of `n` choices, all with the same parameters."""
    servers = make_servers(decode={"join_flights": join})
    load, send = servers.requests("1", PROMPT)
    choices = [load, *(Request(str(i), PROMPT, load.kv_transfer_params) for i in (2, 3))]
    for choice in choices:
        servers.decode.add(choice)
    servers.prefill.add(send)
    servers.prefill.add(Request("2", PROMPT, send.kv_transfer_params))
    servers.until_ended("1", "2", "3")
    assert load.answer == {"prefixkv": {"room": 1, "loaded_tokens": 30, "cached_tokens": 0}}
    assert [choice.answer for choice in choices[1:]] == [None, None]
    for choice in choices:
        assert servers.decode.wrong_tokens(choice, len(PROMPT)) == 0
    assert blocks_sent(servers) == 8
    assert [choice.loaded_from for choice in choices] == [0, None, None]
    assert choices[1].blocks[:7] == load.blocks[:7]  # of the prefix cache
    servers.settle()
    assert servers.prefill.outputs["2"].answer is None
    assert servers.prefill.outputs["2"].status == "done"


@pytest.mark.parametrize(
    "other",
    [
        {"prompt_token_ids": [*PROMPT, 0]},
        {"cache_salt": "x"},
        {"lora_request": SimpleNamespace(lora_name="x")},
        {
            "mm_features": [
                SimpleNamespace(identifier="x", mm_position=SimpleNamespace(offset=1, length=2))
            ]
        },
    ],
)
def test_all_that_a_prompt_is_has_to_be_the_same_on_both(
    servers: Servers, other: dict[str, object]
) -> None:
    """Its namespace too. On one server alone it is another prompt."""
    same = servers.ask("1", PROMPT, **other)
    servers.until_ended("1")
    assert not same.recomputed
    load, send = servers.requests("2", [*PROMPT, 1])
    vars(send).update(other)
    servers.decode.add(load)
    servers.prefill.add(send)
    servers.until_ended("2")
    assert load.recomputed
    assert "PromptMismatch" in error_of(load)


def test_a_pair_that_does_not_fit_is_a_line_of_the_log_and_not_one_for_each_request(
    make_servers: MakeServers, caplog: pytest.LogCaptureFixture
) -> None:
    """The router ends prefill's requests, as the proxy does. Each answer says why."""
    caplog.set_level(logging.INFO)
    servers = make_servers(prefill={"tag": "dtype=bfloat16"}, decode={"tag": "dtype=float32"})
    for number in range(5):
        load, send = servers.requests(str(number), [*PROMPT, number])
        servers.decode.add(load)
        servers.prefill.add(send)
        servers.until_ended(str(number))
        servers.prefill.abort(str(number))
        assert load.recomputed
        assert "HandshakeError: opaque (--dtype) differs" in error_of(load)
    servers.settle()
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert sorted(line.partition(" life")[0] for line in warnings) == [
        "decode-0: refused: prefill-0", "prefill-0: refused: decode-0"
    ]  # fmt: skip
    assert all("opaque (--dtype) differs" in line for line in warnings)


def test_a_peer_that_an_operator_fences_is_over(make_servers: MakeServers) -> None:
    """Prefill stands still with half of the prompt sent. It is dead, says somebody."""
    servers = make_servers()  # prefill never settles
    load, send = servers.requests("1", PROMPT)
    servers.decode.add(load)
    servers.decode.step()
    servers.prefill.add(send)
    compute(servers, send, 14)
    until(lambda: [servers.decode.step(), blocks_sent(servers)][1])
    prefill = servers.prefill.worker.prefill.peer_id
    with pytest.raises(RequestError, match="life is 'soon'"):
        servers.decode.worker.fence(prefill.name, "soon")
    servers.decode.worker.fence(prefill.name, f"{prefill.incarnation:x}")
    until(lambda: [servers.decode.step(), "1" in servers.decode.outputs][1])
    assert load.recomputed
    assert "PeerLost" in error_of(load)
    assert servers.decode.wrong_tokens(load, len(PROMPT)) == 0
    until(lambda: [servers.decode.step(), servers.decode.num_used == 0][1])
    assert servers.decode.worker.lost_peers() == []


def test_a_server_of_both_roles_whose_address_is_in_use_leaves_nothing_open() -> None:
    """The decode side is there already when the prefill side cannot be made."""
    threads = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="in use"):
            Engine("both", producer=True, consumer=True, bind=bind)
    assert set(threading.enumerate()) <= threads


# --- rooms that prefill draws -------------------------------------------------------------------

NULLS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


def offered(servers: Servers, rid: str, tokens: list[int], **more: object) -> Request:
    """Prefill is asked as NixlConnector's routers ask it, and has answered."""
    servers.prefill.step()  # its address has no port before it is bound
    send = Request(rid, tokens, dict(NULLS), **more)
    servers.prefill.add(send)
    servers.until(lambda: rid in servers.prefill.outputs)
    assert send.answer is not None
    return send


def opened(servers: Servers, rid: str, send: Request, **changed: object) -> Request:
    """Decode is asked with what prefill's answer says."""
    assert send.prompt_token_ids is not None
    load = Request(rid, send.prompt_token_ids, {**(send.answer or {}), **changed})
    servers.decode.add(load)
    servers.until_ended(rid)
    return load


def test_a_room_that_prefill_draws_is_opened_by_what_its_answer_says(servers: Servers) -> None:
    send = offered(servers, "1", PROMPT)
    assert servers.prefill.scheduler.gauges()["held_blocks"] == 8
    load = opened(servers, "1", send)
    assert not load.recomputed
    assert servers.decode.wrong_tokens(load, len(PROMPT)) == 0
    assert blocks_sent(servers) == 8
    again = opened(servers, "2", offered(servers, "2", PROMPT + list(range(10))))
    assert again.loaded_from == 7 * BLOCK
    assert blocks_sent(servers) == 8 + 3


def test_it_is_opened_once(servers: Servers) -> None:
    send = offered(servers, "1", PROMPT)
    opened(servers, "1", send)
    servers.settle()
    sent = blocks_sent(servers)
    servers.decode.scheduler.flush()
    again = opened(servers, "2", send)  # another decode server's word, as far as prefill knows
    assert again.recomputed or blocks_sent(servers) == sent


def test_a_stranger_without_the_nonce_loads_nothing(servers: Servers) -> None:
    send = offered(servers, "1", PROMPT)
    guess = opened(servers, "1", send, nonce="0" * 32)
    assert guess.recomputed
    assert "does not" in error_of(guess)
    assert blocks_sent(servers) == 0
    assert servers.prefill.scheduler.gauges()["offers_open"] == 1
    servers.prefill.scheduler.flush()


def test_an_offer_that_no_decode_server_opens_ends(make_servers: MakeServers) -> None:
    servers = make_servers(prefill={"offer_timeout_s": 0.2})
    offered(servers, "1", PROMPT)
    servers.settle()
    assert servers.prefill.scheduler.take_counts() == {
        "offers": 1, "offers_failed": 1, "sends_over": 1,
    }  # fmt: skip


def test_a_decode_server_that_refuses_the_request_ends_the_offer(servers: Servers) -> None:
    """vLLM tells connectors of a request that its server refused."""
    send = offered(servers, "1", PROMPT)
    servers.decode.add(Request("notice", [0], send.answer, abort_immediately=True))
    servers.decode.abort("notice")


def test_an_offer_is_let_go_of_for_a_promised_request(make_servers: MakeServers) -> None:
    servers = make_servers(prefill={"num_blocks": 12})
    send = offered(servers, "1", PROMPT)
    load = servers.ask("2", [*range(30)])
    servers.until_ended("2")
    assert not load.recomputed
    late = opened(servers, "1", send)
    assert late.recomputed
    assert "needs the blocks" in error_of(late)
    servers.settle()
    assert servers.prefill.scheduler.take_counts()["offers_withdrawn"] == 1


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
def test_an_offer_is_kept_for_a_while_from_requests_that_no_decode_waits_for(
    make_servers: MakeServers, grace_s: float
) -> None:
    servers = make_servers(prefill={"num_blocks": 12, "offer_grace_s": grace_s})
    send = offered(servers, "1", PROMPT)
    servers.prefill.add(Request("2", [*range(30)], None))
    if grace_s:
        for _ in range(20):
            servers.step()
        assert "2" not in servers.prefill.outputs
        assert not opened(servers, "1", send).recomputed
    servers.until(lambda: "2" in servers.prefill.outputs)
    servers.settle()


def test_choices_of_one_request_share_the_room_that_is_drawn(servers: Servers) -> None:
    """vLLM numbers them: which of them its answer is of is not known."""
    servers.prefill.step()
    sends = [Request(f"{i}_a", PROMPT, dict(NULLS)) for i in range(3)]
    for send in sends:
        servers.prefill.add(send)
    servers.until(lambda: all(one.request_id in servers.prefill.outputs for one in sends))
    late = Request("3_a", PROMPT, dict(NULLS))  # vLLM may add it when the others are computed
    servers.prefill.add(late)
    servers.until(lambda: late.request_id in servers.prefill.outputs)
    assert sends[0].answer == sends[1].answer == sends[2].answer == late.answer
    assert servers.prefill.scheduler.gauges()["offers_open"] == 1
    assert not opened(servers, "1", sends[2]).recomputed


def test_prompts_beyond_what_such_a_server_computes_for_others_are_declined() -> None:
    both = Engine("both", producer=True, consumer=True, num_blocks=11)
    decode = Engine("decode-0", consumer=True)
    try:
        send = {"do_remote_decode": True, "room": 1, "decode": "decode-0"}
        both.add(Request("p", PROMPT, send))
        decode.add(Request("d", PROMPT, _load(1, both.worker.prefill.endpoint)))
        until(lambda: [both.step(), decode.step(), "d" in decode.outputs][2])
        assert "computes at most 5" in error_of(decode.outputs["d"])
        assert decode.outputs["d"].recomputed
        assert both.outputs["p"].computed == 0
    finally:
        both.close()
        decode.close()


def test_a_prompt_that_vllm_computes_whole_has_no_room(servers: Servers) -> None:
    """For its log-probabilities. vLLM starts it whatever a connector says: prefill declines it and
    holds nothing of it, and decode lets go of its room before it has admitted it."""
    whole = {"skip_reading_prefix_cache": True}
    _, send = servers.requests("1", PROMPT, **whole)
    servers.prefill.add(send)
    servers.prefill.step()
    assert servers.prefill.scheduler.sends.sends == {}
    assert servers.prefill.scheduler.holds.num_blocks == 0
    assert "log-probabilities" in error_of(send)
    load, send = servers.requests("2", PROMPT)
    load.skip_reading_prefix_cache = True
    servers.prefill.add(send)
    servers.decode.scheduler.on_new_request(load)
    until(lambda: [servers.decode.step(), servers.prefill.step(), send.answer][2])
    assert "decode computes it itself" in error_of(send)
    assert send.computed == 0


SHARED = list(range(18))  # 4 blocks and a half
NUM_BLOCKS = 16
SLOW = [
    pytest.param(ranks, sizes, True, marks=pytest.mark.slow)
    for ranks in ((1, 2), (2, 1), (1, 1))
    for sizes in ((4, 8), (8, 4), (4, 4))
]


@pytest.mark.parametrize(("ranks", "sizes", "plain"), [((2, 2), (4, 4), False), *SLOW])
def test_every_rank_gets_its_share(
    make_servers: MakeServers, ranks: tuple[int, int], sizes: tuple[int, int], plain: bool
) -> None:
    """Of (prefill, decode): ranks, and sizes of blocks, which may differ where blocks are plain.
    One port is told to prefill, for rank 0 alone. Host memory has a share of each rank as well."""
    servers = make_servers(
        decode={
            "num_ranks": ranks[1], "block_size": sizes[1], "plain": plain, "host_memory": "4x",
            "num_blocks": NUM_BLOCKS,
        },
        prefill={
            "num_ranks": ranks[0], "block_size": sizes[0], "plain": plain,
            "bind": lasting_address(),
        },
    )  # fmt: skip
    decode = servers.decode
    for rid, prompt, cached in (("1", SHARED[:9], 0), ("2", SHARED, 8)):
        load = servers.ask(rid, prompt)
        servers.until_ended(rid)
        assert (load.loaded_from, load.recomputed) == (cached, False)
        assert decode.wrong_tokens(load, len(prompt)) == 0
    servers.settle()
    decode.pool.evict([*decode.pool.cached])
    decode.memory.fill_(-1.0)
    decode.add(again := Request("3", SHARED))
    servers.until_ended("3")
    assert (again.loaded_from, again.loaded_to) == (0, 16)
    assert decode.wrong_tokens(again, len(SHARED)) == 0
    servers.settle()


def test_blocks_are_held_until_the_last_rank_has_its_proof() -> None:
    side, pool = side_of(ServerSetup(False, True, 2), num_blocks=NUM_BLOCKS)
    request = Request("1", SHARED, {"do_remote_prefill": True, "room": 1, "prefill": "tcp://a:1"})
    side.on_new_request(request)
    blocks = pool.new_blocks(5) or []
    side.allocated(request, ([block.block_id for block in blocks],), 18)
    side.take_reports(WorkerReport(failed={"1": "lost"}, settled=["1"]), ["1"])
    pool.free_blocks(blocks)  # vLLM's own reference
    assert side.gauges()["held_blocks"] == 5
    assert len(pool.free) == NUM_BLOCKS - 5
    side.take_reports(WorkerReport(settled=["1"]), ())
    assert len(pool.free) == NUM_BLOCKS
    side.check_invariants()
