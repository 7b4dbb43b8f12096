"""What UCX listens on, as the kernel sees it: each case is a process of its own."""

import logging
import os
import subprocess
import sys

import pytest

from prefixkv.config import TransportConfig
from prefixkv.errors import ConfigError
from prefixkv.transport.nixl.agent import check_interface, net_devices, ucx_options, warn_if_open
from tests.support.patience import PATIENCE_S

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


def test_shared_memory_is_used_beside_the_loopback_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with ucx_options("") as options:
        assert options == {"engine_config": "NET_DEVICES=lo"}, "and no word of UCX_TLS"


def test_the_environment_is_as_before_once_an_agent_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with ucx_options("a,b") as options:
        assert (options, os.environ["UCX_NET_DEVICES"]) == ({}, "a,b")
    assert "UCX_NET_DEVICES" not in os.environ
    assert net_devices("a,b") == "a,b"
    monkeypatch.setenv("UCX_NET_DEVICES", "mine")
    with ucx_options("a,b") as options:
        assert (options, os.environ["UCX_NET_DEVICES"]) == ({}, "mine")
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
