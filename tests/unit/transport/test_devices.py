"""Where memory is reaches NIXL: type and device of our pool, and those of each peer's."""

from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from prefixkv.config import TransportConfig
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_layout import StateLink, state_blocks
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import PeerMemory, RankMemory, WriteDone
from prefixkv.transport.nixl import agent as nixl_agent
from prefixkv.transport.nixl.loop import NixlLoop
from prefixkv.transport.runs import paired_runs
from tests.support.gpu import GPU
from tests.support.state_memory import TENSORS, StateMemory
from tests.support.transport_driver import NixlDriver, Staging
from tests.support.transport_pools import Shape, make_pool

DEVICE_COLUMN = 2
TYPES = {"cpu": ("DRAM", 0), "cuda:0": ("VRAM", 0), "cuda:1": ("VRAM", 1), "cuda:3": ("VRAM", 3)}


THEIRS = b"nixlSerDes|Agent" + bytes([6]) + bytes(7) + b"them#2|"


class RecordingAgent:
    """In the place of nixl's agent, which has no GPU here: keeps what it is told of memory."""

    def __init__(self, name: str, config: object) -> None:
        self.registered: list[tuple[Any, str]] = []
        self.prepared: list[tuple[str, Any, str]] = []

    def create_backend(self, name: str, options: dict[str, str]) -> None:
        assert name == "UCX"

    def register_memory(self, regions: Any, memory_type: str, backends: list[str]) -> None:
        self.registered.append((regions, memory_type))

    def prep_xfer_dlist(self, name: str, table: Any, memory_type: str) -> object:
        self.prepared.append((name, table, memory_type))
        return object()

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        assert metadata == THEIRS
        return b"them#2"


def on(device: str, layout: KVLayout) -> KVLayout:
    return msgspec.structs.replace(layout, device=device)


@pytest.mark.parametrize("dst", TYPES)
@pytest.mark.parametrize("src", TYPES)
def test_nixl_is_told_where_our_memory_is_and_where_the_peers_is(
    monkeypatch: pytest.MonkeyPatch, src: str, dst: str
) -> None:
    """Pages, staging and state, whose lists are made when the peer is added."""
    monkeypatch.setattr(nixl_agent.nixl_api, "nixl_agent", RecordingAgent)
    pools = make_pool("layer_major", 6), make_pool("page_major", 5)
    ours, theirs = on(src, pools[0].layout), on(dst, pools[1].layout)
    staging = Staging(4, seed=1), Staging(4, seed=2)
    mesh = Mesh(2, 4)
    state = StateMemory(TENSORS, 3, mesh), StateMemory(TENSORS, 3, mesh)
    events: list[object] = []
    config, area = TransportConfig(), staging[0].area
    loop = NixlLoop(PeerId("us", 1), RankMemory(ours, area, state[0].layout), events.append, config)
    link = StateLink(state[1].layout, state_blocks(TENSORS, mesh, 0, mesh, 0))
    memory = PeerMemory(theirs, relay=staging[1].area, state=link)
    loop.add_peer(PeerId("them", 2), THEIRS, memory)
    assert not events
    api = loop._agent.api

    (regions, memory_type), *more = api.registered
    assert not more
    ranges = {*ours.regions, (area.base, area.num_bytes), *state[0].layout.regions}
    assert {region[:2] for region in regions} == ranges
    assert (memory_type, {region[2] for region in regions}) == (TYPES[src][0], {TYPES[src][1]})

    told = [
        (name, memory_type, set(table[:, DEVICE_COLUMN].tolist()))
        for name, table, memory_type in api.prepared
    ]
    pair = [("", TYPES[src][0], {TYPES[src][1]}), ("them#2", TYPES[dst][0], {TYPES[dst][1]})]
    assert told == pair * 3  # by pages, staging and state


@pytest.mark.parametrize("page_sizes", [(3, 3), (2, 4), (4, 2)], ids=str)
def test_devices_change_the_device_column_of_runs_and_nothing_else(
    page_sizes: tuple[int, int],
) -> None:
    pools = [make_pool("page_kv", 5, Shape(page_size=size)) for size in page_sizes]
    on_cpu = paired_runs(*(pool.layout for pool in pools))
    devices = "cuda:7", "cuda:999"
    runs = paired_runs(*(on(at, pool.layout) for at, pool in zip(devices, pools, strict=True)))
    for table, plain, device_id in (runs.src, on_cpu.src, 7), (runs.dst, on_cpu.dst, 999):
        expected = plain.copy()
        assert not expected[:, DEVICE_COLUMN].any()
        expected[:, DEVICE_COLUMN] = device_id
        assert np.array_equal(table, expected)


@pytest.mark.parametrize(("src", "dst"), [
    ("cpu", "cpu"),
    *(pytest.param(*pair, marks=GPU) for pair in [("cpu", "cuda"), ("cuda", "cpu")]),
    pytest.param("cuda", "cuda", marks=GPU),
])  # fmt: skip
def test_pages_reach_a_pool_wherever_it_is(src: str, dst: str) -> None:
    """With default settings on both sides."""
    source, target = (KVPool.create(8, 4, 2, 2, 16, device=device) for device in (src, dst))
    kv = torch.randint(0, 256, source.read_pages([2, 5]).shape, dtype=torch.uint8)
    source.write_pages([2, 5], kv)
    with closing(NixlDriver()) as driver:
        writer, reader = driver.node_of("prefill", source), driver.node_of("decode", target)
        writer.add(reader)
        reader.transport.expect(1)
        writer.transport.write(writer.job(1, reader, [2, 5], [7, 1]))
        driver.until(lambda: writer.ends(1) and reader.tags())
        assert isinstance(writer.ends(1)[0], WriteDone), writer.ends(1)
        assert torch.equal(target.read_pages([7, 1]), kv)
        assert not target.read_pages([0, 2, 3, 4, 5, 6]).any()
