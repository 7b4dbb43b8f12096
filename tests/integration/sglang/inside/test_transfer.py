"""The transfer backend under SGLang's own classes: registry, manager, sender, receiver, rows, and
the queue that holds what failed."""

import json
import pkgutil
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
from sglang.srt.disaggregation import decode as sglang_decode
from sglang.srt.disaggregation.base.conn import KVPoll, StateType
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, KVTransferError
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    KVClassType,
    ReqToMetadataIdxAllocator,
    TransferBackend,
)
from sglang.srt.plugins.hook_registry import HookRegistry

from prefixkv.engines.sglang import internals as sgl
from prefixkv.engines.sglang import plugin, transfer
from prefixkv.engines.sglang.transfer import CLASSES, prompt_of
from prefixkv.errors import ConfigError
from prefixkv.settings import PREFIX
from tests.integration.sglang.inside.desk import Desk, Request
from tests.integration.sglang.inside.pair import PAGE, PAGE_BYTES, SERVER, Pair, Rank, request
from tests.integration.sglang.stubs import CONTEXT
from tests.support.patience import until

pytestmark = pytest.mark.usefixtures("this_machine")


def test_sglang_knows_the_backend_by_its_name() -> None:
    plugin.load()  # SGLang's processes may load it again
    assert DISAGG_TRANSFER_BACKEND_CHOICES.count("prefixkv") == 1
    backend = TransferBackend("prefixkv")
    assert backend not in (TransferBackend.NIXL, TransferBackend.FAKE)
    hooks = {target: HookRegistry._hooks[target] for target in (sgl.GET_KV_CLASS,)}
    ((_, kv_class, _),) = hooks[sgl.GET_KV_CLASS]
    asked = [kv_class(None, backend, kind) for kind in KVClassType]
    assert asked == [CLASSES[kind] for kind in KVClassType]
    other = kv_class(lambda *given: given, TransferBackend.NIXL, KVClassType.SENDER)
    assert other == (TransferBackend.NIXL, KVClassType.SENDER)


@pytest.mark.parametrize(
    "target",
    [
        sgl.GET_KV_CLASS, sgl.MAKE_PREFILL, sgl.MAKE_DECODE, sgl.CREATE_SENDER, sgl.CREATE_RECEIVER,
        sgl.DECODE_ADD, sgl.DECODE_CAPACITY, sgl.POP_BOOTSTRAPPED, sgl.PREFILL_ADD,
        sgl.WAITING_ABORT,
    ],
)  # fmt: skip
def test_what_is_hooked_is_there(target: str) -> None:
    owner, _, name = target.rpartition(".")
    assert callable(getattr(pkgutil.resolve_name(owner), name))
    assert target in HookRegistry._hooks


def test_a_prompt_crosses_in_two_chunks_with_its_row(pair: Pair) -> None:
    """Six pages; decode has the first two."""
    req = request(room=9)
    sender, receiver = pair.sender(req), pair.receiver(request(room=9))
    assert sender.poll() == KVPoll.Bootstrapping
    assert receiver.poll() == KVPoll.WaitingForInput
    receiver.send_metadata([31, 32, 33, 34], 5, [], decode_prefix_len=2 * PAGE)
    pair.until_polls(sender, KVPoll.WaitingForInput)
    assert sender.pop_decode_prefix_len() == 2 * PAGE
    sender.init(4, 2)
    assert sender.should_send_kv_chunk(3, False)
    sender.send([40, 41, 42], num_kv_tokens=3 * PAGE)
    assert receiver.poll() == KVPoll.WaitingForInput
    pair.write_row(2, room=9, token=1234)
    sender.send([7], [], num_kv_tokens=10)
    pair.until_polls(receiver, KVPoll.Success)
    pair.until_polls(sender, KVPoll.Success)
    assert pair.holds([31, 32, 33, 34], [40, 41, 42, 7])
    found = pair.target.metadata.get_buf(5)
    assert (found[0][0].item(), found[-1][0].item()) == (1234, 9)
    assert not pair.target.metadata.output_ids[[0, 1, 2, 3, 4, 6, 7]].any()
    assert sender.get_transfer_metric().transfer_total_bytes == 4 * 4 * PAGE_BYTES
    for poller in (sender, receiver):
        poller.clear()
        assert poller.poll() == KVPoll.Success
    assert not pair.prefill.request_status
    assert not pair.decode.request_status


def test_decodes_second_request_for_its_output_is_another_prompt() -> None:
    first, again = request(1), request(1, output_ids=[5, 6], pd_rebootstrap_in_progress=True)
    assert prompt_of(again) == prompt_of(
        SimpleNamespace(origin_input_ids=array("q", [*first.origin_input_ids, 5, 6]), cache_salt="")
    )
    assert prompt_of(first)[1] + 2 == prompt_of(again)[1]
    assert prompt_of(request(1, output_ids=[5, 6])) == prompt_of(first)  # retracted: not asked


def test_a_request_that_decode_never_gets_times_out(pair: Pair) -> None:
    sender = pair.sender(request(9))
    assert sender.poll() == KVPoll.Bootstrapping
    pair.prefill.bootstrap_timeout = 0
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="timed out"):
        sender.failure_exception()
    receiver = pair.receiver(request(9))  # it comes after all
    receiver.send_metadata([1, 2, 3, 4, 5, 6], 0, [], decode_prefix_len=0)
    pair.until_polls(receiver, KVPoll.Failed)


def test_prefill_that_was_replaced_meanwhile_serves_the_first_request(pair: Pair) -> None:
    """Between two requests, before SGLang's heartbeats have failed."""
    sender, receiver = pair.sender(request(8)), pair.receiver(request(8))
    receiver.send_metadata([1, 2, 3, 4, 5, 6], 0, [], decode_prefix_len=0)
    pair.until_polls(sender, KVPoll.WaitingForInput)
    sender.init(6, 0)
    pair.write_row(0, room=8, token=1)
    sender.send([1, 2, 3, 4, 5, 6])
    pair.until_polls(receiver, KVPoll.Success)
    endpoint = pair.prefill.endpoint
    asked, (known,) = pair.receiver(request(20)), pair.decode.connection_pool.values()
    assert asked.bootstrap_infos[0] is known[0]  # while it answers, nobody asks again
    pair.prefill.close()
    pair.prefill = CLASSES[KVClassType.MANAGER](
        pair.source.args, DisaggregationMode.PREFILL, SERVER
    )
    assert pair.prefill.endpoint != endpoint
    until(lambda: not pair.decode.receives.answers(endpoint))
    assert pair.decode.connection_pool
    sender, receiver = pair.sender(request(9)), pair.receiver(request(9))
    receiver.send_metadata([1, 2, 3, 4, 5, 6], 0, [], decode_prefix_len=0)
    pair.until_polls(sender, KVPoll.WaitingForInput)


def test_a_prefill_that_does_not_answer_is_asked_for_again_only_now_and_then(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's scheduler stands still while it asks."""
    monkeypatch.setattr(pair.decode.receives, "answers", lambda prefill: False)
    first = pair.receiver(request(1)).bootstrap_infos[0]
    second = pair.receiver(request(2)).bootstrap_infos[0]
    third = pair.receiver(request(3)).bootstrap_infos[0]
    assert first is not second
    assert second is third
    for key in pair.decode._asked_s:
        pair.decode._asked_s[key] -= transfer.ASK_AGAIN_S
    assert pair.receiver(request(4)).bootstrap_infos[0] is not third


def test_an_operators_folder_is_read_as_the_rank_is_polled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PREFIXKV_TRANSFER", json.dumps({"fence_folder": str(tmp_path)}))
    with pytest.raises(ConfigError, match=r"fence_folder .* has mode 755"):
        CLASSES[KVClassType.MANAGER](Rank(filled=False).args, DisaggregationMode.DECODE, SERVER)
    tmp_path.chmod(0o700)
    pair = Pair()
    sender, receiver = pair.sender(request(9)), pair.receiver(request(9))
    receiver.send_metadata([1, 2, 3, 4, 5, 6], 0, [], decode_prefix_len=0)
    pair.until_polls(sender, KVPoll.WaitingForInput)
    told = sorted(path.name for path in tmp_path.iterdir())
    assert told == [f"{pair.decode.name}-tp0.lost", f"{pair.prefill.name}-tp0.lost"]
    prefill = pair.prefill.sends.transfers.peer_id
    (tmp_path / "fences").write_text(f"{prefill.name} {prefill.incarnation:x}\n")
    until(lambda: pair.decode.is_abort_release_safe(9, 1))  # of a request that has failed
    assert receiver.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="was fenced"):
        receiver.failure_exception()
    pair.close()


def test_prefill_with_another_backend_is_refused_by_name() -> None:
    pair = Pair(server=CommonKVBootstrapServer)
    receiver = pair.receiver(request(9))
    assert receiver.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="has not the transfer backend prefixkv"):
        receiver.failure_exception()
    pair.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"state_types": [StateType.SWA_RING]}, r"state besides its KV \(swa_ring\)"),
        ({"pp_size": 2}, "--pp-size"),
        ({"attn_cp_size": 2}, "--attn-cp-size"),
        ({"attn_dcp_size": 2}, "--dcp-size"),
        ({"num_dp_ranks": 2}, "--dp-size"),
        ({"enable_memory_saver": True}, "--enable-memory-saver"),
        ({"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding"),
        ({"SGLANG_RUST_SERVER": "1"}, "SGLANG_RUST_SERVER"),
        ({"kv_item_lens": [PAGE_BYTES, PAGE_BYTES, PAGE_BYTES, 64]}, "all have to be alike"),
        ({PREFIX + "TRANSFERS": "{}"}, "no variable .*; the nearest is PREFIXKV_TRANSFER$"),
    ],
)
def test_what_is_not_served_is_refused_at_the_start(
    change: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(filled=False)
    for name, value in change.items():
        if name.isupper():
            monkeypatch.setenv(name, value)
        else:
            owners = rank.args, SERVER, CONTEXT.parallel
            owner = next(owner for owner in owners if hasattr(owner, name))
            monkeypatch.setattr(owner, name, value)
    with pytest.raises(ConfigError, match=told):
        CLASSES[KVClassType.MANAGER](rank.args, DisaggregationMode.DECODE, SERVER)


# --- what decode holds ----------------------------------------------------------------------------


@pytest.fixture
def one_process() -> Iterator[None]:
    """SGLang's polls go through a collective."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_pages_of_a_request_that_failed_are_held_until_its_room_is_drained(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own queue, pools and allocator. Its thirty seconds pass; no proof has come."""
    desk = Desk("prefixkv", PAGE, 32 * PAGE)
    rows = ReqToMetadataIdxAllocator(8)
    answered: list[Any] = []
    scheduler = SimpleNamespace(
        spec_algorithm=None, enable_decode_hicache=False, enable_hisparse=False,
        output_streamer=SimpleNamespace(stream_output=lambda reqs, *_: answered.extend(reqs)),
        metrics_reporter=SimpleNamespace(enable_metrics=False),
    )  # fmt: skip
    queue = sglang_decode.DecodeTransferQueue(rows, pair.target.metadata, scheduler, desk.cache)
    pair.transfer_queue = queue
    sender, req = pair.sender(request(9)), Request("a", array("q", request(9).origin_input_ids))
    vars(req).update(bootstrap_room=9, bootstrap_host="127.0.0.1", return_logprob=False)
    assert desk.admit(req)
    free = desk.allocator.available_size()
    receiver = pair.receiver(req)
    item = sglang_decode.DecodeRequest(req, receiver, metadata_buffer_index=rows.alloc())
    slots = desk.pool.req_to_token[req.kv.req_pool_idx, : 6 * PAGE : PAGE]
    receiver.send_metadata((slots // PAGE).numpy(), item.metadata_buffer_index, [], 0)
    queue.add(item)
    pair.until_polls(sender, KVPoll.WaitingForInput)
    assert queue.pop_transferred() == []

    # The client goes away; whatever prefill has proved, decode has not heard of it yet.
    pump, pair.decode.receives.pump = pair.decode.receives.pump, lambda: None
    receiver.abort()
    assert queue.pop_transferred() == []
    assert answered == [req]
    assert not queue.queue
    assert queue.num_pending_deferred_releases() == 1
    monkeypatch.setattr(sglang_decode.time, "monotonic", lambda: 1e12)
    queue.resolve_deferred_releases()
    assert queue.num_pending_deferred_releases() == 1
    assert desk.allocator.available_size() == free
    assert rows.available_size() == 7
    monkeypatch.undo()

    pair.decode.receives.pump = pump

    def released() -> bool:
        pair.prefill.pump()
        queue.resolve_deferred_releases()
        return not queue.has_pending_deferred_releases()

    until(released)
    assert desk.allocator.available_size() == free + 6 * PAGE
    assert rows.available_size() == 8
    assert len(pair.decode.receives) == 0
    pair.until_polls(sender, KVPoll.Failed)
