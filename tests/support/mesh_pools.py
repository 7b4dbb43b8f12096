"""The KV of a model spread over the ranks of a mesh, element by element; for tests of descriptors
and staging.

Addresses are virtual: a rank's memory is an array of its own, and address `a` is its byte `a -
BASE`. So equal ranks have equal layouts. Everything in a rank's memory that is not KV is a canary:
gaps between regions, padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from prefixkv.memory.kv_layout import KVLayout, Slab
from prefixkv.memory.mesh import Mesh, Shard, sent_share, writers_to

BASE = 1 << 20
HEAD_BYTES = 2
GAP = 24  # bytes around each region

# Dimensions from the widest stride to the narrowest: Layer, Kind (K or V), Page, Token, Head. Each
# index of those before the bar is a region of its own; x is padding.
ORDERS = {
    "layer_major": "L|KPTH",
    "page_major": "|PLKTH",
    "K and V of a page together": "L|PKTH",
    "heads before tokens": "LK|PHT",
    "heads before pages": "LK|HPT",
    "all layers of a token together": "|PTLKH",
    "tokens before pages": "LK|TPH",
    "padded pages": "LK|PxTH",
    "padded tokens": "L|KPTxH",
}
STRIDED = tuple(ORDERS)[2:]

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@cache
def mesh_layout(
    order: str, num_pages: int, page_size: int, num_layers: int, num_heads: int,
    attention: str = "mha", head_bytes: int = HEAD_BYTES, gap: int = GAP,
) -> tuple[KVLayout, int]:  # fmt: skip
    """A layout of that order and the bytes of memory it lies in, canaries included."""
    outer, inner = ORDERS[order].split("|")
    kinds = 2 if attention == "mha" else 1
    counts = {"L": num_layers, "K": kinds, "P": num_pages, "T": page_size, "H": num_heads}
    strides, extent = dict.fromkeys(counts, 0), head_bytes
    for dim in reversed(inner):
        if dim == "x":
            extent += 3 * head_bytes
        else:
            strides[dim] = extent
            extent *= counts[dim]
    bases: dict[tuple[int, int], int] = {}
    at = BASE + gap
    for layer in range(num_layers):
        for kind in range(kinds):
            key = (layer if "L" in outer else 0, kind if "K" in outer else 0)
            if key not in bases:
                bases[key] = at
                at += extent + gap
    slabs = []
    for layer, kind in product(range(num_layers), range(kinds)):
        region = bases[layer if "L" in outer else 0, kind if "K" in outer else 0]
        base = region + layer * strides["L"] + kind * strides["K"]
        slabs.append(Slab(base, strides["P"], strides["T"], strides["H"]))
    layout = KVLayout(
        num_pages=num_pages, page_size=page_size, num_layers=num_layers, num_kv_heads=num_heads,
        head_dim=head_bytes, dtype="uint8", attention=attention,
        order=order if order in ("layer_major", "page_major") else "strided", slabs=tuple(slabs),
        regions=tuple((base, extent) for base in bases.values()),
    )  # fmt: skip
    layout.validate()
    return layout, at - BASE


def moved(layout: KVLayout, address: int) -> KVLayout:
    """The layout of the same memory at a real address instead of `BASE`."""
    shift = address - BASE
    return msgspec.structs.replace(
        layout,
        slabs=tuple(msgspec.structs.replace(slab, base=slab.base + shift) for slab in layout.slabs),
        regions=tuple((start + shift, num_bytes) for start, num_bytes in layout.regions),
    )


def slab_views(layout: KVLayout, memory: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """[page, token, head, byte] of each slab of a rank's memory at `BASE`, or of marks of its
    bytes."""
    shape = layout.num_pages, layout.page_size, layout.num_kv_heads, layout.head_bytes
    return [
        np.lib.stride_tricks.as_strided(
            memory[slab.base - BASE :], shape,
            (slab.page_stride, slab.token_stride, slab.head_stride, 1),
        )
        for slab in layout.slabs
    ]  # fmt: skip


@cache
def elements(layout: KVLayout, pages: tuple[int, ...], stop: int) -> Int64s:
    """Where tokens 0 to `stop` of a request in these pages lie in a rank's memory: [slab, token,
    head, byte]."""
    token = np.arange(stop)
    page, slot = np.array(pages)[token // layout.page_size], token % layout.page_size
    head, byte = np.arange(layout.num_kv_heads)[:, None], np.arange(layout.head_bytes)
    return np.stack([
        (slab.base - BASE + page * slab.page_stride + slot * slab.token_stride)[:, None, None]
        + head * slab.head_stride + byte
        for slab in layout.slabs
    ])  # fmt: skip


@cache
def shards(mesh: Mesh) -> tuple[Shard, ...]:
    """By rank."""
    return tuple(mesh.shard(rank) for rank in range(mesh.num_ranks))


@cache
def routes(writers: Mesh, readers: Mesh, reader: int) -> tuple[tuple[int, Shard, Shard], ...]:
    """(writer, its part, the reader's part), each part in its rank's own numbers."""
    found = []
    for writer in writers_to(writers, readers, reader):
        share = sent_share(writers, writer, readers, reader)
        found.append(
            (writer, share.inside(writers.shard(writer)), share.inside(readers.shard(reader)))
        )
    return tuple(found)


@dataclass
class Side:
    """All ranks of one side, with one request's KV in the same pages of each."""

    mesh: Mesh
    order: str
    page_size: int
    attention: str
    pages: tuple[int, ...]
    layouts: list[KVLayout]
    memory: list[Bytes]

    @classmethod
    def make(
        cls,
        mesh: Mesh,
        order: str,
        page_size: int,
        pages: tuple[int, ...],
        attention: str,
        seed: int,
    ) -> Side:
        """Every byte random, canaries and KV alike."""
        rng = np.random.default_rng(seed)
        made = [
            mesh_layout(
                order, max(pages) + 2, page_size, shard.num_layers, shard.num_heads, attention
            )
            for shard in shards(mesh)
        ]
        memory = [rng.integers(0, 256, num_bytes, np.uint8) for _, num_bytes in made]
        return cls(mesh, order, page_size, attention, pages, [layout for layout, _ in made], memory)

    def put(self, kv: Bytes, start: int, memory: list[Bytes] | None = None) -> None:
        """Write tokens `start`.. of the model's KV, [layer, kind, token, head, byte], where each
        rank holds them."""
        for rank, layout in enumerate(self.layouts):
            shard = shards(self.mesh)[rank]
            layers = slice(shard.first_layer, shard.first_layer + shard.num_layers)
            heads = slice(shard.first_head, shard.first_head + shard.num_heads)
            part = kv[layers, :, start:, heads].reshape(
                len(layout.slabs), -1, shard.num_heads, layout.head_bytes
            )
            at = elements(layout, self.pages, kv.shape[2])[:, start:]
            (self.memory if memory is None else memory)[rank][at] = part
