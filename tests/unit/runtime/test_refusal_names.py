"""A pair that does not fit is refused in the words of the engine whose servers they are, and its
refusal is one line of the log, whatever the number of requests. Over real sockets and NIXL."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from prefixkv.config import DecodeConfig, ModelConfig, PrefillConfig
from prefixkv.engines.sglang import transfer_options as sglang
from prefixkv.engines.vllm import options as vllm
from prefixkv.errors import HandshakeError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.serving import config as serving
from prefixkv.transfer import DecodeTransfers, PrefillTransfers, RoomEnded, prompt_digest
from tests.support.patience import until
from tests.unit.runtime.conftest import QUICK

PLAIN: Mapping[str, str] = {}
NAMES = {
    "vllm": vllm.OPTION_NAMES,
    "sglang": sglang.OPTION_NAMES,
    "serving": serving.OPTION_NAMES,
    "plain": PLAIN,
}
TAG = "vllm=0.32.0 kernels=CPU_ATTN layout=LBHNC kv_cache_dtype=auto dtype=float32 instructions=amx"


def pool(page_size: int = 8, tag: str = "", dtype: str = "float32", num_heads: int = 1) -> KVPool:
    if tag:
        memory = [torch.zeros(16, page_size * num_heads * 4)]
        axes = "page", "packed"
        return KVPool.from_tensors(
            memory, page_size=page_size, axes=axes, num_kv_heads=num_heads, opaque=tag
        )
    return KVPool.create(16, page_size, 1, 2, 4, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize(
    ("ours", "theirs", "field", "engine"),
    [
        ({"page_size": 8}, {"page_size": 12}, "page_size",
         {"vllm": "--block-size", "sglang": "--page-size", "serving": "--page-size"}),
        ({"tag": "t"}, {"tag": "t", "page_size": 16}, "page_size",
         {"vllm": "--block-size", "sglang": "--page-size", "serving": "--page-size"}),
        ({}, {"dtype": "bfloat16"}, "dtype",
         {"vllm": "--kv-cache-dtype, or --dtype", "sglang": "--kv-cache-dtype, or --dtype",
          "serving": "--dtype, or --model"}),
        ({"tag": TAG}, {"tag": TAG.replace("32", "64")}, "opaque",
         {"vllm": "the version of vLLM, --dtype",
          "sglang": "--kv-cache-dtype, --attention-backend, or --model-path"}),
        ({"tag": TAG}, {"tag": TAG.replace("auto", "fp8").replace("LBHNC", "BLHNC")}, "opaque",
         {"vllm": "VLLM_KV_CACHE_LAYOUT, --kv-cache-dtype",
          "sglang": "--kv-cache-dtype, --attention-backend, or --model-path"}),
    ],
)  # fmt: skip
def test_a_refusal_names_the_engine_s_option_and_is_logged_once(
    names: str,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    field: str,
    engine: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    model = ModelConfig("m", option_names=NAMES[names])
    with ExitStack() as stack:
        pools = pool(**ours), pool(**theirs)
        config = PrefillConfig(model=model, control=QUICK)
        prefill = stack.enter_context(PrefillTransfers(pools[0], config))
        decode = stack.enter_context(
            DecodeTransfers(pools[1], DecodeConfig(model=model, control=QUICK))
        )
        errors = [_refused(decode, prefill.endpoint, room) for room in range(1, 6)]
        option = engine.get(names, "")
        begins = f"{field} ({option}) " if option else f"{field} "
        for error in errors:
            assert isinstance(error, HandshakeError)
            assert (error.field, error.option) == (field, option)
            assert str(error).startswith(begins)
        until(lambda: prefill.stats()["handshakes_refused"] >= 5)
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if line.startswith("decode-0: refused: ")]) == 1
    assert len([line for line in lines if line.startswith("prefill-0: refused: ")]) == 1
    assert sum(begins in line for line in lines) == 2, "each side says it once"


def _refused(decode: DecodeTransfers, prefill: str, room: int) -> Exception | None:
    page_size = decode._page_size
    digest = prompt_digest(range(page_size))
    decode.open(room, 0, page_size, 0, [room], prefill, digest)
    ended: list[RoomEnded] = []

    def over() -> bool:
        ended.extend(one for one in decode.take_events() if isinstance(one, RoomEnded))
        return bool(ended)

    until(over)
    return ended[0].error
