"""Two workers that do not fit say what differs: the first field that does, by name."""

from __future__ import annotations

from typing import Any

import pytest

from prefixkv.config import ModelConfig
from prefixkv.control.handshake import check_pair
from prefixkv.errors import HandshakeError
from prefixkv.memory.kv_pool import KVPool, PoolGroup
from prefixkv.memory.state_layout import StateTensor
from prefixkv.memory.state_pool import StatePool
from prefixkv.runtime.rank_spec import RankSpec
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
