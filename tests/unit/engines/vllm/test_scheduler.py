"""What the scheduler's side decides by itself, without workers: decode's loads, turns and rests
among it."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from prefixkv.engines.vllm.asks import LoadAsk, digest_of
from prefixkv.engines.vllm.blocks import Ledger
from prefixkv.engines.vllm.groups import STATE_WINDOW, BlockGroups, WindowBlocks, WindowLayers
from prefixkv.engines.vllm.loads import ScheduledLoads
from prefixkv.engines.vllm.options import ServerSetup
from prefixkv.engines.vllm.orders import WorkerReport
from prefixkv.engines.vllm.scheduler import SchedulerSide
from prefixkv.engines.vllm.wakeup import QUIET_STEPS, Rest
from prefixkv.errors import CallerError, RequestError
from tests.unit.engines.vllm.standin import (
    BLOCK,
    BOTH,
    DECODE,
    PREFILL,
    BlockPool,
    Request,
    side_of,
    step_of,
)

PROMPT = list(range(30))


def side(hash_size: int = BLOCK) -> SchedulerSide:
    return side_of(DECODE, BlockGroups(BLOCK, hash_size=hash_size))[0]


def load(rid: str, room: int, tokens: list[int] = PROMPT) -> Request:
    params = {"do_remote_prefill": True, "room": room, "prefill": "tcp://127.0.0.1:1"}
    return Request(rid, tokens, params)


def test_hashes_may_be_of_parts_of_blocks() -> None:
    """vLLM may hash finer than its blocks: a block is known by the hash at its end."""
    made = side(hash_size=BLOCK // 2)
    first, second = load("1", 1), load("2", 2)
    for request in (first, second):
        request.block_hashes = [hash(tuple(PROMPT[:end])) for end in range(2, 31, 2)]
        made.on_new_request(request)
    made.allocated(first, (range(8),), 30)
    assert len(made.flights) == 7
    assert made.count_loadable(second, 0) == (None, False)
    second.block_hashes[3] = 0  # the second block differs
    assert made.count_loadable(second, BLOCK) == (26, True)


@pytest.mark.parametrize("missing", [1, 2, 6])
@pytest.mark.parametrize("hash_size", [BLOCK, BLOCK // 2])
def test_the_last_blocks_may_have_no_hash(missing: int, hash_size: int) -> None:
    """As where vLLM hashes a block together with tokens behind it. Blocks without one are loaded,
    and nobody waits for them."""
    made, tokens = side(hash_size), PROMPT[: 6 * BLOCK]
    first, second = load("1", 1, tokens), load("2", 2, tokens)
    for request in (first, second):
        ends = range(hash_size, len(tokens) + 1, hash_size)
        request.block_hashes = [hash(tuple(tokens[:end])) for end in ends][:-missing]
        made.on_new_request(request)
    made.allocated(first, (range(6),), len(tokens))
    whole = len(first.block_hashes) * hash_size // BLOCK
    assert len(made.flights) == whole
    for block in range(6):
        missed = len(tokens) - block * BLOCK
        joins = block < whole
        assert made.count_loadable(second, block * BLOCK) == (
            (None, False) if joins else (missed, True)
        )


def test_the_block_that_is_partly_filled_flies_for_its_request_alone() -> None:
    made = side()
    first, second = load("1", 1), load("2", 2)
    for request in (first, second):
        made.on_new_request(request)
    made.allocated(first, (range(8),), 30)
    assert made.count_loadable(second, 28) == (2, True)
    made.allocated(second, (range(8, 16),), 2)
    made.take_reports(WorkerReport(settled=["1"]), ["1"])
    assert len(made.flights) == 0
    made.check_invariants()


def test_what_waits_for_a_load_goes_on_as_soon_as_its_client_leaves() -> None:
    """Before prefill has heard of it, and proved that nothing is written any more."""
    made = side()
    first, second = load("1", 1), load("2", 2)
    for request in (first, second):
        made.on_new_request(request)
    made.allocated(first, (range(8),), 30)
    assert made.count_loadable(second, 0) == (None, False)
    made.finished(first, range(8))
    assert made.count_loadable(second, 0) == (30, True)
    made.check_invariants()


def test_a_choice_of_a_prompt_that_was_admitted_waits_for_no_load_any_more() -> None:
    """It is preempted while another request loads the same blocks."""
    made, _ = side_of(DECODE, join_flights=False)
    first, choice, other = load("1", 1), load("2", 1), load("3", 3)
    for request in (first, choice, other):
        made.on_new_request(request)
    made.allocated(first, (range(8),), 30)
    assert made.count_loadable(choice, 0) == (None, False)
    made.take_reports(WorkerReport(settled=["1"]), ["1"])
    assert made.count_loadable(choice, 28) == (0, False)
    made.allocated(choice, (range(8),), 0)
    made.allocated(other, (range(8, 16),), 30)
    assert made.count_loadable(choice, 0) == (0, False)
    made.check_invariants()


# --- layers that keep a window --------------------------------------------------------------------


WINDOWED = BlockGroups(BLOCK, 1, (WindowLayers(0, "last", 9),), 16)
"""Two groups; the second keeps every token, the first 9."""


def windowed() -> SchedulerSide:
    return side_of(DECODE, WINDOWED)[0]


def test_the_window_is_loaded_whatever_the_prefix_is() -> None:
    made, request = windowed(), load("1", 1)
    made.sends.can_end = True
    made.on_new_request(request)
    assert made.ignores_windows(request)
    assert made.count_loadable(request, 16) == (13, True)
    table = [*[0] * 5, 40, 41, 42]
    made.allocated(request, (table, range(8)), 13)
    (opened,) = made.orders(step_of()).opens
    assert (opened.num_tokens, opened.prefix_len, opened.pages) == (29, 16, (4, 5, 6, 7))
    assert opened.windows == (WindowBlocks(5, (40, 41, 42)),)
    assert not made.ignores_windows(request)  # it asks for nothing any more
    # Another request waits for the blocks that count for all, and loads a window of its own.
    second = load("2", 2)
    made.on_new_request(second)
    assert made.count_loadable(second, 16) == (None, False)
    made.check_invariants()


def test_windows_that_are_cached_are_not_written_over() -> None:
    """Where another connector stands between, vLLM looks for prefixes in all groups."""
    made, request = windowed(), load("1", 1)
    made.on_new_request(request)
    assert not made.ignores_windows(request)
    assert made.count_loadable(request, 16) == (0, False)
    assert made.count_loadable(request, 0) == (29, True)


def test_a_prompt_of_one_token_needs_no_room() -> None:
    made, request = windowed(), load("1", 1, [5])
    made.on_new_request(request)
    assert made.count_loadable(request, 0) == (0, False)
    assert [one.room for one in made.orders(step_of()).refusals] == [1]
    sends, _ = side_of(PREFILL, WINDOWED)
    for params in ({"do_remote_decode": True, "room": 1, "decode": "other"},
                   {"do_remote_decode": True}):  # fmt: skip
        sends.sends.address = "tcp://127.0.0.1:1"
        rid = str(len(params))
        sends.on_new_request(Request(rid, [5], params))
        assert "a prompt of one token" in sends._answers[rid]["error"]
    assert [one.room for one in sends.orders(step_of()).declines] == [1]


@pytest.mark.parametrize("is_here", [True, False])
def test_a_request_whose_load_has_failed_lets_others_go_first(is_here: bool) -> None:
    """To be computed it needs more blocks than it had, and vLLM comes to no request behind it."""
    made, pool = side_of(DECODE, WINDOWED, 20)
    made.sends.can_end = True
    first, second, third = load("1", 1), load("2", 2, [*range(50, 80)]), Request("3", PROMPT)
    for number, request in enumerate((first, second)):
        made.on_new_request(request)
        pool.new_blocks(8)
        made.allocated(request, (range(8), range(8 * number, 8 * number + 8)), 29)
    made.on_new_request(third)
    news = WorkerReport(failed={"1": "gone"}, settled=["1"])
    made.take_reports(news, ["1"])
    if is_here:
        made.take_reports(WorkerReport(settled=["2"]), ["2"])
    assert made.count_loadable(first, 0) == (None, False)
    assert made.count_loadable(third, 0) == (None, False)
    # The other is computed, or it ends.
    made.finished(second, [])
    if not is_here:
        made.take_reports(WorkerReport(failed={"2": "left"}, settled=["2"]), ["2"])
    made.orders(step_of())
    assert made.count_loadable(first, 0) == (0, False)
    assert made.count_loadable(third, 0) == (0, False)


# --- promised sends beside other requests ---------------------------------------------------------


def both_roles() -> SchedulerSide:
    return side_of(BOTH, num_blocks=24)[0]


def promised(made: SchedulerSide, rid: str, room: int) -> Request:
    params = {"do_remote_decode": True, "room": room, "decode": "other"}
    request = Request(rid, [room * 100 + token for token in PROMPT], params)
    made.on_new_request(request)
    made.take_reports(WorkerReport(promised=[rid]), ())
    return request


def compute(made: SchedulerSide, request: Request, num_tokens: int) -> None:
    """A step that computes so many more tokens of a request."""
    made.orders(step_of({request.request_id: (request.computed, num_tokens)}, range(8)))
    request.computed += num_tokens


@pytest.mark.parametrize("ends", [False, True])
def test_a_preempted_send_goes_before_all_others(ends: bool) -> None:
    """It keeps what was handed over, and a request before it in vLLM's queue may need that."""
    made = both_roles()
    send, later = promised(made, "send", 1), promised(made, "later", 2)
    plain, wanted = Request("plain", PROMPT), load("wanted", 3)
    made.on_new_request(wanted)
    assert made.count_loadable(send, 0) == (0, False)
    made.allocated(send, (range(8),), 0)
    compute(made, send, 14)
    goes = {"later": (0, False), "plain": (0, False), "wanted": (30, True)}
    others = later, plain, wanted
    assert {one.request_id: made.count_loadable(one, 0) for one in others} == goes
    send.computed = 0  # vLLM has preempted it
    assert [made.count_loadable(one, 0) for one in others] == [(None, False)] * 3
    assert made.count_loadable(send, 12) == (0, False)
    if ends:
        made.finished(send, [])
    else:
        made.allocated(send, (range(8),), 0)
        send.computed = 12
    assert {one.request_id: made.count_loadable(one, 0) for one in others} == goes


def test_an_abort_of_a_send_that_is_over_ends_no_other_of_its_room() -> None:
    made = both_roles()
    former = promised(made, "former", 1)
    made.orders(step_of())
    made.finished(former, [])
    made.take_reports(WorkerReport(freed=["former"]), ())
    promised(made, "later", 1)
    orders = made.orders(step_of())
    assert ([add.rid for add in orders.adds], orders.abort_sends) == (["later"], {})


def test_loads_of_a_server_that_computes_for_others_leave_blocks_to_do_so() -> None:
    """Both servers may hold as many loads as they may, which wait for the other to compute. What is
    little is computed all the same."""
    made, _ = side_of(BOTH, num_blocks=24, compute_below=12)
    first, second, large = (
        load("1", 1),
        load("2", 2, [*range(50, 80)]),
        load("3", 3, [*range(90, 142)]),
    )
    little = load("4", 4, [*range(900, 912)])
    for request in (first, second, large, little):
        made.on_new_request(request)
    assert made.count_loadable(first, 0) == (30, True)
    made.allocated(first, (range(8),), 30)
    assert made.count_loadable(second, 0) == (None, False)
    assert made.count_loadable(large, 0) == (0, False), "it is computed here"
    assert made.count_loadable(little, 0) == (0, False)
    made.check_invariants()


def test_promised_sends_pass_a_request_that_lacks_the_blocks_of_loads() -> None:
    """Other requests do not, or new loads could take its blocks again and again."""
    made = both_roles()
    loading = load("loading", 1)
    made.on_new_request(loading)
    made.allocated(loading, (range(8),), 30)
    large, small = Request("large", range(25 * BLOCK)), Request("small", PROMPT)
    # No promised send waits: vLLM's own order.
    assert made.count_loadable(large, 0) == (0, False)
    send = promised(made, "send", 2)
    assert made.count_loadable(small, 0) == (0, False)
    assert made.count_loadable(large, 0) == (None, False)
    assert made.count_loadable(small, 0) == (None, False)
    assert made.count_loadable(send, 0) == (0, False)
    # In the next step, and when the load is over.
    made.orders(step_of())
    assert made.count_loadable(small, 0) == (0, False)
    assert made.count_loadable(large, 0) == (None, False)
    made.orders(step_of())
    made.take_reports(WorkerReport(settled=["loading"]), ["loading"])
    assert made.count_loadable(large, 0) == (0, False)
    made.check_invariants()


# --- layers that keep a state ---------------------------------------------------------------------


def stated(table_tokens: int, setup: ServerSetup) -> SchedulerSide:
    """Of two groups; the second keeps every token, the first a state, in a table with an entry for
    `table_tokens` tokens."""
    state = WindowLayers(0, "state", STATE_WINDOW, table_tokens, most_blocks=3)
    made, _ = side_of(setup, BlockGroups(BLOCK, 1, (state,), 16))
    made.sends.can_end, made.sends.address = True, "tcp://127.0.0.1:1"
    return made


@pytest.mark.parametrize(
    ("num_tokens", "table_tokens", "table"),
    [(30, BLOCK, [0] * 7 + [40]), (29, BLOCK, [0] * 6 + [40]), (30, 64, [40])],
)
def test_the_state_is_loaded_behind_all_but_the_last_token(
    num_tokens: int, table_tokens: int, table: list[int]
) -> None:
    """Into the block that vLLM reads it from when it computes that token."""
    made = stated(table_tokens, DECODE)
    request = load("1", 1, PROMPT[:num_tokens])
    made.on_new_request(request)
    assert (request.num_prompt_tokens, len(request.prompt_token_ids or ())) == (num_tokens,) * 2
    assert made.count_loadable(request, 16) == (num_tokens - 17, True)
    made.allocated(request, (table, range(8)), num_tokens - 17)
    (opened,) = made.orders(step_of()).opens
    last = (num_tokens - 2) // BLOCK
    assert (opened.num_tokens, opened.windows) == (num_tokens - 1, (WindowBlocks(last, (40,)),))


@pytest.mark.parametrize("params", [{"room": 1, "decode": "d"}, {}])
def test_prefill_leaves_out_the_last_token(params: dict[str, object]) -> None:
    """A state has no way back to the tokens before. The prompt is compared whole."""
    made = stated(BLOCK, PREFILL)
    tokens = PROMPT[: 6 * BLOCK]
    request = Request("1", tokens, {"do_remote_decode": True, **params}, max_tokens=20)
    request._all_token_ids, shared = list(tokens), request.prompt_token_ids
    made.on_new_request(request)
    assert request.prompt_token_ids == request._all_token_ids == tokens[:-1]
    assert shared == tokens  # another request's too
    assert (request.num_prompt_tokens, request.max_tokens) == (len(tokens) - 1, 1)
    assert len(request.block_hashes) == 5
    for add in made.orders(step_of()).adds:
        assert (add.num_tokens, add.digest) == (len(tokens) - 1, digest_of(load("2", 1, tokens)))


def test_a_prompt_that_is_not_sent_stays_whole() -> None:
    made = stated(BLOCK, PREFILL)
    image = SimpleNamespace(
        identifier="i", mm_position=SimpleNamespace(offset=len(PROMPT) - 4, length=4)
    )
    for rid, more, words in (
        ("1", {"mm_features": [image]}, "a prompt that ends in an image"),
        ("2", {"skip_reading_prefix_cache": True}, "log-probabilities of its own"),
    ):
        params = {"do_remote_decode": True, "room": int(rid), "decode": "d"}
        request = Request(rid, PROMPT, params, **more)
        made.on_new_request(request)
        assert words in made._answers[rid]["error"]
        assert request.num_prompt_tokens == len(PROMPT)
    plain = Request("3", PROMPT)
    made.on_new_request(plain)
    assert plain.prompt_token_ids == PROMPT


class Waiting(dict[str, Any]):
    def _none(self) -> Any:
        raise AssertionError("all of them are looked at")

    items = values = __iter__ = _none


def test_to_ask_of_one_request_looks_at_no_other_that_waits() -> None:
    """vLLM asks at each step of each that waits: where decode's pool is full that is most of them,
    and a step was as long as their number squared."""

    made, _ = side_of(PREFILL, num_blocks=64)
    for rid in range(1, 30):
        params = {"do_remote_decode": True, "room": rid, "decode": "d"}
        made.on_new_request(Request(str(rid), PROMPT, params))
    made.take_reports(WorkerReport(promised=["1", "2"]), [])
    sends, made.sends.sends = made.sends.sends, Waiting(made.sends.sends)
    assert made.count_loadable(Request("1", PROMPT), 0) == (0, False)
    made.allocated(Request("1", PROMPT), ([*range(1, 9)],), 0)
    assert made.count_loadable(Request("2", PROMPT), 0) == (0, False)
    assert made.count_loadable(Request("3", PROMPT), 0) == (None, False)
    made.sends.sends = sends
    made.check_invariants()


def test_to_ask_of_a_load_looks_at_no_other_under_way() -> None:
    """Of a server of both roles, which keeps blocks back for prompts that it computes."""
    made, pool = side_of(BOTH, num_blocks=65)
    under_way = load("1", 1)
    made.on_new_request(under_way)
    assert made.count_loadable(under_way, 0) == (30, True)
    made.allocated(under_way, ([block.block_id for block in pool.new_blocks(8) or []],), 30)
    for rid in range(2, 6):
        made.on_new_request(load(str(rid), rid, [rid, *PROMPT]))
    pending, made.loads.pending = made.loads.pending, Waiting(made.loads.pending)
    assert made.count_loadable(load("2", 2, [2, *PROMPT]), 0) == (31, True)
    made.loads.pending = pending
    made.take_reports(WorkerReport(failed={"1": "lost"}, settled=["1"]), ["1"])
    made.check_invariants()


NUM_BLOCKS = 8


class Case:
    """Two ranks; `orders` are those of the step."""

    def __init__(self, most_blocks: int | None = None, num_blocks: int = 32) -> None:
        self.pool, ledger = BlockPool(num_blocks), Ledger(BlockGroups(BLOCK), num_ranks=2)
        ledger.holds.pool = self.pool
        self.holds, self.orders = ledger.holds, ledger.orders
        self.loads = ScheduledLoads(ledger, most_blocks)

    def begin(self, rid: str, room: int, tokens: list[int] = PROMPT, **more: Any) -> Request:
        request = Request(rid, tokens, **more)
        self.loads.begin(request, LoadAsk(room, "p:1", ""))
        self.loads.check_invariants()
        return request

    def load(self, rid: str, room: int, num_sent: int = 30) -> Request:
        request = self.begin(rid, room)
        wanted = self.loads.wanted.pop(rid)
        blocks = self.pool.new_blocks(NUM_BLOCKS)
        assert blocks is not None
        pages = [block.block_id for block in blocks]
        self.loads.open(request, wanted, num_sent, (pages,))
        self.loads.check_invariants()
        return request

    def received(self, rid: str) -> Any:
        """As vLLM does: it takes a failed load's blocks at once."""
        load = self.loads.received(rid)
        if load is not None and load.error and load.unsettled > 0:
            self.holds.take(rid, load.pages)
        return load


def test_a_room_is_one_prompt_s() -> None:
    case = Case()
    case.begin("a", 1)
    case.begin("b", 1)
    assert case.loads.followers == {"b"}, "another choice of it"
    with pytest.raises(RequestError, match="room 1 is in use by another request"):
        case.begin("c", 1, PROMPT[1:])
    embeds = Request("d", PROMPT)
    embeds.prompt_token_ids = None
    with pytest.raises(CallerError, match="embeddings"):
        case.loads.begin(embeds, LoadAsk(1, "p:1", ""))
    assert not case.orders.refusals, "the room is the first one's"
    assert list(case.loads.wanted) == ["a"]


def test_a_prompt_that_is_not_loaded_is_refused_unless_its_room_is_another_s() -> None:
    case = Case()
    embeds = Request("a", PROMPT)
    embeds.prompt_token_ids = None
    with pytest.raises(CallerError, match="embeddings"):
        case.loads.begin(embeds, LoadAsk(7, "p:1", ""))
    case.load("b", 1)
    with pytest.raises(RequestError, match="still being transferred"):
        case.begin("b", 2)
    assert [refusal.room for refusal in case.orders.refusals] == [7, 2]
    assert not case.loads.wanted
    assert list(case.loads.pending) == ["b"]


def test_a_proof_that_is_overdue_is_not_waited_for() -> None:
    case = Case()
    case.load("a", 1)
    assert case.loads.any_under_way
    assert not case.loads.any_expected, "vLLM waits for its end itself"
    case.loads.take(WorkerReport(failed={"a": "lost"}))
    case.received("a")
    assert case.loads.any_expected
    case.loads.take(WorkerReport(overdue=["a", "unknown"]))
    assert not case.loads.any_under_way
    assert not case.loads.any_expected


def test_loads_leave_blocks_to_compute_with() -> None:
    case = Case(most_blocks=20)
    assert not case.loads.could_fit(21)
    assert case.loads.fits(20)
    case.load("a", 1)
    assert case.loads.fits(12)
    assert not case.loads.fits(13)
    assert case.loads.could_fit(13)
    case.received("a")
    assert not case.loads.fits(13), "a rank may still write its blocks"
    case.loads.flush()
    assert not case.orders.abort_loads, "it is over"


# --- rests ----------------------------------------------------------------------------------------


def test_the_engine_rests_once_every_worker_wakes_it_and_all_is_quiet() -> None:
    rest = Rest(num_ranks=2)
    assert rest.bell == ""
    rest.listener = listener = Mock(address="here", num_senders=0)
    for _ in range(QUIET_STEPS):
        rest.stepped(is_quiet=True)
    listener.num_senders += 1
    assert rest.bell == "here", "a worker has not answered"
    assert rest.seconds(None) == 0.0
    listener.num_senders += 1
    assert (rest.bell, rest.has_wakeups) == ("", True)
    # Until an offer's grace ends; where it has ended, a request makes use of it.
    for left_s, rest_s in ((None, 60.0), (5.0, 5.0), (61.0, 60.0), (0.0, 60.0), (-1.0, 60.0)):
        assert rest.seconds(left_s) == rest_s
    rest.stepped(is_quiet=False)
    for _ in range(QUIET_STEPS):
        assert rest.seconds(None) == 0.0
        rest.stepped(is_quiet=True)
    assert rest.seconds(None) > 0.0


def test_the_end_of_all_loads_at_once_costs_what_each_costs() -> None:
    """As where a prefill server is lost: all ranks name all of them in one report."""
    compared = 0

    class Rid(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    rids = [Rid(number) for number in range(100)]
    case = Case(num_blocks=len(rids) * NUM_BLOCKS + 1)
    for room, rid in enumerate(rids):
        case.load(rid, room)
    compared = 0
    case.loads.take(WorkerReport(dict.fromkeys(rids, "lost"), settled=2 * rids, overdue=rids))
    assert compared <= 3 * len(rids)
    for rid in rids:
        assert case.received(rid).error == "lost"
        case.loads.settle(rid)
    case.loads.check_invariants()
    assert not case.loads.pending
    assert not case.holds.num_blocks
