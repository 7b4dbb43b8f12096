"""What NIXL makes of our runs: it merges contiguous pages where both layouts allow, also of unequal
sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import prefixkv.transport.nixl.loop  # noqa: F401  (sets up logging before nixl is loaded)
from prefixkv.memory.mesh import Shard
from prefixkv.paging import unit_pages
from prefixkv.transport.runs import Part, paired_runs, part_indices
from tests.support.mesh_pools import elements, mesh_layout, moved

LAYERS, HEADS, SLABS = 2, 2, 4
UNIT = 2
NUM_UNITS = 8
FRESH = {2: (2, 3, 4, 5, 6, 7, 8, 9), 8: (1, 2)}  # as an allocator gives them to the first request
AGED = {2: (9, 2, 7, 4, 1, 8, 3, 6), 8: (2, 0)}


@pytest.fixture(scope="module")
def agent() -> Iterator[Any]:
    """An agent that writes to itself."""
    import nixl._api as api

    config = api.nixl_agent_config(
        enable_prog_thread=False, backends=["UCX"], capture_telemetry=True
    )
    agent = api.nixl_agent("merging", config)
    yield agent
    del agent


@pytest.mark.parametrize(
    ("src", "dst", "pages", "num_descriptors"),
    [
        (("layer_major", 2), ("layer_major", 2), FRESH, SLABS),
        (("layer_major", 2), ("layer_major", 8), FRESH, SLABS),
        (("layer_major", 8), ("layer_major", 2), FRESH, SLABS),
        (
            ("layer_major", 2),
            ("page_major", 8),
            FRESH,
            SLABS * NUM_UNITS // 4,
        ),  # inside each large page
        (("page_major", 8), ("layer_major", 2), FRESH, SLABS * NUM_UNITS // 4),
        (("page_major", 2), ("page_major", 8), FRESH, SLABS * NUM_UNITS),  # neighbours nowhere
        (("page_major", 2), ("page_major", 2), FRESH, 1),
        (("layer_major", 2), ("layer_major", 8), AGED, SLABS * NUM_UNITS),
        (("tokens before pages", 8), ("layer_major", 2), FRESH, SLABS * NUM_UNITS * UNIT),
    ],
)
def test_contiguous_pages_reach_nixl_as_neighbours(
    agent: Any,
    src: tuple[str, int],
    dst: tuple[str, int],
    pages: dict[int, tuple[int, ...]],
    num_descriptors: int,
) -> None:
    virtual, memory, layouts, registered = [], [], [], []
    for order, page_size in (src, dst):
        layout, num_bytes = mesh_layout(order, 10, page_size, LAYERS, HEADS)
        raw = np.random.default_rng(page_size).integers(0, 256, num_bytes, np.uint8)
        virtual.append(layout)
        memory.append(raw)
        layouts.append(moved(layout, raw.ctypes.data))
        regions = [(start, size, 0, "") for start, size in layouts[-1].regions]
        registered.append(agent.register_memory(regions, "DRAM", backends=["UCX"]))
    places = [elements(layout, pages[layout.page_size], NUM_UNITS * UNIT) for layout in virtual]
    expected = memory[1].copy()
    expected[places[1]] = memory[0][places[0]]

    runs = paired_runs(*layouts, src_part=Shard.whole(layouts[0]))
    local = agent.prep_xfer_dlist("", runs.src, "DRAM")
    remote = agent.prep_xfer_dlist("merging", runs.dst, "DRAM")
    units = [
        unit_pages(
            np.array(pages[layout.page_size], np.int32), layout.page_size // UNIT, 0, NUM_UNITS
        )
        for layout in layouts
    ]
    sent = 0
    for group in runs.groups:
        index = part_indices(runs, Part(group, 0, group.num_runs * NUM_UNITS), *units)
        handle = agent.make_prepped_xfer("WRITE", local, index[0], remote, index[1])
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE"
        sent += agent.get_xfer_telemetry(handle).descCount
        handle.release()
    for prepared in (local, remote):
        prepared.release()
    for descriptors in registered:
        agent.deregister_memory(descriptors)
    assert np.array_equal(memory[1], expected)
    assert sent == num_descriptors
