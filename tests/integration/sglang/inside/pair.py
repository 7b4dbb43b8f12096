"""Prefill and decode ranks in one process: SGLang's own manager, sender, receiver, registry,
metadata rows and transfer queue under the backend, in the order in which SGLang calls them."""

import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    KVClassType,
    MetadataBuffers,
    setup_state_kv_args,
)

from prefixkv.engines.sglang import plugin
from prefixkv.engines.sglang.memory import Share, use_share
from prefixkv.engines.sglang.transfer import CLASSES
from tests.integration.sglang.stubs import CONTEXT, HERE
from tests.support.patience import PATIENCE_S, until
from tests.support.ports import free_port

PAGE, PAGE_BYTES, PAGES, BUFFERS, ROWS = 16, 128, 64, 4, 8
SERVER = SimpleNamespace(served_model_name="models/tiny", enable_memory_saver=False)


class Rank:
    """Its KV buffers, its metadata rows, and the arguments that SGLang makes of them. The buffers
    are [page, bytes of a page], by default of one layer's K and V, and another's. `pool`: one of
    SGLang's, with pages of `page_size`; `window` is what its scheduler says of a model with one."""

    def __init__(
        self, *, filled: bool, number: int = 0, buffers: list[npt.NDArray[np.uint8]] | None = None,
        pool: Any = None, page_size: int = PAGE, window: int = 0,
    ) -> None:  # fmt: skip
        self.pool, self.window = pool, window
        self.buffers = buffers or [np.zeros((PAGES, PAGE_BYTES), np.uint8) for _ in range(BUFFERS)]
        if filled and buffers is None:
            rng = np.random.default_rng(3 + number)
            for buffer in self.buffers:
                buffer[:] = rng.integers(1, 255, buffer.shape)
        self.metadata = MetadataBuffers(ROWS, 16, torch.float32, 16)
        args = self.args = KVArgs()
        args.engine_rank = number
        args.pp_rank = args.gpu_id = args.num_draft_entries = 0
        args.system_dp_rank, args.rust_http_port = 0, None
        args.kv_data_ptrs = [buffer.ctypes.data for buffer in self.buffers]
        args.kv_data_lens = [buffer.nbytes for buffer in self.buffers]
        args.kv_item_lens = [buffer.shape[1] for buffer in self.buffers]
        if pool is not None:
            args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = (
                pool.get_contiguous_buf_infos()
            )
        layers = range(len(self.buffers) // 2)
        args.kv_layer_ids = [*layers, *layers]
        args.kv_cache_dtype_str, args.kv_layout, args.page_size = "bfloat16", None, page_size
        pointers = self.metadata.get_buf_infos()
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = pointers
        setup_state_kv_args(args, pool, req_to_token_pool=getattr(pool, "beside", None))

    def write_row(self, row: int, room: int, token: int) -> None:
        self.metadata.output_ids[row, 0] = token
        self.metadata.bootstrap_room[row, 0] = room


class Registry:
    """SGLang's, in a thread of its own; `server` makes it."""

    def __init__(self, server: Any = None) -> None:
        port = free_port()
        CONTEXT.disagg.disaggregation_bootstrap_port = port
        self.address = f"127.0.0.1:{port}"
        server = server or CLASSES[KVClassType.BOOTSTRAP_SERVER]
        self.server = server(host="127.0.0.1", port=port)
        until(self._answers)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://{self.address}/health", timeout=5).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.server.close()


class Pair:
    """Of one rank a side. Closed by `close`. `server` makes the registry: the backend's, where not
    another; `ranks` the memory of prefill and of decode."""

    def __init__(self, server: Any = None, ranks: tuple[Rank, Rank] | None = None) -> None:
        self.registry = Registry(server)
        self.address = self.registry.address
        self.source, self.target = ranks or (Rank(filled=True), Rank(filled=False))
        self.prefill = manager(self.source, DisaggregationMode.PREFILL)
        self.decode = manager(self.target, DisaggregationMode.DECODE)
        self.transfer_queue: Any = None

    def sender(self, req: Any) -> Any:
        return sender(self.prefill, self.address, req)

    def receiver(self, req: Any) -> Any:
        return receiver(self.decode, self.address, req, self.transfer_queue)

    def write_row(self, row: int, room: int, token: int) -> None:
        self.source.write_row(row, room, token)

    def until_polls(self, poller: Any, status: int) -> None:
        until_all_poll([poller], status, self.prefill, self.decode)

    def step(self) -> None:
        self.prefill.pump()
        self.decode.pump()

    def until(self, done: Callable[[], object]) -> None:
        until(done, step=self.step)

    def holds(self, pages: list[int], source: list[int]) -> bool:
        pairs = zip(self.source.buffers, self.target.buffers, strict=True)
        return all((mine[source] == theirs[pages]).all() for mine, theirs in pairs)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        self.decode._heartbeat_shutdown.set()
        self.registry.close()


def manager(rank: Rank, mode: Any) -> Any:
    """As SGLang makes it of one rank, with what the hook around it tells."""
    with use_share(Share(window=rank.window)):
        return CLASSES[KVClassType.MANAGER](rank.args, mode, SERVER)


class Servers:
    """Of several ranks a side, all in this process, each made in a thread of its own, as SGLang's
    processes make them all at once.

    Args:
        prefill, decode: the ranks' memory.
        shares: how each of them lies in it.
    """

    def __init__(
        self, prefill: list[Rank], decode: list[Rank], shares: tuple[list[Share], list[Share]]
    ) -> None:
        self.registry = Registry()
        self.source, self.target = prefill, decode
        self.prefill = _made_at_once(DisaggregationMode.PREFILL, prefill, shares[0])
        self.decode = _made_at_once(DisaggregationMode.DECODE, decode, shares[1])

    def senders(self, req: Any) -> list[Any]:
        address = self.registry.address
        return [sender(rank, address, copy(req)) for rank in self.prefill]

    def receivers(self, req: Any) -> list[Any]:
        address = self.registry.address
        return [receiver(rank, address, copy(req)) for rank in self.decode]

    def until_all_poll(self, pollers: list[Any], status: int) -> None:
        until_all_poll(pollers, status, *self.prefill, *self.decode)

    def close(self) -> None:
        for rank in (*self.prefill, *self.decode):
            rank.close()
        for rank in self.decode:
            rank._heartbeat_shutdown.set()
        self.registry.close()


def _made_at_once(mode: Any, ranks: list[Rank], shares: list[Share]) -> list[Any]:
    size = len(ranks)
    given: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def make(number: int) -> Any:
        def gather(said: Any) -> list[Any]:
            given[number] = said
            barrier.wait(PATIENCE_S)
            found = list(given)
            barrier.wait(PATIENCE_S)  # before the next one changes it
            return found

        own = {**vars(CONTEXT.parallel), "attn_tp_group": SimpleNamespace(all_gather_object=gather)}
        own.update(tp_size=size, tp_rank=number, attn_tp_size=size, attn_tp_rank=number)
        HERE.parallel = SimpleNamespace(**own)
        with use_share(shares[number]):
            return CLASSES[KVClassType.MANAGER](ranks[number].args, mode, SERVER)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


# --- what SGLang calls, in its order --------------------------------------------------------------


def sender(manager: Any, address: str, req: Any) -> Any:
    """`PrefillBootstrapQueue.create_sender`, with the hook behind it."""
    made = CLASSES[KVClassType.SENDER]
    req.disagg_kv_sender = made(
        mgr=manager, bootstrap_addr=address, bootstrap_room=req.bootstrap_room
    )
    plugin._after_sender(True, None, req, 2)
    return req.disagg_kv_sender


def receiver(manager: Any, address: str, req: Any, transfer_queue: Any = None) -> Any:
    """`DecodePreallocQueue._create_receiver_and_enqueue`, with the hook behind it, and what SGLang
    asks of the registry."""
    made = CLASSES[KVClassType.RECEIVER]
    it = made(mgr=manager, bootstrap_addr=address, bootstrap_room=req.bootstrap_room)
    if transfer_queue is None:  # what the hook reads of it
        transfer_queue = SimpleNamespace(
            enable_deferred_kv_release=False, deferred_kv_release_timeout=30.0
        )
    queue = SimpleNamespace(transfer_queue=transfer_queue)
    plugin._after_receiver(SimpleNamespace(kv_receiver=it), queue, req)
    assert transfer_queue.enable_deferred_kv_release
    assert it.poll() == KVPoll.Bootstrapping
    assert manager.try_ensure_parallel_info(address)
    it.init(0)
    return it


def until_all_poll(pollers: list[Any], status: int, *managers: Any) -> None:
    def step() -> None:
        for manager in managers:
            manager.pump()

    until(lambda: {poller.poll() for poller in pollers} == {status}, step=step)


def request(room: int, num_tokens: int = 90, **more: Any) -> Any:
    said = {
        "rid": str(room),
        "cache_salt": None,
        "output_ids": [],
        "bootstrap_host": "127.0.0.1",
        **more,
    }
    tokens = [(7 * i) % 1000 for i in range(num_tokens)]
    return SimpleNamespace(bootstrap_room=room, origin_input_ids=tokens, **said)
