"""Pools of several groups of layers: described as one, or refused by the name of what does not
fit."""

from __future__ import annotations

import msgspec
import pytest
import torch

from prefixkv.errors import ConfigError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.kv_pool import KVPool, PoolGroup


def pool(num_pages: int = 8, page_size: int = 4, heads: int = 2, dim: int = 8) -> KVPool:
    return KVPool.create(num_pages, page_size, 2, heads, dim)


def grouped() -> KVPool:
    draft = pool(heads=1, dim=4)
    return pool().with_groups(PoolGroup("last", pool(5, heads=4), 9), PoolGroup("draft", draft))


def test_a_pool_of_groups_describes_all_of_its_memory() -> None:
    made = grouped()
    layout = made.layout
    assert [group.name for group in layout.windows] == ["last"]
    assert [group.name for group in layout.aligned] == ["draft"]
    assert layout.num_pages == 8
    assert layout.windows[0].layout.num_pages == 5
    for group in made.groups:
        assert set(group.pool.layout.regions) <= set(layout.regions)
    assert made.group("last").layout.num_kv_heads == 4
    with pytest.raises(KeyError):
        made.group("none")


def test_a_layout_with_groups_travels_whole_and_one_without_costs_no_byte() -> None:
    plain, layout = pool().layout, grouped().layout
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KVLayout) == layout
    assert b"groups" not in msgspec.msgpack.encode(plain)
    layout.validate()


def one_arena(gap: int) -> tuple[KVPool, KVPool]:
    """Two pools in one storage, the second `gap` bytes behind the first one's begin."""
    arena = torch.zeros(4096, dtype=torch.uint8)
    views = [arena[at : at + 256].view(4, 4, 2, 8) for at in (0, 1024)]
    others = [arena[at : at + 256].view(4, 4, 2, 8) for at in (gap, 1024 + gap)]
    return KVPool.from_tensors(views[:1], views[1:]), KVPool.from_tensors(others[:1], others[1:])


def test_groups_may_lie_in_one_arena() -> None:
    first, second = one_arena(256)
    made = first.with_groups(PoolGroup("last", second, 9))
    assert len(made.layout.regions) == 1


def test_a_group_in_the_first_group_s_memory_has_all_of_its_pages() -> None:
    first = pool()
    layout = first.with_groups(PoolGroup("w", first, 9)).layout
    (window,) = layout.groups
    fewer = msgspec.structs.replace(window.layout, num_pages=7)
    group = msgspec.structs.replace(window, layout=fewer)
    with pytest.raises(ConfigError, match="as many pages, 8"):
        msgspec.structs.replace(layout, groups=(group,)).validate()


def test_a_peer_s_group_outside_the_pool_s_regions_is_refused() -> None:
    # All are kept: memory that was given back may be another pool's next.
    here, other, far = grouped(), pool(), pool(5, heads=4)
    layout = here.layout
    (last, draft) = layout.groups
    elsewhere = msgspec.structs.replace(layout, regions=other.layout.regions)
    with pytest.raises(ConfigError):
        elsewhere.validate()
    mine = msgspec.structs.replace(last, layout=far.layout)
    with pytest.raises(ConfigError, match=r"its region is .* not inside one region"):
        msgspec.structs.replace(layout, groups=(mine, draft)).validate()
