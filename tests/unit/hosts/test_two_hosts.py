"""Decode on one host and prefill on another: KV and control go over a wire that is slow, or cut
for a while; and a restart. Every byte is checked, as ever.

Both sides' control planes have CURVE keys, since what prefill binds is reached by another host.
The hosts are network namespaces that only a veth pair joins, each held by a process of its own, so
that a node in it may die and another take its place. All of it is gone with the processes. It takes
root; that of a user namespace will do (`unshare -r`). `RefusedError` says what is not allowed.
"""

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import zmq

from prefixkv.config import CurveConfig, DecodeConfig, PrefillConfig
from tests.support import node_process
from tests.support.node_pair import make_pool, tokens_of
from tests.support.node_process import NodeProcess
from tests.support.patience import NEVER_S, until
from tests.support.processes import Child, children, obey
from tests.unit.runtime.conftest import QUICK

POOL = {"num_pages": 200, "page_size": 16, "num_layers": 4, "head_dim": 64}
PAGE_BYTES = make_pool(**POOL | {"num_pages": 1}).layout.page_bytes  # 32 KiB
FAST, SLOW, SLOWEST = 400.0, 16.0, 4.0  # Mbit/s
WIRE = "wire"  # the device, on both hosts
ADDRESSES = ("10.77.0.1", "10.77.0.2")

_CLONE_NEWNS, _CLONE_NEWNET = 0x2_0000, 0x4000_0000
_MS_PRIVATE = 0x4_4000  # and all below
_libc = ctypes.CDLL(None, use_errno=True)


class RefusedError(Exception):
    """What this machine does not allow."""


class Host(Child):
    """A network namespace."""

    def __init__(self) -> None:
        super().__init__(_hold)
        if self.hello:
            self.end()
            raise RefusedError(self.hello)

    def run(self, command: str) -> str:
        """A command line's output, in the namespace. RefusedError where it fails."""
        ok, output = self.call("run", command.split())
        if not ok:
            raise RefusedError(f"{command}: {output}")
        return str(output)

    def join(self, address: str) -> None:
        """Bring its end of the wire up."""
        self.run(f"ip address add {address}/24 dev {WIRE}")
        self.run("ip link set lo up")
        self.run(f"ip link set {WIRE} up")

    def limit(self, mbit: float) -> None:
        """It sends no faster than that from now on."""
        self.run(f"tc qdisc replace dev {WIRE} root tbf rate {mbit}mbit burst 128kb latency 100ms")

    def held_up(self) -> int:
        """How often a packet had to wait for the limit."""
        return int(self.run(f"tc -s qdisc show dev {WIRE}").split("overlimits ")[1].split()[0])

    def sent_bytes(self) -> int:
        """All that it has sent over the wire, headers included."""
        line = next(line for line in self.run("cat /proc/net/dev").splitlines() if WIRE in line)
        return int(line.split(":")[1].split()[8])


def join_veth(a: Host, b: Host) -> None:
    a.run(f"ip link add {WIRE} type veth peer name {WIRE} netns {b.pid}")
    for host, address in zip((a, b), ADDRESSES, strict=True):
        host.join(address)
    for host in (a, b):  # the kernel looks at links once a second; UCX takes one that is up only
        until(lambda host=host: "state UP" in host.run(f"ip link show dev {WIRE}"))


class HostedNode(NodeProcess):
    """A node on a host. KV goes over the wire, by TCP: shared memory would cross namespaces."""

    def __init__(self, host: Host, side: str, config: Any, pool: dict[str, Any]) -> None:
        super().__init__(host.pid, side, config, pool)

    @staticmethod
    def serve(pipe: Any, host: int, *args: Any) -> None:
        with open(f"/proc/{host}/ns/net") as namespace:
            _checked(_libc.setns(namespace.fileno(), _CLONE_NEWNET), "setns")
        # UCX looks for devices in /sys, which shows those of the namespace that mounted it.
        _checked(_libc.unshare(_CLONE_NEWNS), "unshare a mount namespace")
        _checked(_libc.mount(b"none", b"/", None, _MS_PRIVATE, None), "make mounts private")
        _checked(_libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None), "mount /sys")
        os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": WIRE}
        node_process.serve(pipe, *args)


# --- in the children ------------------------------------------------------------------------------


def _checked(result: int, what: str) -> None:
    if result:
        raise RefusedError(f"{what}: {os.strerror(ctypes.get_errno())}")


class _Holder:
    def run(self, argv: list[str]) -> tuple[bool, str]:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
        return not done.returncode, (done.stderr if done.returncode else done.stdout).strip()


def _hold(pipe: Any) -> None:
    """The other end learns first why it does not work; "": it does."""
    try:
        _checked(_libc.unshare(_CLONE_NEWNET), "unshare a network namespace")
    except RefusedError as error:
        pipe.send(str(error))
        return
    pipe.send("")
    obey(pipe, _Holder())


# --- the tests ------------------------------------------------------------------------------------


class TwoHosts:
    """Prefill on the first, decode on the second. The test is the router between them."""

    def __init__(self, start: Callable[..., Any]) -> None:
        if tools := ", ".join(tool for tool in ("ip", "tc") if not shutil.which(tool)):
            raise RefusedError(f"{tools} is not installed (Debian: iproute2)")
        self._start = start
        self.a = start(Host)
        self.b = start(Host)
        join_veth(self.a, self.b)
        self.a.limit(FAST)
        self.b.limit(FAST)
        keys = [tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(2)]
        (public, secret), (client, client_secret) = keys
        ours = CurveConfig(public, secret, allowed_clients={client: "decode"})
        theirs = CurveConfig(client, client_secret, server_key=public)
        bind = f"tcp://{ADDRESSES[0]}:9100"
        control = replace(QUICK, curve=ours)
        self._prefill_config = PrefillConfig(name="prefill", bind=bind, control=control)
        config = DecodeConfig(name="decode", control=replace(QUICK, curve=theirs))
        self.start_prefill()
        self.decode = start(HostedNode, self.b, "decode", config, POOL)
        self.num_rooms = 0

    def start_prefill(self) -> None:
        """Also again, under the same name and address."""
        self.prefill = self._start(HostedNode, self.a, "prefill", self._prefill_config, POOL)
        self.prefill.call("set", chunk=64)

    def submit(self, rid: str, seed: int, num_tokens: int) -> None:
        self.num_rooms += 1
        tokens, room = tokens_of(seed, num_tokens), self.num_rooms
        self.decode.call("submit", rid, tokens, self.prefill.endpoint, 2, room=room, tell=False)
        self.prefill.call("add", rid, tokens, room, 0, "decode")

    def ended(self, *rids: str) -> bool:
        return {*rids} <= {*self.decode.call("names", "ended")}

    def run(self, *requests: tuple[str, int, int]) -> None:
        """Requests (rid, seed, tokens) side by side, until all have come right."""
        for request in requests:
            self.submit(*request)
        rids = [rid for rid, *_ in requests]
        until(lambda: self.ended(*rids))
        errors = self.decode.call("get", "ended")
        assert {rid: errors[rid] for rid in rids} == dict.fromkeys(rids)

    def stats(self, name: str) -> int:
        """Of decode."""
        return int(self.decode.call("stats").get(name, 0))

    def check_at_rest(self) -> None:
        names = ("requests", "rooms", "locks", "pages_owned", "pages_held", "pages_quarantined")
        for node in (self.decode, self.prefill):
            until(lambda node=node: not any(node.call("stats").get(name, 0) for name in names))
            node.call("check_at_rest")
        assert self.decode.call("get", "wrong_aux") == 0


@pytest.fixture
def two_hosts(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> Iterator[TwoHosts]:
    """Two hosts, at rest when the test ends. Skipped aloud."""
    with children(lambda make, *args: make(*args)) as start:
        try:
            made = TwoHosts(start)
        except RefusedError as refused:
            reason = f"{request.node.name} needs two hosts, which this machine refuses: {refused}"
            with capsys.disabled():
                print(f"\nSKIPPED: {reason}")
            pytest.skip(reason)
        yield made
        made.check_at_rest()


@pytest.mark.slow
def test_a_slow_wire_carries_what_decode_lacks_and_every_byte_is_right(two_hosts: TwoHosts) -> None:
    two_hosts.a.limit(SLOW)
    begun_s = time.monotonic()
    two_hosts.run(*((f"{seed}.0", seed, 320) for seed in range(4)))
    sent = two_hosts.prefill.call("stats")["bytes_sent"]
    assert sent == 4 * 20 * PAGE_BYTES
    assert two_hosts.a.sent_bytes() > sent, "all of it went over the wire"
    assert time.monotonic() - begun_s > 0.9 * sent / (SLOW * 1e6 / 8), "and the wire is slow"
    assert two_hosts.a.held_up() > 0
    two_hosts.a.limit(FAST)
    two_hosts.run(*((f"{seed}.1", seed, 400) for seed in range(4)))
    assert two_hosts.prefill.call("stats")["bytes_sent"] == sent + 4 * 5 * PAGE_BYTES
    assert two_hosts.decode.call("get", "prefix_lens")["3.1"] == [320]


BIG = 1600  # tokens: 100 pages, 3.2 MB, six seconds of the slowest wire
BIG_PAGES = BIG // 16


def begin_slowly(two_hosts: TwoHosts, rid: str, seed: int) -> None:
    """A request whose KV is on its way: some of it has been sent, most of it not."""
    two_hosts.a.limit(SLOWEST)
    before = two_hosts.a.sent_bytes()
    two_hosts.submit(rid, seed, BIG)
    until(lambda: two_hosts.a.sent_bytes() - before > 8 * PAGE_BYTES)
    assert not two_hosts.ended(rid)


@pytest.mark.slow
def test_a_cut_that_is_mended_costs_time_alone(two_hosts: TwoHosts) -> None:
    begin_slowly(two_hosts, "in the middle", 1)
    two_hosts.a.run("ip link set wire down")
    two_hosts.submit("meanwhile", 2, 160)
    time.sleep(1.0)  # for so long
    assert not two_hosts.ended("in the middle")
    assert not two_hosts.ended("meanwhile")
    two_hosts.a.run("ip link set wire up")
    two_hosts.a.limit(FAST)
    until(lambda: two_hosts.ended("in the middle", "meanwhile"))
    assert {*two_hosts.decode.call("get", "ended").values()} == {None}


@pytest.mark.slow
def test_pages_behind_a_cut_come_back_by_proof_alone(two_hosts: TwoHosts) -> None:
    """Requests end at their deadline. What the cut has held up lands in pages that nobody has."""
    two_hosts.run(("before", 3, 480))
    begin_slowly(two_hosts, "in the middle", 1)
    two_hosts.a.run("ip link set wire down")
    two_hosts.submit("meanwhile", 2, 160)
    until(lambda: two_hosts.stats("rooms") == 2)
    two_hosts.decode.call("skip", NEVER_S)
    until(lambda: two_hosts.ended("in the middle", "meanwhile"))
    errors = two_hosts.decode.call("get", "ended")
    for rid in ("in the middle", "meanwhile"):
        assert errors[rid].startswith(("TransferTimeoutError", "PeerLostError")), errors[rid]
    two_hosts.decode.call("skip", NEVER_S)
    until(lambda: two_hosts.stats("pages_quarantined") == BIG_PAGES + 10)
    two_hosts.decode.call("skip", NEVER_S)
    assert two_hosts.stats("pages_quarantined") == BIG_PAGES + 10, "time frees no page"

    two_hosts.a.run("ip link set wire up")
    two_hosts.a.limit(FAST)
    until(lambda: two_hosts.stats("pages_quarantined") == 0)
    two_hosts.run(("before, again", 3, 640), ("after", 4, 480))
    assert two_hosts.decode.call("get", "prefix_lens")["before, again"] == [480]


@pytest.mark.slow
def test_prefill_dies_and_another_takes_its_place(two_hosts: TwoHosts) -> None:
    two_hosts.run(("before", 3, 480))
    begin_slowly(two_hosts, "in the middle", 1)
    lost = two_hosts.prefill
    lost.kill()
    two_hosts.a.limit(FAST)  # what its kernel still holds has gone before another is there
    two_hosts.start_prefill()
    until(lambda: two_hosts.ended("in the middle"))
    assert two_hosts.decode.call("get", "ended")["in the middle"].startswith("PeerLostError")
    time.sleep(1.0)  # looks enough at a process, were it one of decode's host
    assert two_hosts.stats("pages_held") == BIG_PAGES
    assert two_hosts.stats("peers_proved_dead") == 0, "of another host nothing proves that"
    two_hosts.decode.call("fence", lost.peer_id.name, lost.peer_id.incarnation)
    until(lambda: two_hosts.stats("pages_held") == 0)
    here = (two_hosts.prefill.peer_id, "ready")
    until(lambda: two_hosts.decode.call("meets", two_hosts.prefill.endpoint) == here)
    two_hosts.run(("before, again", 3, 640), ("after", 4, 480))
    assert two_hosts.decode.call("get", "prefix_lens")["before, again"] == [480]
