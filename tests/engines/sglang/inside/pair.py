"""A prefill and a decode rank in one process: SGLang's own manager, sender, receiver, registry,
metadata rows and transfer queue under the backend, in the order in which SGLang calls them."""

from __future__ import annotations

import socket
import urllib.request
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    KVClassType,
    MetadataBuffers,
)

from prefixkv.engines.sglang import plugin
from prefixkv.engines.sglang.transfer import CLASSES
from tests.engines.sglang.stubs import CONTEXT
from tests.models.patience import until

PAGE, PAGE_BYTES, PAGES, BUFFERS, ROWS = 16, 128, 64, 4, 8
SERVER = SimpleNamespace(served_model_name="models/tiny", enable_memory_saver=False)


class Rank:
    """Its KV buffers, its metadata rows, and the arguments that SGLang makes of them."""

    def __init__(self, *, filled: bool, number: int = 0) -> None:
        self.buffers = [np.zeros((PAGES, PAGE_BYTES), np.uint8) for _ in range(BUFFERS)]
        if filled:
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
        args.kv_item_lens = [PAGE_BYTES] * BUFFERS
        args.kv_layer_ids = [0, 0, 1, 1]
        args.kv_cache_dtype_str, args.kv_layout, args.page_size = "bfloat16", None, PAGE
        pointers = self.metadata.get_buf_infos()
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = pointers
        args.state_types, args.state_item_lens = [], []


class Pair:
    """Closed by `close`. `server` makes the registry: the backend's, where not another. Of several
    tensor-parallel ranks each is a pair, the later ones `beside` the first."""

    def __init__(
        self, server: Any = None, beside: Pair | None = None, rank: int = 0, size: int = 1
    ) -> None:
        self._owns_registry = beside is None
        if beside is None:
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", 0))
                port = sock.getsockname()[1]
            CONTEXT.disagg.disaggregation_bootstrap_port = port
            self.address = f"127.0.0.1:{port}"
            server = server or CLASSES[KVClassType.BOOTSTRAP_SERVER]
            self.registry = server(host="127.0.0.1", port=port)
            until(self._answers)
        else:
            self.address, self.registry = beside.address, beside.registry
        self.source, self.target = Rank(filled=True, number=rank), Rank(filled=False, number=rank)
        made, sizes = CLASSES[KVClassType.MANAGER], vars(CONTEXT.parallel).copy()
        vars(CONTEXT.parallel).update(
            tp_size=size, tp_rank=rank, attn_tp_size=size, attn_tp_rank=rank
        )
        self.prefill = made(self.source.args, DisaggregationMode.PREFILL, SERVER)
        self.decode = made(self.target.args, DisaggregationMode.DECODE, SERVER)
        vars(CONTEXT.parallel).update(sizes)
        # What `DecodePreallocQueue` has, of what the hook reads.
        self.transfer_queue = SimpleNamespace(
            enable_deferred_kv_release=False, deferred_kv_release_timeout=30.0
        )

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://{self.address}/health", timeout=5).close()
        except OSError:
            return False
        return True

    # --- what SGLang calls, in its order ----------------------------------------------------------

    def sender(self, req: Any) -> Any:
        """`PrefillBootstrapQueue.create_sender`, with the hook behind it."""
        made = CLASSES[KVClassType.SENDER]
        req.disagg_kv_sender = made(
            mgr=self.prefill, bootstrap_addr=self.address, bootstrap_room=req.bootstrap_room
        )
        plugin._after_sender(True, None, req, 2)
        return req.disagg_kv_sender

    def receiver(self, req: Any) -> Any:
        """`DecodePreallocQueue._create_receiver_and_enqueue`, with the hook behind it, and what
        SGLang asks of the registry."""
        made = CLASSES[KVClassType.RECEIVER]
        receiver = made(
            mgr=self.decode, bootstrap_addr=self.address, bootstrap_room=req.bootstrap_room
        )
        plugin._after_receiver(SimpleNamespace(kv_receiver=receiver), self, req)
        assert receiver.poll() == KVPoll.Bootstrapping
        assert self.decode.try_ensure_parallel_info(self.address)
        receiver.init(0)
        return receiver

    def write_row(self, row: int, room: int, token: int) -> None:
        self.source.metadata.output_ids[row, 0] = token
        self.source.metadata.bootstrap_room[row, 0] = room

    def until_polls(self, poller: Any, status: int) -> None:
        def polled() -> bool:
            self.prefill.pump()
            self.decode.pump()
            return bool(poller.poll() == status)

        until(polled)

    def holds(self, pages: list[int], source: list[int]) -> bool:
        pairs = zip(self.source.buffers, self.target.buffers, strict=True)
        return all((mine[source] == theirs[pages]).all() for mine, theirs in pairs)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        self.decode._heartbeat_shutdown.set()
        if self._owns_registry:
            self.registry.close()


def request(room: int, num_tokens: int = 90, **more: Any) -> Any:
    said = {"cache_salt": None, "output_ids": [], "bootstrap_host": "127.0.0.1", **more}
    tokens = [(7 * i) % 1000 for i in range(num_tokens)]
    return SimpleNamespace(bootstrap_room=room, origin_input_ids=tokens, **said)
