"""Meshes: what a rank holds, who writes to whom, and which pairs are refused."""

from collections import Counter
from itertools import chain, product

import numpy as np
import pytest

from prefixkv.errors import ConfigError, HandshakeError, PageStateError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import (
    MAX_FOLD,
    MAX_RANKS,
    GroupHeads,
    Mesh,
    Shard,
    check_group_heads,
    check_holds,
    check_meshes,
    check_opaque,
    check_page_sizes,
    group_part,
    readers_awaited,
    sent_share,
    sent_shares,
    writers_to,
)
from prefixkv.paging import check_unit_range, unit_pages
from tests.support.mesh_pools import mesh_layout

LAYERS = 5
SMALL = [
    Mesh(LAYERS, heads, tp, pp, stages)
    for heads in (1, 2, 4, 8)
    for tp in (1, 2, 4, 8)
    for pp, stages in ((1, ()), (2, ()), (3, ()), (2, (1, 4)))
]
PAIRS = [(a, b) for a, b in product(SMALL, SMALL) if a.num_kv_heads == b.num_kv_heads]


def held(shard: Shard) -> set[tuple[int, int]]:
    """Every (layer, head) of a shard."""
    return {
        (layer, head)
        for layer in range(shard.first_layer, shard.first_layer + shard.num_layers)
        for head in range(shard.first_head, shard.first_head + shard.num_heads)
    }


def test_each_layer_and_head_is_held_by_as_many_ranks_as_it_has_replicas() -> None:
    for mesh in SMALL:
        mesh.validate()
        count = np.zeros((LAYERS, mesh.num_kv_heads), int)
        for rank in range(mesh.num_ranks):
            for at in held(mesh.shard(rank)):
                count[at] += 1
        assert np.all(count == mesh.replicas)
        assert mesh.replicas == max(1, mesh.tp_size // mesh.num_kv_heads)
        if mesh.stage_layers:
            firsts = range(0, mesh.num_ranks, mesh.tp_size)
            assert tuple(mesh.shard(first).num_layers for first in firsts) == mesh.stage_layers


@pytest.mark.slow
def test_the_writers_of_a_reader_cover_its_shard_once() -> None:
    for writers, readers in PAIRS:
        check_meshes(writers, readers)
        targets: dict[int, list[int]] = {rank: [] for rank in range(writers.num_ranks)}
        for reader in range(readers.num_ranks):
            seen: list[tuple[int, int]] = []
            waits_for = writers_to(writers, readers, reader)
            for writer in waits_for:
                share = sent_share(writers, writer, readers, reader)
                assert share is not None
                assert held(share) <= held(writers.shard(writer))
                seen += held(share)
                targets[writer].append(reader)
            assert len(seen) == len(set(seen))
            assert set(seen) == held(readers.shard(reader))
            assert list(waits_for) == sorted(waits_for)
        assert all(
            readers_awaited(writers, writer, readers) == (tuple(found) or (0,))
            for writer, found in targets.items()
        )


def test_replicas_share_the_readers_out_evenly() -> None:
    for writers, readers in PAIRS:
        if writers.pp_size == readers.pp_size == 1 and writers.replicas <= readers.replicas:
            ranks = range(readers.num_ranks)
            served = Counter(chain(*(writers_to(writers, readers, rank) for rank in ranks)))
            assert len({served[writer] for writer in range(writers.num_ranks)}) == 1


def test_neighbouring_replicas_serve_neighbouring_readers() -> None:
    few, many = Mesh(4, 1, tp_size=2), Mesh(4, 1, tp_size=4)
    assert [writers_to(many, few, reader) for reader in range(2)] == [(0,), (2,)]
    assert [writers_to(few, many, reader) for reader in range(4)] == [(0,), (0,), (1,), (1,)]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (Mesh(0, 8), "num_layers is 0"),
        (Mesh(4, 0), "num_kv_heads is 0"),
        (Mesh(4, 8, 0), "tp_size is 0"),
        (Mesh(4, 8, 1, -1), "pp_size is -1"),
        (Mesh(4, 8, 3), "tp_size is 3, must divide num_kv_heads, 8"),
        (Mesh(4, 8, 12), "tp_size is 12"),
        (Mesh(4, 8, 1, 5), "pp_size is 5, must be at most num_layers, 4"),
        (Mesh(2**20, 1, MAX_RANKS, 2), f"must be at most {MAX_RANKS}"),
        (Mesh(4, 8, 1, 2, (4,)), "stage_layers"),
        (Mesh(4, 8, 1, 2, (4, 0)), "stage_layers"),
        (Mesh(4, 8, 1, 2, (3, 2)), "stage_layers"),
    ],
)
def test_a_lawless_mesh_is_refused_by_its_value(mesh: Mesh, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mesh.validate()
    with pytest.raises(ConfigError, match=message):
        check_meshes(Mesh(4, 8), mesh)


@pytest.mark.parametrize(
    ("theirs", "field", "message"),
    [
        (Mesh(5, 6, 2), "num_layers", "num_layers differs: ours 4, theirs 5"),
        (Mesh(4, 12, 2), "num_kv_heads", "num_kv_heads differs: ours 6, theirs 12"),
        (Mesh(4, 6, 3), "tp_size", "tp_size neither divides the other: ours 2, theirs 3"),
    ],
)
def test_an_impossible_pair_is_refused_with_the_reason(
    theirs: Mesh, field: str, message: str
) -> None:
    with pytest.raises(HandshakeError, match=message) as caught:
        check_meshes(Mesh(4, 6, 2), theirs)
    assert caught.value.field == field


@pytest.mark.parametrize("theirs", [0, -16, 24, 16 * MAX_FOLD * 2])
def test_page_sizes_have_to_have_a_whole_factor_between_them(theirs: int) -> None:
    with pytest.raises(HandshakeError, match="page_size") as caught:
        check_page_sizes(16, theirs)
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == ("page_size", 16, theirs)
    check_page_sizes(16, 16 * MAX_FOLD)
    check_page_sizes(64, 16)


@pytest.mark.parametrize(
    ("theirs", "page_size", "field", "values"),
    [
        (Mesh(4, 8, 2), 32, "page_size", (64, 32)),
        (Mesh(4, 8, 2), 128, "page_size", (64, 128)),
        (Mesh(4, 8, 4), 64, "tp_size", (2, 4)),
        (Mesh(4, 8, 1), 64, "tp_size", (2, 1)),
    ],
)
def test_whole_pages_need_the_same_pages_on_both_sides(
    theirs: Mesh, page_size: int, field: str, values: tuple[int, int]
) -> None:
    """All of these pairs are accepted where a page may be split."""
    ours = Mesh(4, 8, 2)
    check_meshes(ours, theirs)
    check_page_sizes(64, page_size)
    with pytest.raises(HandshakeError, match="must be equal where pages are opaque") as caught:
        check_opaque(ours, 64, theirs, page_size)
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == (field, *values)


def test_whole_pages_may_be_shared_out_over_other_stages() -> None:
    check_opaque(Mesh(4, 8, 2, 2), 64, Mesh(4, 8, 2, 1), 64)
    check_opaque(Mesh(4, 8, 2, 2), 64, Mesh(4, 8, 2, 2, (1, 3)), 64)


W = GroupHeads("w", 2, "mha", is_whole=False)


@pytest.mark.parametrize(
    ("ours", "theirs", "mine", "its", "field", "why"),
    [
        # Equal sizes: each rank's, whatever they are shared out like.
        (Mesh(2, 4, 2), Mesh(2, 4, 2), W, 1, "groups[3].num_kv_heads", "differs"),
        # 4 heads over 2 ranks, and 2 in one.
        (Mesh(2, 4, 2), Mesh(2, 4, 1), W, 2, "groups[3].num_kv_heads", "differs over all ranks"),
        # One head on each of both ranks is one, or two.
        (
            Mesh(2, 4, 2),
            Mesh(2, 4, 1),
            W._replace(num_kv_heads=1),
            1,
            "groups[3].num_kv_heads",
            "differs",
        ),
        # Heads of the group are shared out where those of the first layers are replicas.
        (Mesh(2, 1, 2), Mesh(2, 1, 1), W, 4, "groups[3].num_kv_heads", "differs over all ranks"),
        (Mesh(2, 4, 2), Mesh(2, 4, 1), W._replace(is_whole=True), 4, "tp_size", "'w' are opaque"),
        (Mesh(2, 4, 2), Mesh(2, 4, 1), GroupHeads("w", 1, "mla", False), 1, "tp_size", "one head"),
    ],
)
def test_heads_of_a_group_that_do_not_pair_are_refused_by_name(
    ours: Mesh, theirs: Mesh, mine: GroupHeads, its: int, field: str, why: str
) -> None:
    turned = theirs, mine._replace(num_kv_heads=its), ours, mine.num_kv_heads
    for pair in ((ours, mine, theirs, its), turned):
        with pytest.raises(HandshakeError, match=why) as caught:
            check_group_heads(3, *pair)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("ours", "theirs", "mine", "its"),
    [
        (Mesh(2, 4, 2), Mesh(2, 4, 1), W, 4),
        (Mesh(2, 8, 2), Mesh(2, 8, 1), W, 4),  # fewer than the first layers have
        (Mesh(2, 2, 2), Mesh(2, 2, 4), W, 2),  # replicas, two heads each
        (Mesh(2, 1, 4), Mesh(2, 1, 2), GroupHeads("w", 1, "mla", False), 1),
        (Mesh(2, 4, 2), Mesh(2, 4, 2), W._replace(is_whole=True), 2),
    ],
)
def test_heads_of_a_group_are_cut_as_those_of_the_first_layers(
    ours: Mesh, theirs: Mesh, mine: GroupHeads, its: int
) -> None:
    check_group_heads(0, ours, mine, theirs, its)
    check_group_heads(0, theirs, mine._replace(num_kv_heads=its), ours, mine.num_kv_heads)
    for reader in range(theirs.num_ranks):
        taken: list[int] = []
        for writer, share in sent_shares(ours, theirs, reader).items():
            from_, to = ours.shard(writer), theirs.shard(reader)
            sent = group_part(share.inside(from_), *sized(from_.num_heads, mine.num_kv_heads))
            part = group_part(share.inside(to), *sized(to.num_heads, its))
            assert sent.num_heads == part.num_heads
            taken += range(part.first_head, part.first_head + part.num_heads)
        # Each head that the reader has is written once.
        assert sorted(taken) == list(range(its))


def sized(*heads: int) -> list[KVLayout]:
    return [mesh_layout("layer_major", 2, 4, 2, num)[0] for num in heads]


def test_a_part_that_is_no_whole_number_of_a_group_s_heads_is_refused() -> None:
    with pytest.raises(HandshakeError, match="num_kv_heads cannot be cut as 1 of"):
        group_part(Shard(0, 2, 0, 1), *sized(4, 2))


def test_a_pool_has_to_be_its_ranks_share() -> None:
    layout, _ = mesh_layout("layer_major", 4, 4, 2, 4)
    mesh = Mesh(4, 8, 2, 2)
    check_holds(layout, mesh.shard(3))
    for shard, field in (
        (Mesh(4, 8, 2).shard(0), "layout.num_layers"),
        (Mesh(4, 8, 1, 2).shard(0), "layout.num_kv"),
    ):
        with pytest.raises(HandshakeError, match=field):
            check_holds(layout, shard)


@pytest.mark.parametrize("rank", [-1, 4])
def test_there_is_no_such_rank(rank: int) -> None:
    with pytest.raises(ConfigError, match="must be in"):
        Mesh(4, 8, 2, 2).shard(rank)


# --- unit pages -----------------------------------------------------------------------------------


def test_units_of_pages() -> None:
    pages = np.array([7, 3, 9], np.int32)
    for fold in (1, 2, 4):
        every = [page * fold + unit for page in pages for unit in range(fold)]
        for start, stop in ((0, 3 * fold), (fold, 2 * fold), (1, 3 * fold - 1), (2, 2)):
            units = unit_pages(pages, fold, start, stop)
            assert units.dtype == np.int32
            assert units.tolist() == every[start:stop]


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (-1, 2), (5, 4)])
def test_a_page_count_that_does_not_match_is_never_cut_to_fit(start: int, stop: int) -> None:
    with pytest.raises(PageStateError, match="of 3 pages of 2"):
        unit_pages(np.array([7, 3, 9], np.int32), 2, start, stop)


def test_units_that_an_int32_cannot_name_are_refused() -> None:
    check_unit_range(2**29, 4)
    with pytest.raises(ConfigError, match="int32"):
        check_unit_range(2**29 + 1, 4)
    last = np.array([2**29 - 1], np.int32)
    assert unit_pages(last, 4, 3, 4).tolist() == [2**31 - 1]
    with pytest.raises(ConfigError, match="int32"):
        unit_pages(last + 1, 4, 0, 1)
