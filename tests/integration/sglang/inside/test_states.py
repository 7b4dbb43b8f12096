"""What models keep beside their KV, on SGLang's own pools: windows, states of requests, keys of an
index. Every byte of both servers' pools is compared."""

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll, StateType
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, HybridLinearKVPool, MambaPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from prefixkv.engines.sglang import plugin
from prefixkv.engines.sglang.memory import MHA, Share, current_share
from prefixkv.errors import ConfigError
from tests.integration.sglang.inside.pair import PAGE, Pair, Rank, Servers, manager, request

WINDOW, SIZE = 40, 64 * PAGE
PROMPT = 87  # 6 pages of 16; the window behind it begins with the last token of page 2


pytestmark = pytest.mark.usefixtures("this_machine")


# --- SGLang's pools -------------------------------------------------------------------------------


def windows() -> Any:
    """A full layer and three with a window, in a pool of half the size and with more heads."""
    of_windows = {"page_size": PAGE, "head_num": 4, "head_dim": 8, "device": "cpu",
                  "enable_memory_saver": False}  # fmt: skip
    return SWAKVPool(
        size=SIZE, size_swa=SIZE // 2, page_size=PAGE, dtype=torch.bfloat16, head_num=2, head_dim=8,
        swa_attention_layer_ids=[0, 1, 3], full_attention_layer_ids=[2], device="cpu",
        swa_kv_pool_kwargs=of_windows,
    )  # fmt: skip


def of_requests() -> Any:
    """Of two layers a convolution and a matrix for each request."""
    shape = SimpleNamespace(conv=[(6, 3)], temporal=(2, 4, 4), disable_conv_window_dedup=True)
    dtype = SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32)
    params = SimpleNamespace(shape=shape, dtype=dtype, is_kda=False)
    return MambaPool(
        size=8, spec_state_size=0, cache_params=params, mamba_layer_ids=[0, 2], device="cpu"
    )


def states() -> Any:
    return HybridLinearKVPool(
        size=SIZE, dtype=torch.bfloat16, page_size=PAGE, head_num=2, head_dim=8,
        full_attention_layer_ids=[1], device="cpu", mamba_pool=of_requests(),
    )  # fmt: skip


def both() -> Any:
    """SGLang then has the states beside its table of requests."""
    pool = windows()
    pool.beside = SimpleNamespace(get_state_buf_infos=of_requests().get_contiguous_buf_infos)
    return pool


def index_keys() -> Any:
    """Latent vectors, and the keys of an index, in two layers; pages of 64, as its kernels need."""
    return DSATokenToKVPool(
        size=SIZE, page_size=64, kv_lora_rank=512, dtype=torch.bfloat16, qk_rope_head_dim=64,
        layer_num=2, device="cpu", index_head_dim=128, enable_memory_saver=False, kv_cache_dim=576,
    )  # fmt: skip


def rank_of(make: Callable[[], Any], seed: int, window: int = WINDOW) -> Rank:
    pool = make()
    page_size = pool.page_size
    made = Rank(filled=False, pool=pool, page_size=page_size, window=window)
    if make is index_keys:
        made.args.kv_layer_ids = [0, 1]
    rng = np.random.default_rng(seed)
    for buffer in (one for component in memory(made) for one in component):
        buffer[:] = rng.integers(1, 255, buffer.shape, np.uint8)
    return made


def memory(rank: Rank) -> list[list[Any]]:
    """Of the KV, then of each component: its buffers, [item, bytes]."""
    args = rank.args
    parts = [(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)]
    parts += zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
    return [
        [
            np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(at)).reshape(-1, size)
            for at, length, size in zip(*part, strict=True)
        ]
        for part in parts
    ]


Made = Callable[..., Pair]


@pytest.fixture
def make() -> Iterator[Made]:
    made: list[Any] = []

    def pair(pools: Callable[[], Any], **target: Any) -> Pair:
        made.append(Pair(ranks=(rank_of(pools, 3), rank_of(pools, 4, **target))))
        return made[-1]

    yield pair
    for one in made:
        one.close()


# --- whole requests -------------------------------------------------------------------------------


def begun(
    pair: Pair, pages: list[int], state: list[Any], prefix: int, room: int = 9, length: int = PROMPT
) -> tuple[Any, Any]:
    """Sender and receiver; decode has promised these."""
    sender = pair.sender(request(room, length))
    receiver = pair.receiver(request(room, length))
    receiver.send_metadata(np.array(pages, np.int32), 5, state, decode_prefix_len=prefix)
    return sender, receiver


@pytest.mark.parametrize("prefix_pages", [0, 2])
@pytest.mark.parametrize(
    ("pools", "given", "wanted"),
    [
        (windows, [[20, 9, 21, 17]], [[11, 30, 12, 25]]),
        (states, [[np.array(3)]], [[np.array(7)]]),  # as SGLang reads them from a tensor
        (both, [[20, 9, 21, 17], [np.array(3)]], [[11, 30, 12, 25], [np.array(7)]]),
    ],
)
def test_what_a_request_keeps_crosses_with_its_last_chunk(
    make: Made, pools: Any, given: Any, wanted: Any, prefix_pages: int
) -> None:
    """In two chunks; SGLang names windows and states with the last one. Then once more in one."""
    pair = make(pools)
    expected = [[buffer.copy() for buffer in part] for part in memory(pair.target)]
    for room, chunks in ((9, 2), (10, 1)):
        pages, source = [31, 2, 33, 4, 35, 36], [40, 41, 7, 42, 43, 6]
        pages, source = pages[prefix_pages:], source[prefix_pages:]
        sender, receiver = begun(pair, pages, wanted, prefix_pages * PAGE, room)
        pair.until_polls(sender, KVPoll.WaitingForInput)
        sender.init(len(source), 2)
        if chunks == 2:
            sender.send(np.array(source[:3], np.int32))
        pair.write_row(2, room=room, token=1234)
        sender.send(np.array(source[3 if chunks == 2 else 0 :], np.int32), given)
        pair.until_polls(receiver, KVPoll.Success)
        pair.until_polls(sender, KVPoll.Success)
        which = [(pages, source), *zip(wanted, given, strict=True)]
        for part, ours, (to, of) in zip(memory(pair.source), expected, which, strict=True):
            for from_, into in zip(part, ours, strict=True):
                into[np.array(to)] = from_[np.array(of)]
        for mine, theirs in zip(expected, memory(pair.target), strict=True):
            assert all(np.array_equal(*both) for both in zip(mine, theirs, strict=True))
        sizes = [sum(sizes) for sizes in pair.source.args.state_item_lens]
        if len(given) == 1:  # SGLang multiplies all indices by all sizes
            sent = len(source) * sum(pair.source.args.kv_item_lens) + len(given[0]) * sizes[0]
            assert sender.get_transfer_metric().transfer_total_bytes == sent
        for poller in (sender, receiver):
            poller.clear()
    assert len(pair.decode.receives) == len(pair.prefill.sends) == 0


def test_keys_of_an_index_cross_with_the_pages_of_the_kv(make: Made) -> None:
    """200 tokens are 4 pages of 64, of which decode has one."""
    pair = make(index_keys)
    expected = [[buffer.copy() for buffer in part] for part in memory(pair.target)]
    pages, source = [3, 12, 5], [9, 2, 14]
    sender, receiver = begun(pair, pages, [pages], 64, length=200)
    pair.until_polls(sender, KVPoll.WaitingForInput)
    sender.init(3, 2)
    sender.send(np.array(source[:2], np.int32))
    pair.write_row(2, room=9, token=1)
    sender.send(np.array(source[2:], np.int32), [np.array(source)])
    pair.until_polls(receiver, KVPoll.Success)
    for part, ours in zip(memory(pair.source), expected, strict=True):
        for from_, into in zip(part, ours, strict=True):
            into[pages] = from_[source]
    for mine, theirs in zip(expected, memory(pair.target), strict=True):
        assert all(np.array_equal(*both) for both in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    ("pools", "wanted", "told"),
    [
        (windows, [[1, 2]], "2 pages where group 'swa' needs 4"),
        (windows, [[1, 2, 99, 3]], "99"),
        (windows, [], "indices of 0 components"),
        (states, [[1, 2]], "2 slots of a request's state"),
        (states, [[9]], "state slot 9 of 9"),
        (index_keys, [[1, 2]], "2 pages of dsa, which are not those of the KV"),
    ],
)
def test_a_promise_of_other_state_fails_alone(
    make: Made, pools: Any, wanted: Any, told: str
) -> None:
    pair = make(pools)
    length = {windows: PROMPT, states: 20, index_keys: 100}[pools]
    pages = [1, 3, 5, 4, 2, 6][: -(-length // pair.decode.page_size)]
    sender, receiver = begun(pair, pages, wanted, 0, length=length)
    for poller in (receiver, sender):
        pair.until_polls(poller, KVPoll.Failed)
        with pytest.raises(KVTransferError, match=told):
            poller.failure_exception()
        poller.clear()
    assert len(pair.prefill.sends) == 0
    pair.until(lambda: pair.decode.is_abort_release_safe(9, 1))


@pytest.mark.parametrize(
    ("pools", "given", "told"),
    [
        (windows, [[20, 21]], "group 'swa': pages 4 to 6, this chunk sends 2 to 6"),
        (windows, None, "indices of 0 components"),
        (states, [[9]], "state slot 9 was handed over where one of 9"),
    ],
)
def test_a_chunk_of_other_state_fails_on_both(
    make: Made, pools: Any, given: Any, told: str
) -> None:
    """Decode's pages are held until no write can land in them."""
    pair = make(pools)
    wanted = [[1, 2, 3, 4] if pools is windows else [1]]
    sender, receiver = begun(pair, [1, 2, 3, 4, 5, 6], wanted, 0)
    pair.until_polls(sender, KVPoll.WaitingForInput)
    sender.init(6, 2)
    sender.send(np.array([1, 2], np.int32))
    sender.send(np.array([3, 4, 5, 6], np.int32), given)
    for poller in (sender, receiver):
        pair.until_polls(poller, KVPoll.Failed)
        with pytest.raises(KVTransferError, match=told):
            poller.failure_exception()
    pair.until(lambda: pair.decode.is_abort_release_safe(9, 1))


# --- what is refused ------------------------------------------------------------------------------


def test_servers_with_unlike_windows_refuse_each_other_by_name(make: Made) -> None:
    pair = make(windows, window=WINDOW + PAGE)
    _, receiver = begun(pair, [1, 2, 3, 4, 5, 6], [[1, 2, 3, 4, 5]], 0)
    pair.until_polls(receiver, KVPoll.Failed)
    with pytest.raises(KVTransferError, match=r"groups\[0\].window"):
        receiver.failure_exception()


@pytest.mark.parametrize("size", [1, 2])
def test_states_need_equal_numbers_of_ranks(size: int) -> None:
    """Then each rank of decode gets what the same one of prefill has."""
    sides = [rank_of(both, 3), rank_of(both, 4)], [rank_of(both, 5 + i) for i in range(size)]
    for side in sides:
        for number, rank in enumerate(side):
            rank.args.engine_rank = number
    shares = [[Share(MHA, 1, 2, WINDOW)] * 2, [Share(MHA, 2 // size, 2, WINDOW)] * size]
    servers = Servers(*sides, (shares[0], shares[1]))
    receivers = servers.receivers(request(9, PROMPT))
    if size == 1:
        assert receivers[0].poll() == KVPoll.Failed
        with pytest.raises(KVTransferError, match="needs the TP of decode, 1"):
            receivers[0].failure_exception()
    else:
        senders = servers.senders(request(9, PROMPT))
        for receiver in receivers:
            receiver.send_metadata([1, 2, 3, 4, 5, 6], 0, [[7, 6, 5, 4], [2]], 0)
        servers.until_all_poll(senders, KVPoll.WaitingForInput)
        for rank, sender in zip(sides[0], senders, strict=True):
            sender.init(6, 0)
            rank.write_row(0, 9, 77)
            sender.send([6, 5, 4, 3, 2, 1], [[1, 2, 3, 9], [5]])
        servers.until_all_poll(receivers, KVPoll.Success)
        which = ([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]), ([7, 6, 5, 4], [1, 2, 3, 9]), ([2], [5])
        for ours, theirs in zip(*sides, strict=True):
            for mine, its, (to, of) in zip(memory(ours), memory(theirs), which, strict=True):
                assert all((b[to] == a[of]).all() for a, b in zip(mine, its, strict=True))
    servers.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"state_types": [StateType.DSA_TAIL]}, r"state besides its KV \(dsa_tail\)"),
        ({"state_types": [StateType.SWA, StateType.SWA]}, r"of one kind \(swa, swa\)"),
        ({"num_draft_entries": 2}, "leave out --speculative-algorithm"),
        ({"page_size": 1}, "--page-size above 1"),
        ({"mla_compression_ratios": [0, 4]}, "DeepSeek V4"),
        ({"window": 0}, "does not say how long"),
    ],
)
def test_what_is_not_sent_is_refused_at_the_start(change: dict[str, Any], told: str) -> None:
    rank = rank_of(windows, 3)
    for name, value in change.items():
        setattr(rank if name == "window" else rank.args, name, value)
    with pytest.raises(ConfigError, match=told):
        manager(rank, DisaggregationMode.DECODE)


def test_the_hook_tells_how_long_the_window_is() -> None:
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 2)
    scheduler = SimpleNamespace(model_config=model, sliding_window_size=WINDOW)
    queue = SimpleNamespace(scheduler=scheduler, token_to_kv_pool=windows())
    assert plugin._around_manager(lambda _queue: current_share(), queue) == Share(window=WINDOW)
    scheduler.sliding_window_size = None
    assert plugin._around_manager(lambda _queue: current_share(), queue) == Share()
