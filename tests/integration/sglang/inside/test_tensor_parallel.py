"""Transfers between servers of several ranks, as many a side or not: a model's KV heads are shared
out over the ranks' buffers, and each decode rank has to end up with its own heads of every page."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from prefixkv.engines.sglang import memory, plugin
from prefixkv.engines.sglang.memory import MHA, MLA, Share, pool_of, share_of
from prefixkv.engines.sglang.transfer import CLASSES
from tests.integration.sglang.inside.pair import PAGE, PAGES, SERVER, Rank, Servers, request
from tests.support.patience import until

HEADS, HEAD_BYTES, LAYERS = 4, 16, 2
Bytes = npt.NDArray[np.uint8]
Make = Callable[..., Servers]


pytestmark = pytest.mark.usefixtures("this_machine")


def heads_of(rank: int, size: int) -> list[int]:
    """SGLang's: with more ranks than heads neighbours hold the same one."""
    each = max(1, HEADS // size)
    first = rank // max(1, size // HEADS) * each
    return [*range(first, first + each)]


def kv_of(seed: int | None) -> Bytes:
    """Of the whole model: [K layers and V layers, page, token, head, byte]; None: zeros."""
    shape = 2 * LAYERS, PAGES, PAGE, HEADS, HEAD_BYTES
    if seed is None:
        return np.zeros(shape, np.uint8)
    return np.random.default_rng(seed).integers(1, 255, shape, np.uint8)


def ranks_of(kv: Bytes, size: int, kind: str) -> list[Rank]:
    """MLA and opaque pages: each rank has the bytes of its own heads, or of them all, as one."""
    ranks = []
    for number in range(size):
        own = kv if kind == MLA else kv[..., heads_of(number, size), :]
        buffers = [np.ascontiguousarray(one).reshape(PAGES, -1) for one in own]
        ranks.append(Rank(filled=True, number=number, buffers=buffers))
    return ranks


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Servers] = []

    def servers(prefill: int, decode: int, kind: str) -> Servers:
        def share(size: int) -> list[Share]:
            heads = len(heads_of(0, size)) if kind == MHA else 1
            return [Share(kind, heads, HEADS if kind == MHA else 1)] * size

        sides = ranks_of(kv_of(3), prefill, kind), ranks_of(kv_of(None), decode, kind)
        made.append(Servers(*sides, (share(prefill), share(decode))))
        return made[-1]

    yield servers
    for one in made:
        one.close()


def holds(servers: Servers, kind: str, pages: list[int], source: list[int]) -> bool:
    whole, size = kv_of(3), len(servers.target)
    expected = ranks_of(whole, size, kind)
    return all(
        (theirs[pages] == ours[source]).all()
        for rank, right in zip(servers.target, expected, strict=True)
        for theirs, ours in zip(rank.buffers, right.buffers, strict=True)
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "kind"),
    [
        (2, 2, MHA), (1, 2, MHA), (4, 1, MHA), (2, 4, MHA),
        (8, 2, MHA), (4, 8, MHA),  # each head on two ranks
        (1, 2, MLA), (2, 1, MLA), (2, 2, memory.OPAQUE),
    ],
)  # fmt: skip
def test_each_rank_gets_its_own_heads(make: Make, prefill: int, decode: int, kind: str) -> None:
    """90 tokens are 6 pages, of which decode has the first; in two chunks, then again in one."""
    servers = make(prefill, decode, kind)
    for room, chunks in ((9, [[2, 3], [4, 5, 6]]), (10, [[2, 3, 4, 5, 6]])):
        senders, receivers = servers.senders(request(room)), servers.receivers(request(room))
        pages = [room + i for i in range(5)]
        for receiver in receivers:
            receiver.send_metadata(pages, 0, [], decode_prefix_len=PAGE)
        servers.until_all_poll(senders, KVPoll.WaitingForInput)
        for rank, sender in zip(servers.source, senders, strict=True):
            assert sender.pop_decode_prefix_len() == PAGE
            sender.init(5, 0)
            rank.write_row(0, room, 77)
        for chunk in chunks:
            for sender in senders:
                sender.send(np.array(chunk, np.int32))
        servers.until_all_poll(receivers, KVPoll.Success)
        servers.until_all_poll(senders, KVPoll.Success)
        assert holds(servers, kind, pages, [2, 3, 4, 5, 6])
        for rank in servers.target:
            assert rank.metadata.output_ids[0, 0] == 77
            rank.metadata.output_ids[0, 0] = 0
            for buffer in rank.buffers:
                assert not buffer[0].any()
                buffer[:] = 0
    assert all(len(manager.sends) == 0 for manager in servers.prefill)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 2)])
def test_a_request_that_decode_aborts_ends_everywhere(
    make: Make, prefill: int, decode: int
) -> None:
    """Before it has pages, and with pages, while prefill computes."""
    servers = make(prefill, decode, MHA)
    for room, has_pages in ((9, False), (10, True)):
        senders, receivers = servers.senders(request(room)), servers.receivers(request(room))
        if has_pages:
            for receiver in receivers:
                receiver.send_metadata([1, 2, 3, 4, 5, 6], 0, [], decode_prefix_len=0)
            servers.until_all_poll(senders, KVPoll.WaitingForInput)
        for receiver in receivers:
            receiver.abort()
        servers.until_all_poll(senders, KVPoll.Failed)
        until(lambda: all(rank.is_abort_release_safe(10, 1) for rank in servers.decode))


def test_one_rank_of_prefill_fails_alone(make: Make) -> None:
    """SGLang makes the polls of ranks agree: the others are told to abort, and then end."""
    servers = make(2, 2, MHA)
    assert len({rank.rank_name for rank in (*servers.prefill, *servers.decode)}) == 4
    senders, receivers = servers.senders(request(10)), servers.receivers(request(10))
    for receiver in receivers:
        receiver.send_metadata([21, 22, 23, 24, 25, 26], 0, [], decode_prefix_len=0)
    servers.until_all_poll(senders, KVPoll.WaitingForInput)
    servers.prefill[1].close()
    servers.prefill[1].pump = lambda: None
    servers.until_all_poll(receivers[1:], KVPoll.Failed)
    assert receivers[0].poll() == KVPoll.WaitingForInput
    receivers[0].abort()
    servers.until_all_poll(senders[:1], KVPoll.Failed)
    until(lambda: all(rank.is_abort_release_safe(10, 1) for rank in servers.decode))


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_opaque_pages_of_unequal_ranks_are_refused_by_name(
    make: Make, prefill: int, decode: int
) -> None:
    """A class of pool that is not known, or a draft model's KV besides."""
    servers = make(prefill, decode, memory.OPAQUE)
    servers.senders(request(9))
    told = rf"prefill has attention TP {prefill}.* the TP of decode, {decode}, for KV whose layout"
    for receiver in servers.receivers(request(9)):
        assert receiver.poll() == KVPoll.Failed
        with pytest.raises(KVTransferError, match=told):
            receiver.failure_exception()


def test_with_a_draft_models_kv_pages_are_opaque() -> None:
    rank = Rank(filled=False)
    rank.args.num_draft_entries = 2
    with memory.use_share(Share(MHA, 2, 2)):
        manager = CLASSES[KVClassType.MANAGER](rank.args, DisaggregationMode.DECODE, SERVER)
    assert manager.share == memory.UNKNOWN
    manager.close()
    manager._heartbeat_shutdown.set()


@pytest.mark.parametrize("change", [{"pp_size": 2}, {"attn_cp_size": 2}, {"attn_tp_size": 3}])
def test_ranks_that_do_not_pair_are_refused_by_name(make: Make, change: dict[str, int]) -> None:
    servers = make(1, 2, MHA)
    address = servers.registry.address
    for rank in servers.decode:
        assert rank.try_ensure_parallel_info(address)
        vars(rank.prefill_info_table[address]).update(change)
    for receiver in servers.receivers(request(9)):
        assert receiver.poll() == KVPoll.Failed
        with pytest.raises(KVTransferError, match=r"needs a TP that divides decode's, 2"):
            receiver.failure_exception()


# --- SGLang's own pools ---------------------------------------------------------------------------


def mha_pool(**changed: Any) -> Any:
    said = {
        "size": 4 * PAGE, "page_size": PAGE, "dtype": torch.bfloat16, "head_num": 2, "head_dim": 8,
        "layer_num": 3, "device": "cpu", "enable_memory_saver": False, "enable_alt_stream": False,
        **changed,
    }  # fmt: skip
    return MHATokenToKVPool(**said)


def pool_over(sglang_pool: Any, share: Share) -> Any:
    told = sglang_pool.get_contiguous_buf_infos()
    return pool_of(*told, page_size=PAGE, device="cpu", tag="test", share=share)


def test_k_and_v_lie_as_sglangs_pool_says() -> None:
    sglang_pool = mha_pool()
    share = share_of(sglang_pool, 8)
    assert share == Share(MHA, 2, 8)
    pool = pool_over(sglang_pool, share)
    for layer in range(3):
        for ours, theirs in (
            (pool.k(layer), sglang_pool.k_buffer[layer]),
            (pool.v(layer), sglang_pool.v_buffer[layer]),
        ):
            theirs.copy_(torch.randn(theirs.shape))
            slots = torch.arange(2 * PAGE, 3 * PAGE)  # of page 2
            found = ours[2].contiguous().view(torch.bfloat16)
            assert torch.equal(found, theirs[slots])


def test_of_latent_vectors_each_rank_has_all() -> None:
    sglang_pool = MLATokenToKVPool(
        4 * PAGE, PAGE, torch.bfloat16, kv_lora_rank=16, qk_rope_head_dim=8, layer_num=2,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    share = share_of(sglang_pool, 1)
    assert share == Share(MLA)
    pool = pool_over(sglang_pool, share)
    sglang_pool.kv_buffer[1].copy_(torch.randn(sglang_pool.kv_buffer[1].shape))
    slots = torch.arange(PAGE, 2 * PAGE)
    found = pool.latent(1)[1].contiguous().view(torch.bfloat16)
    assert torch.equal(found, sglang_pool.kv_buffer[1][slots].squeeze(1))


class Derived(MHATokenToKVPool):  # type: ignore[misc]
    """As SGLang's pools of four bits are."""


def test_a_pool_that_is_not_known_is_opaque() -> None:
    known = mha_pool()
    known.kv_cache_layout = "hnd"
    assert share_of(known, 8) == memory.UNKNOWN
    known.kv_cache_layout = "nhd"
    assert share_of(known, 8) != memory.UNKNOWN
    known.k_buffer[1] = known.k_buffer[1].unsqueeze(0)
    assert share_of(known, 8) == memory.UNKNOWN
    derived = object.__new__(Derived)
    vars(derived).update(vars(mha_pool()))
    assert share_of(derived, 8) == memory.UNKNOWN
    assert share_of(SimpleNamespace(), 8) == memory.UNKNOWN


def test_the_manager_is_told_while_sglang_makes_it() -> None:
    queue = SimpleNamespace(
        token_to_kv_pool=mha_pool(),
        scheduler=SimpleNamespace(model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 8)),
    )
    assert plugin._around_manager(lambda _queue: memory.current_share(), queue) == Share(MHA, 2, 8)
    assert memory.current_share() == memory.UNKNOWN
