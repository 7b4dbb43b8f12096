"""What UCX listens on, as the kernel sees it: each case is a process of its own. Where memory is
reaches NIXL: type and device of our pool, and those of each peer's."""

import logging
import os
import subprocess
import sys
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from prefixkv import KVPool, Mesh, TransportConfig
from prefixkv.errors import ConfigError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.state_layout import StateLink, state_blocks
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import PeerMemory, RankMemory, WriteDone
from prefixkv.transport.nixl import agent as nixl_agent
from prefixkv.transport.nixl.agent import check_interface, net_devices, ucx_options, warn_if_open
from prefixkv.transport.nixl.loop import NixlLoop
from prefixkv.transport.runs import paired_runs
from tests.support.gpu import GPU
from tests.support.patience import PATIENCE_S
from tests.support.state_memory import TENSORS, StateMemory
from tests.support.transport_driver import NixlDriver, Staging
from tests.support.transport_pools import Shape, make_pool

# The addresses of listening TCP sockets of this process (IPv4 and IPv6), as hex of /proc/net/tcp.
LISTENING = """
import os
def listening():
    mine = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            link = os.readlink(entry.path)
        except OSError:
            continue
        if link.startswith("socket:["):
            mine.add(link[8:-1])
    found = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{name}") as table:
            for line in list(table)[1:]:
                cells = line.split()
                if cells[3] == "0A" and cells[9] in mine:
                    found.add(cells[1].rpartition(":")[0])
    return found
"""
LOOPBACK = "0100007F"
NODE = """
from prefixkv import DecodeConfig, DecodeNode, PrefillConfig, PrefillNode, TransportConfig
from tests.support.node_pair import make_pool
for make, config in ((PrefillNode, PrefillConfig), (DecodeNode, DecodeConfig)):
    with make(make_pool(), config(transport=TransportConfig(interface={interface!r}))):
        print(*sorted(listening() - {{*before}}))
"""


def other_interface() -> str:
    """An interface beside the loopback one that has an IPv4 address."""
    with open("/proc/net/route") as table:
        names = [line.split()[0] for line in list(table)[1:]]
    if not names:
        pytest.skip("this machine has the loopback interface only")
    return names[0]


def listens(interface: str, **environment: str) -> list[set[str]]:
    """The addresses that a prefill node and a decode node listen on."""
    program = LISTENING + "before = ()\n" + NODE.format(interface=interface)
    env = {name: value for name, value in os.environ.items() if name != "UCX_NET_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=env | environment, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_by_default_nothing_but_loopback_listens() -> None:
    assert listens("") == [{LOOPBACK}, {LOOPBACK}]


@pytest.mark.slow
def test_a_named_interface_is_the_only_one_beside_the_control_plane() -> None:
    for prefill, decode in [listens(other_interface())]:
        assert len(decode) == 1
        assert LOOPBACK not in decode
        assert prefill == decode | {LOOPBACK}, "the control plane is bound to loopback"


@pytest.mark.slow
def test_several_interfaces_can_be_named() -> None:
    _, decode = listens(f"lo,{other_interface()}")
    assert len(decode) == 2
    assert LOOPBACK in decode


@pytest.mark.slow
def test_what_the_user_has_set_is_not_overridden() -> None:
    for interface in ("", "lo", "lo,another"):
        _, decode = listens(interface, UCX_NET_DEVICES=other_interface())
        assert len(decode) == 1
        assert LOOPBACK not in decode


CONNECTS = {"engine_config": "TCP_CONN_NB=y"}  # without waiting


def test_shared_memory_is_used_beside_the_loopback_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with ucx_options("") as options:
        expected = {"engine_config": "TCP_CONN_NB=y,NET_DEVICES=lo"}
        assert options == expected, "and no word of UCX_TLS"
    monkeypatch.setenv("UCX_TCP_CONN_NB", "n")
    with ucx_options("") as options:
        assert options == {"engine_config": "NET_DEVICES=lo"}


def test_the_environment_is_as_before_once_an_agent_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with ucx_options("a,b") as options:
        assert (options, os.environ["UCX_NET_DEVICES"]) == (CONNECTS, "a,b")
    assert "UCX_NET_DEVICES" not in os.environ
    assert net_devices("a,b") == "a,b"
    monkeypatch.setenv("UCX_NET_DEVICES", "mine")
    with ucx_options("a,b") as options:
        assert (options, os.environ["UCX_NET_DEVICES"]) == (CONNECTS, "mine")
    assert os.environ["UCX_NET_DEVICES"] == "mine"


def test_beyond_this_machine_an_interface_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    check_interface("", "bind is 'x'", is_local=True)
    check_interface("eth0", "bind is 'x'", is_local=False)
    with pytest.raises(ConfigError, match=r"bind is 'x'.*TransportConfig\(interface="):
        check_interface("", "bind is 'x'", is_local=False)
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    check_interface("", "bind is 'x'", is_local=False)


@pytest.mark.parametrize(
    ("interface", "set_by_user", "warned"),
    [("", None, False), ("lo", None, False), ("", "lo", False), ("eth0", None, True),
     ("lo,eth0", None, True), ("", "eth0", True), ("lo", "all", True)],
)  # fmt: skip
def test_an_open_data_plane_is_warned_of(
    interface: str, set_by_user: str | None, warned: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    if set_by_user is not None:
        monkeypatch.setenv("UCX_NET_DEVICES", set_by_user)
    with caplog.at_level(logging.WARNING, "prefixkv.transport"):
        warn_if_open(interface)
    assert ("isolated" in caplog.text) == warned


@pytest.mark.parametrize("name", ["a b", "a,,b", ",a", "a,", "a=b", " "])
def test_an_interface_that_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"interface: .* is not a list of names"):
        TransportConfig(interface=name)


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
