"""Two workers that do not fit say what differs: the first field that does, by name, and the option
of their engine that sets it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefixkv.config import ModelConfig
from prefixkv.control.handshake import check_pair, named
from prefixkv.engines.sglang.transfer_options import OPTION_NAMES as SGLANG
from prefixkv.engines.vllm.options import OPTION_NAMES as VLLM
from prefixkv.errors import HandshakeError
from prefixkv.memory.kv_pool import KVPool, PoolGroup
from prefixkv.memory.state_layout import StateTensor
from prefixkv.memory.state_pool import StatePool
from prefixkv.runtime.rank_spec import RankSpec
from prefixkv.serving.config import OPTION_NAMES as SERVING
from tests.support.node_pair import make_pool
from tests.support.state_memory import SHARDED, TENSORS


def grouped(window: int = 10, heads: int = 2, name: str = "sliding", **sizes: Any) -> KVPool:
    of = {"num_pages": 8, "page_size": 4, "num_layers": 1, "num_kv_heads": 1, "head_dim": 8}
    full = KVPool.create(**(of | sizes))
    last = KVPool.create(**(of | sizes | {"num_kv_heads": heads, "num_pages": 12}))
    return full.with_groups(PoolGroup(name, last, window, 4))


def plain(**sizes: Any) -> tuple[RankSpec, ModelConfig]:
    return RankSpec(make_pool(device="cpu", **sizes)), ModelConfig()


def model(**named: Any) -> tuple[RankSpec, ModelConfig]:
    return plain()[0], ModelConfig(**named)


def groups(**changes: Any) -> tuple[RankSpec, ModelConfig]:
    return RankSpec(grouped(**changes)), ModelConfig()


def states(*tensors: StateTensor) -> tuple[RankSpec, ModelConfig]:
    state = StatePool.create(tensors, 2) if tensors else None
    pool = make_pool(num_layers=4, num_kv_heads=4, device="cpu")
    return RankSpec(pool, state=state), ModelConfig()


def tail(*what: Any) -> tuple[RankSpec, ModelConfig]:
    return states(SHARDED, StateTensor("tail", *what), *TENSORS[2:])


@pytest.mark.parametrize(
    ("ours", "theirs", "field"),
    [
        (plain(), plain(dtype="float16"), "dtype"),
        (plain(), plain(attention="mla", num_kv_heads=1), "attention"),
        (plain(), plain(num_layers=3), "num_layers"),
        (plain(), plain(num_kv_heads=4), "num_kv_heads"),
        (plain(), plain(head_dim=8), "head_dim"),
        (plain(), plain(page_size=6), "page_size"),
        (plain(), model(model="other"), "model"),
        (plain(), model(kv_scales="per-head"), "kv_scales"),
        (groups(), groups(window=9), "groups[0].window"),
        (groups(), groups(heads=4), "groups[0].num_kv_heads"),
        (groups(), groups(name="other"), "groups[0].name"),
        (groups(), groups(window=0, num_pages=12), "groups[0].window"),
        (groups(), groups(page_size=8), "page_size"),
        (groups(), (RankSpec(KVPool.create(8, 4, 1, 1, 8)), ModelConfig()), "groups[0]"),
        (states(*TENSORS), states(), "state[0]"),
        (states(*TENSORS), states(*TENSORS, StateTensor("more", 0, 1, (1,))), "state[4]"),
        (
            states(*TENSORS),
            states(StateTensor("other", 0, 4, (3, 5), "float16"), *TENSORS[1:]),
            "state[0].name",
        ),
        (states(*TENSORS), tail(0, 1, (40,), "uint8"), "state[1].layer"),
        (states(*TENSORS), tail(1, 2, (20,), "uint8"), "state[1].num_heads"),
        (states(*TENSORS), tail(1, 1, (20, 2), "uint8"), "state[1].head_shape"),
        (
            states(*TENSORS),
            states(StateTensor("conv", 0, 4, (3, 5), "bfloat16"), *TENSORS[1:]),
            "state[0].dtype",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_workers_that_do_not_fit_say_what_differs(ours: Any, theirs: Any, field: str) -> None:
    told = [(spec.digest(config), spec.topology) for spec, config in (ours, theirs)]
    for one, other in (told, told[::-1]):
        with pytest.raises(HandshakeError) as caught:
            check_pair(*one, *other)
        assert caught.value.field == field


TAG = "vllm=0.32.0 kernels=CPU_ATTN layout=LBHNC kv_cache_dtype=auto dtype=float32 instructions=amx"
DTYPES = "--kv-cache-dtype, or --dtype"
SGLANG_KV = "--kv-cache-dtype, --attention-backend, or --model-path"


def opaque(tag: str) -> tuple[RankSpec, ModelConfig]:
    memory = [torch.zeros(16, 8 * 4)]
    axes = "page", "packed"
    pool = KVPool.from_tensors(memory, page_size=8, axes=axes, num_kv_heads=1, opaque=tag)
    return RankSpec(pool), ModelConfig()


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (plain(), plain(page_size=6), ("--block-size", "--page-size", "--page-size")),
        (plain(), plain(dtype="float16"), (DTYPES, DTYPES, "--dtype, or --model")),
        (opaque(TAG), opaque(TAG.replace("32", "64")),
         ("the version of vLLM, --dtype", SGLANG_KV, "")),
        (opaque(TAG), opaque(TAG.replace("auto", "fp8").replace("LBHNC", "BLHNC")),
         ("VLLM_KV_CACHE_LAYOUT, --kv-cache-dtype", SGLANG_KV, "")),
    ],
)  # fmt: skip
def test_a_refusal_names_the_engine_s_option(ours: Any, theirs: Any, options: Any) -> None:
    told = [
        part for spec, config in (ours, theirs) for part in (spec.digest(config), spec.topology)
    ]
    with pytest.raises(HandshakeError) as caught:
        check_pair(*told)
    field = caught.value.field
    for names, option in zip((VLLM, SGLANG, SERVING, {}), (*options, ""), strict=True):
        error: Any = named(caught.value, names)
        assert (error.field, error.option) == (field, option)
        assert str(error).startswith(f"{field} ({option}) " if option else f"{field} ")
