"""The layers whose pages a stage has: those of the pool's first layout, and of its aligned groups,
which have the same page ids. Pure."""

from __future__ import annotations

from typing import Final

from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Shard, group_part

_WORD_BYTES: Final = 16  # a GPU reads the widest words from such places


def stage_parts(layout: KVLayout, part: Shard) -> list[tuple[KVLayout, Shard]]:
    """Return what a stage has of a part of a pool: of the first layers, then of each aligned group,
    whose pages have the same ids. Raises HandshakeError as `group_part`."""
    aligned = [group.layout for group in layout.aligned]
    return [(layout, part), *((one, group_part(part, layout, one)) for one in aligned)]


def stage_unit_bytes(layout: KVLayout, part: Shard, unit_tokens: int) -> list[int]:
    """Return the bytes that one unit page takes in a stage of each of `stage_parts`; in whole words
    where there are several, so that each begins at one, however many units there are."""
    parts = stage_parts(layout, part)
    sizes = [
        of.num_layers * one.slabs_per_layer * unit_tokens * of.num_heads * one.head_bytes
        for one, of in parts
    ]
    return sizes if len(sizes) == 1 else [-(-size // _WORD_BYTES) * _WORD_BYTES for size in sizes]
