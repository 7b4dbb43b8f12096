"""`NodePair` of workers of any two meshes in one process, over real transports: plain ones, ones
whose model keeps windows, and ones with extra state (`state_workers`)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from prefixkv import DecodeConfig, KVPool, Mesh, PoolGroup, PrefillConfig
from prefixkv.memory.axes import SLAB_AXES
from prefixkv.spi import DecodeGroup, PrefillGroup
from tests.support.devices import DEVICE
from tests.support.node_pair import DecodeDriver, NodePair, PrefillDriver, RankKV, Tokens
from tests.support.patterns import make_pools


def opaque_pool(pool: KVPool, tag: str) -> KVPool:
    """The same memory, whose pages move whole from now on."""
    k, v = ([kind(layer) for layer in range(pool.layout.num_layers)] for kind in (pool.k, pool.v))
    page_size = pool.layout.page_size
    return KVPool.from_tensors(k, v, page_size=page_size, axes=SLAB_AXES, opaque=tag)


class GroupPair(NodePair):
    """Pools, meshes and `states` are prefill's and decode's; `heads` are those of the pools'
    groups, over all ranks. Closes what it made."""

    prefill_driver: type[Any] = PrefillDriver
    decode_driver: type[Any] = DecodeDriver

    def __init__(
        self, pools: Sequence[list[KVPool]], meshes: tuple[Mesh, Mesh],
        prefill: PrefillConfig, decode: DecodeConfig, *, heads: Sequence[int] = (),
        chunk: int = 12, router: bool = False, states: Sequence[list[Any]] = ((), ()),
    ) -> None:  # fmt: skip
        self.prefill_pools, self.decode_pools = pools
        p_ranks, d_ranks = (
            [
                RankKV(pool, [mesh, *(replace(mesh, num_kv_heads=num) for num in heads)], rank)
                for rank, pool in enumerate(side)
            ]
            for side, mesh in zip(pools, meshes, strict=True)
        )
        first = PrefillGroup(pools[0], prefill, meshes[0], states[0])
        try:
            second = DecodeGroup(pools[1], decode, meshes[1], states[1])
        except BaseException:
            first.close()
            raise
        p = self.prefill_driver(first, chunk, p_ranks, router)
        ask = partial(p.add, decode=second.peer_id.name)
        super().__init__(second, first, p, self.decode_driver(second, ask, d_ranks))

    def serve(self, room: int, prompts: dict[str, Tokens]) -> None:
        """Requests side by side, from this room on, to their ends on both sides. Each answers one
        token, or is among the failed."""
        for number, (rid, tokens) in enumerate(prompts.items()):
            self.submit(rid, tokens, 1, room=room + number)
        self.run(*prompts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.decode.close()
        finally:
            self.prefill.close()


class MeshPair(GroupPair):
    def __init__(
        self, prefill: Mesh, decode: Mesh, *, attention: str = "mha",
        orders: tuple[str, str] = ("layer_major",) * 2, page_sizes: tuple[int, int] = (4, 4),
        num_pages: int = 64, head_dim: int = 16, chunk: int = 12, device: str = DEVICE,
        prefill_config: PrefillConfig | None = None, decode_config: DecodeConfig | None = None,
        opaque: str = "", **more: Any,
    ) -> None:  # fmt: skip
        """`opaque` is the tag of all pools."""
        shared = decode_config is not None and decode_config.transport.backend != "nixl"
        pools = [
            make_pools(
                side, num_pages, page_size, head_dim,
                attention=attention, order=order, device=device, shared=shared,
            )
            for side, page_size, order in zip((prefill, decode), page_sizes, orders, strict=True)
        ]  # fmt: skip
        if opaque:
            pools = [[opaque_pool(pool, opaque) for pool in side] for side in pools]
        config = replace(decode_config or DecodeConfig(), reserve_tokens=8)
        what = pools, (prefill, decode), prefill_config or PrefillConfig(), config
        super().__init__(*what, chunk=chunk, **more)


WINDOW = 10


class WindowPair(GroupPair):
    """A model with layers of three kinds: one keeps every token, one the last `window`, and a draft
    has the first one's pages. `heads`: of the three, over all ranks."""

    def __init__(
        self, *, decode: tuple[int, int] = (64, 16), prefill: tuple[int, int] = (64, 24),
        checkpoints: int = 4, window: int = WINDOW, chunk: int = 8, shared: bool = False,
        decode_config: DecodeConfig | None = None, prefill_config: PrefillConfig | None = None,
        tp_sizes: tuple[int, int] = (1, 1), heads: tuple[int, int, int] = (1, 2, 3),
    ) -> None:  # fmt: skip
        meshes = Mesh(1, heads[0], tp_sizes[0]), Mesh(1, heads[0], tp_sizes[1])
        options = {"dtype": "uint8", "attention": "mha", "shared": shared}

        def pools(mesh: Mesh, pages: tuple[int, int], step_tokens: int) -> list[KVPool]:
            of_layers = (
                make_pools(replace(mesh, num_kv_heads=num), count, 4, 8, **options)
                for num, count in zip(heads, (*pages, pages[0]), strict=True)
            )
            return [
                full.with_groups(
                    PoolGroup("sliding", last, window, step_tokens), PoolGroup("draft", draft)
                )
                for full, last, draft in zip(*of_layers, strict=True)
            ]

        made = pools(meshes[0], prefill, chunk), pools(meshes[1], decode, 1)
        configs = (
            prefill_config or PrefillConfig(checkpoints=checkpoints),
            decode_config or DecodeConfig(reserve_tokens=0),
        )
        super().__init__(made, meshes, *configs, heads=heads[1:], chunk=chunk, router=True)

    def talk(self, rid: str, tokens: list[int], num_tokens: int = 6) -> list[int]:
        """A whole request; returns prompt and answer."""
        self.submit(rid, tokens, num_tokens)
        self.run(rid)
        return tokens + self.d.outputs[rid]
