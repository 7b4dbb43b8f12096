"""The layers whose pages a stage has: the first layout's, and those of its aligned groups. Pure."""

from __future__ import annotations

from typing import Final

from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Shard, group_part

_WORD_BYTES: Final = 16  # a GPU reads the widest words from such places


def stage_parts(layout: KVLayout, part: Shard) -> list[tuple[KVLayout, Shard]]:
    """Return a part's first layers, then those of each aligned group. Raises HandshakeError as
    `group_part`."""
    aligned = [group.layout for group in layout.aligned]
    return [(layout, part), *((one, group_part(part, layout, one)) for one in aligned)]


def stage_unit_bytes(layout: KVLayout, part: Shard, unit_tokens: int) -> list[int]:
    """Return the bytes of one unit page in a stage, for each of `stage_parts`; in whole words where
    there are several, so that each begins at one."""
    parts = stage_parts(layout, part)
    sizes = [
        of.num_layers * one.slabs_per_layer * unit_tokens * of.num_heads * one.head_bytes
        for one, of in parts
    ]
    return sizes if len(sizes) == 1 else [-(-size // _WORD_BYTES) * _WORD_BYTES for size in sizes]
