"""Pools, layouts of tensors, groups and buffers that cannot be: each is refused by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from prefixkv import KVPool, PoolGroup, StatePool, StateTensor, shared_bytes
from prefixkv.errors import CapacityError, ConfigError, PageStateError
from prefixkv.memory import host_pool
from prefixkv.memory.host_pool import HostPool
from prefixkv.memory.kv_layout import BLOCK_BYTES
from prefixkv.memory.mesh import Mesh, Shard
from prefixkv.memory.page_copy import page_copy
from prefixkv.memory.stage_plan import StagePlan
from prefixkv.runtime.staging import RelayBuffer
from tests.support.engine_tensors import DIM, HEADS, LAYERS, PAGES, TOKENS
from tests.support.mesh_pools import mesh_layout
from tests.support.state_memory import TENSORS
from tests.unit.memory.test_kv_pool import SAID, VLLM, blocks, grouped, one_arena, pool, tensors

Shape = tuple[int, ...]
SHAPE: Shape = (PAGES, TOKENS, HEADS, DIM)
K = ("page", "token", "head", "dim")
KV = ("page", "kv", "token", "head", "dim")
PACKED = ("page", "head", "dim", "packed")


def of(k: Any, v: Any = None, **said: Any) -> KVPool:
    return KVPool.from_tensors(k, v, **said)


def zeros(shape: Shape = SHAPE, dtype: Any = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype)]


def named(axes: tuple[str, ...] = K, **said: Any) -> KVPool:
    """K and V apart, tensors with these axes."""
    return of(tensors(axes), tensors(axes), **said)


def k_as(*axes: str, **said: Any) -> KVPool:
    """The same tensors, whose axes are said to be these."""
    return of(tensors(K), tensors(K), axes=axes, **said)


def opaque(**said: Any) -> KVPool:
    return of(blocks(), **{"page_size": TOKENS, "axes": VLLM, "opaque": "amx", **said})


def with_gaps(axes: tuple[str, ...], row: int, padded: int) -> KVPool:
    layers = [layer[..., :row] for layer in tensors(axes, packed=padded)]
    return of(layers, page_size=TOKENS, axes=axes, opaque="amx")


def arrays(change: Callable[[Any], Any] = lambda one: one, dtype: Any = np.float32) -> KVPool:
    """An engine's numpy arrays."""
    changed = change(np.zeros((8, 4, 2, 16), dtype))
    return of([changed], [changed])


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def make(**sizes: Any) -> KVPool:
    most = {"num_pages": PAGES, "page_size": TOKENS, "num_layers": LAYERS, "num_kv_heads": HEADS}
    return KVPool.create(**{**most, "head_dim": DIM, **sizes})


def wrote(change: Callable[[Any], Any], pages: Any = (0, 1)) -> None:
    made = make()
    made.write_pages(pages, change(made.read_pages([0, 1])))


def state(tensor: StateTensor) -> StatePool:
    return StatePool.create([tensor], 2, Mesh(2, 4, 2))


def of_views(change: Callable[[Any], Any], only: str = "") -> StatePool:
    """A pool of an engine's views, which are changed, or those of one tensor."""
    right = StatePool.create(TENSORS, 3, Mesh(2, 4, 2), rank=1)
    views = [
        change(right.view(one.name, one.layer)) if only in ("", one.name)
        else right.view(one.name, one.layer)
        for one in TENSORS
    ]  # fmt: skip
    return StatePool(TENSORS, views, Mesh(2, 4, 2), 1)


def host(num_pages: int = 1, *more: Any) -> HostPool:
    return HostPool(pool().layout, num_pages, *more)


def plan(part: Shard, unit_tokens: int = 4) -> StagePlan:
    return StagePlan.of(mesh_layout("layer_major", 7, 4, 3, 4)[0], part, unit_tokens)


def overlapping() -> KVPool:
    first, second = one_arena(128)
    return first.with_groups(PoolGroup("a", second, 9))


ALL = Shard(0, 3, 0, 4)
LAST = pool()
group = PoolGroup
REFUSED: list[tuple[Callable[[], Any], str]] = [
    # Axes by their names.
    (lambda: named(page_size=HEADS), r'page_size is 2, but axis 1 \("token"\) has 4'),
    (lambda: named(num_kv_heads=8), r'num_kv_heads is 8, but axis 2 \("head"\) has 2'),
    (lambda: named(head_dim=2 * DIM), r'head_dim is 16, but axis 3 \("dim"\) has 8'),
    (lambda: k_as("page", "head", "token", "dim", **SAID), r"page_size is 4, but axis 2"),
    (lambda: k_as("dim", "head", "token", "page"),
     'slab 0 has a stride of 64 in its axis "dim"'),
    (lambda: k_as(*K[:3]), r"axes are .*, must be page, token, head, d"),
    (lambda: k_as(*K[:3], "head"), "must be different ones of page"),
    (lambda: k_as("block", *K[1:]), "must be different ones of page"),
    (lambda: k_as(*K[:3], "packed"), "must be page, token, head, d"),
    (lambda: k_as("kv", *K), "with k and v apart no tensor has an axi"),
    (lambda: named(K[:3]), "the tensors have 3 dimensions, must have 4: page, token, head, dim"),
    (lambda: of(tensors(KV, kv=3), axes=KV), r'K and V is 2, but axis 1 \("kv"\) has 3'),
    (lambda: of(tensors(K, head=1), axes=K),
     'must be page, token, dim in any order, since v is missing: give v, or an axis "kv"'),
    # Opaque pages.
    *[
        (lambda heads=heads: opaque(num_kv_heads=heads, page_size=HEADS,  # type: ignore[misc]
                                    axes=("page", "token", "dim", "packed")),
         f"num_kv_heads is {heads}, must be in")
        for heads in (0, -1)
    ],
    (lambda: opaque(page_size=2 * TOKENS), r'page_size is 8, but axis 2 \("token"\) has 4'),
    (lambda: opaque(num_kv_heads=1), r'num_kv_heads is 1, but axis 1 \("head"\) has 2'),
    (lambda: opaque(head_dim=DIM), "has 128 elements, must have 8 for each of 4 tokens and 2 he"),
    (lambda: opaque(page_size=None), 'opaque pages need page_size and axes, among them "page"'),
    (lambda: opaque(axes=None), "opaque pages need page_size and axes"),
    (lambda: opaque(axes=("token", "head", "dim", "packed")), 'axes, among them "page"'),
    (lambda: opaque(axes=("page", "packed")), "the tensors have 4 dimensions, must have 2: page"),
    (lambda: opaque(axes=("head", "page", "token", "dim")), r"page_size is 4, but axis 2|stride"),
    (lambda: opaque(opaque=True), "opaque is True, must be a str, the name of the format"),
    (lambda: opaque(opaque=""), "must be page, token, dim in any order"),
    (lambda: opaque(page_size=3, axes=PACKED),
     "has 128 elements, must have equally many for each of 3 tokens and 2 heads"),
    (lambda: opaque(page_size=0, axes=PACKED), r"page_size is 0, must be in \[1"),
    (lambda: with_gaps(VLLM, DIM, 2 * DIM),
     'slab 0 has a stride of 16 in its axis "token", must be 8: an opaque page is one run'),
    (lambda: with_gaps(("head", "page", "token", "packed"), 2 * DIM, 2 * DIM),
     'slab 0 has a stride of 320 in its axis "head", must'),
    (lambda: with_gaps(("page", "head", "token", "kv", "packed"), DIM, DIM),
     'slab 0 has a stride of 16 in its axis "token"'),
    # Tensors that are no pool.
    (lambda: of([], []), "no layers"),
    (lambda: of(zeros(), []), "1 layers of k and 0 of v"),
    (lambda: of(zeros()), "must have 3: page, token, dim, since v is missing: give v"),
    (lambda: of(zeros(), zeros(SHAPE[1:])), "tensor 1 has shape"),
    (lambda: of(zeros(), zeros((PAGES + 1, *SHAPE[1:]))), "tensor 1 has shape"),
    (lambda: of(zeros(), zeros(dtype=torch.float16)), "tensor 1 has dtype torch.float16"),
    (lambda: of(zeros(dtype=torch.float64), zeros(dtype=torch.float64)), "dtype is 'float64'"),
    (lambda: of([zeros(SHAPE[::-1])[0].permute(3, 2, 1, 0)], zeros()), "slab 0 has a stride of"),
    (lambda: of(zeros(), [zeros((1, *SHAPE[1:]))[0].expand(SHAPE)]), "slab 1 has a stride of 0"),
    (lambda: of(zeros((0, *SHAPE[1:])), zeros((0, *SHAPE[1:]))), "num_pages is 0"),
    (lambda: of(zeros(), [zeros()[0].to("meta")]), "tensor 1 has device meta, tensor 0 has cpu"),
    (lambda: of([zeros()[0].to("meta")], [zeros()[0].to("meta")]), "device is 'meta'"),
    (lambda: arrays(read_only), "must not be written"),
    (lambda: arrays(dtype=">f4"), "numpy array of >f4"),
    (lambda: arrays(lambda one: one[::-1]), "numpy array of float32"),
    (lambda: arrays(np.ma.masked_array), "MaskedArray, a torch tensor"),
    (lambda: arrays(dtype=np.float64), "dtype"),
    (lambda: arrays(dtype=object), "numpy array of object"),
    (lambda: arrays(lambda _: torch.zeros(SHAPE).to_sparse()), "sparse"),
    (lambda: arrays(lambda one: one.tolist()), "list, a torch tensor"),
    (lambda: arrays(lambda _: 7), "int, a torch tensor"),
    # Pools of our own.
    (lambda: make(num_pages=0), "num_pages is 0"),
    (lambda: make(head_dim=-1), "head_dim is -1"),
    (lambda: make(dtype="int8"), "dtype is 'int8'"),
    (lambda: make(attention="mla"), "num_kv_heads is 2"),
    (lambda: make(order="strided"), "order is 'strided'"),
    (lambda: make(device="meta"), "device is 'meta'"),
    (lambda: make(device="gpu"), "device is 'gpu'"),
    (lambda: make(device="cuda:900"), "device is 'cuda:900', torch .* finds [0-9]+ GPUs"),
    (lambda: make(device=None), "device is None"),
    (lambda: make(device="cuda", shared=True), "cpu"),
    (lambda: make(attention="mla", num_kv_heads=1).v(0), "kv is 1"),
    (lambda: make().latent(0), "only mla"),
    (lambda: make().k(3), "layer is 3"),
    *[(lambda change=change: wrote(change), r"data is .* must be torch.uint8")  # type: ignore[misc]
      for change in (lambda one: one[:1], lambda one: one[..., :-1],
                     lambda one: one.view(torch.int8))],
    # Groups.
    *[(lambda one=one: pool().with_groups(*one), why) for one, why in (  # type: ignore[misc]
        ((group("", pool()),), "1 to 64 characters"),
        ((group("x" * 65, pool()),), "1 to 64 characters"),
        ((group("w", pool(page_size=8), 9),), "page_size is 8, that of the first group is 4"),
        ((group("d", pool(7)),), "num_pages is 7, that of the first group is 8"),
        ((group("w", pool(), -1),), "window of group 'w'"),
        ((group("w", pool(), 9, 0),), "step_tokens of group 'w'"),
        ((group("w", None, 9),), "pool of group 'w'"),  # type: ignore[arg-type]
        ((group("w", grouped(), 9),), "has groups of its own"),
        (("w",), "a group is a str"),
        ((group("a", pool(), 9), group("a", pool())), "a name of its own"),
        ((group("a", LAST, 9), group("b", LAST, 9)), "share memory"),
    )],
    (overlapping, "share memory"),
    # Extra state.
    (lambda: state(StateTensor("a", 2, 1, (1,))), "layer is 2"),
    (lambda: state(StateTensor("a", -1, 1, (1,))), "layer is -1"),
    (lambda: state(StateTensor("a", 0, 0, (1,))), "num_heads is 0"),
    (lambda: state(StateTensor("a", 0, 1, (0,))), "head_shape is 0"),
    (lambda: state(StateTensor("a", 0, 1, (2**31,))), "head_shape is 2147483648"),
    (lambda: state(StateTensor("a", 0, 1, (1,), "int3")), "dtype is 'int3'"),
    (lambda: state(StateTensor("a", 0, 3, (1,))), "tp_size is 2"),
    (lambda: StatePool(TENSORS, zeros(), Mesh(2, 4, 2), 1), "1 state views"),
    (lambda: of_views(lambda one: one.to("meta"), "tail"), "state views are on .* must be on one"),
    (lambda: of_views(lambda one: one[:, :1]), "must be torch.float16"),
    (lambda: of_views(lambda one: one.transpose(1, -1)), "must be torch.float16"),
    (lambda: of_views(lambda one: one[:2], "tail"), "tail"),
    (lambda: StatePool.create([TENSORS[0], TENSORS[0]], 2), "same name"),
    (lambda: StatePool.create(TENSORS, 0), "num_slots is 0"),
    # Shared memory, staging, host memory.
    (lambda: shared_bytes(0), "num_bytes"),
    (lambda: shared_bytes(-1), "num_bytes"),
    *[(lambda at=at: RelayBuffer(BLOCK_BYTES, BLOCK_BYTES).slice(*at),  # type: ignore[misc]
       "of a staging area of 4096")
      for at in ((-1, 1), (0, -1), (0, BLOCK_BYTES + 1), (BLOCK_BYTES, 1))],
    *[(lambda sizes=sizes: RelayBuffer(*sizes), "_bytes") for sizes in (  # type: ignore[misc]
        (0, 0), (100, 100), (BLOCK_BYTES, 2 * BLOCK_BYTES))],
    (lambda: plan(Shard(0, 4, 0, 4)), "not inside"),
    (lambda: plan(Shard(0, 3, 1, 4)), "not inside"),
    (lambda: plan(Shard(-1, 2, 0, 4)), "not inside"),
    (lambda: plan(ALL, 3), "must divide"),
    (lambda: plan(ALL, 8), "must divide"),
    (lambda: plan(ALL, 0), "must divide"),
    (lambda: host(0, "cpu", 1), "num_pages is 0"),
    (lambda: host(1, "cpu", 0), "chunk_bytes is 0"),
    (lambda: host(1, "meta", 1), "device is 'meta'"),
    (lambda: page_copy(pool().layout, host(), "meta"), "device is 'meta'"),
]  # fmt: skip


@pytest.mark.parametrize(("make_it", "why"), REFUSED, ids=[f"{at}" for at in range(len(REFUSED))])
def test_it_is_refused_by_name(make_it: Callable[[], Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_it()


@pytest.mark.parametrize("page", [-1, PAGES])
def test_pages_outside_the_pool_are_neither_read_nor_written(page: int) -> None:
    for call in (lambda: make().read_pages([0, page]), lambda: wrote(lambda one: one, [0, page])):
        with pytest.raises(PageStateError, match=f"page {page} is not in"):
            call()


@pytest.mark.parametrize(
    ("make_it", "why"),
    [
        (lambda: make(num_pages=2**31 - 1, page_size=2**20), "do not fit on cpu"),
        (lambda: RelayBuffer(1 << 60, BLOCK_BYTES), "do not fit on cpu"),
        (lambda: host_pool._host_bytes(1 << 60, "cpu"), "bytes of host memory"),
    ],
)
def test_more_than_the_machine_has_is_a_lack_of_room(make_it: Callable[[], Any], why: str) -> None:
    with pytest.raises(CapacityError, match=why):
        make_it()
