"""One NIXL agent: created, its memory registered, destroyed; and a peer as it knows it. With
`nixl/loop.py`, which drives it, the only user of nixl.

- An error of one part says nothing about the others and keeps its type; `bare` takes its traceback.
- A post refused with an error may have begun: NIXL hands its descriptors on one by one and stops at
  the first that fails. Only what NIXL refuses before that counts as never posted.
- Only destroying the agent fences its writes. Every handle that is kept, also in the frames of a
  traceback, keeps the agent: so errors leave here without their tracebacks, and logs get text.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from prefixkv.errors import ConfigError, MetadataError, PeerLostError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import Libraries
from prefixkv.transport.base import PeerMemory, RankMemory
from prefixkv.transport.jobs import ActiveJob
from prefixkv.transport.loop import LoopPeer, bare
from prefixkv.transport.runs import Routes, Runs

# Read when the libraries load. Faults are expected here, and come back as typed exceptions.
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
os.environ.setdefault("UCX_LOG_LEVEL", "FATAL")
_raise_exceptions = logging.raiseExceptions
import nixl._api as nixl_api  # noqa: E402
from nixl import _bindings as nixl_errors  # noqa: E402  # pyright: ignore[reportAttributeAccessIssue]

logging.raiseExceptions = _raise_exceptions  # nixl's logging turns it off for the whole process

_UCX: Final = "UCX"
_MIN_RESTS: Final = 50  # polls that `rest` makes at least, however long each takes
FORGOTTEN: Final = nixl_errors.nixlNotFoundError  # NIXL does not know the peer (any more)

# NIXL checks its arguments before it hands anything on, and says so with these
NEVER_POSTED: Final = (
    nixl_errors.nixlInvalidParamError,
    nixl_errors.nixlNotFoundError,
    nixl_errors.nixlNotAllowedError,
    nixl_errors.nixlMismatchError,
    nixl_errors.nixlNotSupportedError,
)
CONNECTION_BROKEN: Final = (
    nixl_errors.nixlRemoteDisconnectError,
    nixl_errors.nixlBackendError,
    FORGOTTEN,
)


class NixlAgent:
    """An agent with pool, staging area and state registered. Owned by the transport thread.

    `lists` are descriptor lists that are kept only for posts under way. `unproven` are the jobs
    with a part that failed after it was posted here: such a part may still land until `destroy`.
    """

    def __init__(self, name: str, memory: RankMemory, interface: str = "") -> None:
        """Create an agent and register the memory with UCX, which also brings the notifications.
        Staging area and state are on the layout's device. Raises what NIXL raises."""
        self.name = name
        self._memory_type = memory_type_of(memory.layout)
        # No progress thread, which would burn a core; no default backend, since UCX needs options.
        self.api: Any = nixl_api.nixl_agent(
            name,
            nixl_api.nixl_agent_config(
                enable_prog_thread=False,
                backends=[],
                sync_mode=nixl_api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW,
            ),
        )
        # UCX is there in any case: it carries the notifications, whatever else moves the bytes.
        with ucx_options(interface) as options:
            self.api.create_backend(_UCX, options)
        device = memory.layout.device_id
        regions = [(address, num_bytes, device, "") for address, num_bytes in memory.ranges]
        self.api.register_memory(regions, self._memory_type, backends=[_UCX])
        self.metadata = bytes(self.api.get_agent_metadata())
        self.lists: list[Any] = []  # dropped in `destroy`, before the agent
        self.unproven: set[int] = set()
        self._resting_since: float | None = None
        self._rests = 0

    def load(self, name: str, metadata: bytes) -> None:
        """Load a peer's metadata. Raises MetadataError if it is of another agent, which it would
        replace inside NIXL; and what NIXL raises."""
        named = name.encode()
        # As NIXL 1.5.1 begins: a head, then the agent's name, its length before it.
        head = b"nixlSerDes|Agent" + len(named).to_bytes(8, "little") + named + b"|"
        if not metadata.startswith(head):
            raise MetadataError(f"it is not of agent {name!r}, but begins with {metadata[:64]!r}")
        self.api.add_remote_agent(metadata)

    def prepare(self, name: str, runs: Runs, layout: KVLayout) -> tuple[Any, Any]:
        """Return the prepared descriptor lists of both sides; `layout` is the peer's. Raises what
        NIXL raises, for memory that is not registered, say."""
        local = self.api.prep_xfer_dlist("", runs.src, self._memory_type)
        return local, self.api.prep_xfer_dlist(name, runs.dst, memory_type_of(layout))

    def rest(self, now: float, for_s: float) -> bool:
        """Make progress once; return True when that has gone on for `for_s`: `destroy` may follow.

        UCX tidies up a broken connection step by step, as it makes progress. To destroy the agent
        before that is done may abort the process.

        Source: UCX, "Assertion `ucs_arbiter_group_is_empty(group)' failed" when a worker with
        pending requests is destroyed.
        """
        if self._resting_since is None:
            self._resting_since = now
        self._rests += 1
        with contextlib.suppress(Exception):
            self.api.get_new_notifs()
        return now - self._resting_since >= for_s and self._rests >= _MIN_RESTS

    def destroy(self) -> bool:
        """Destroy the agent, after every handle and list of it was dropped; return True if it is
        gone: only then are its writes fenced."""
        # A weak reference tells whether anything still holds the agent: then NIXL goes on writing.
        self.lists.clear()
        alive = weakref.ref(self.api.agent)
        del self.api
        return alive() is None


def memory_type_of(layout: KVLayout) -> str:
    return "DRAM" if layout.device == "cpu" else "VRAM"


def error_by_name(failure: Exception, peer: PeerId) -> Exception:
    """Return what NIXL raised for a post to `peer` as an error of ours, whose cause it is."""
    error = bare(failure)
    if isinstance(failure, nixl_errors.nixlRemoteDisconnectError):
        error = PeerLostError(f"{peer} broke the connection", peer)
        error.__cause__ = failure
    return error


# --- peers ----------------------------------------------------------------------------------------


def nixl_name(peer: PeerId) -> str:
    """Return the agent's name, with the incarnation: a restarted peer has another."""
    return f"{peer.name}#{peer.incarnation}"


class NixlPeer(LoopPeer):
    """A peer with its descriptor lists, (ours, theirs) by `WriteJob.route`."""

    def __init__(self, peer: PeerId, metadata: bytes, memory: PeerMemory) -> None:
        super().__init__(peer, metadata, memory)
        self.loaded = False  # NIXL has its metadata
        self.lists: dict[str, tuple[Any, Any]] = {}

    def load(self, agent: NixlAgent, routes: Routes) -> None:
        """Load the peer and prepare its lists. Raises HandshakeError, or what NIXL raises; `unload`
        undoes what was done by then."""
        name = nixl_name(self.peer)
        agent.load(name, self.metadata)
        self.loaded = True
        for route, runs in routes.items():
            self.lists[route] = agent.prepare(name, runs, self.memory.layout)
        # Last: `routes` says that all lists are there.
        self.routes = routes

    def unload(self, agent: NixlAgent) -> None:
        """Undo `load`, or as much of it as was done."""
        self.routes = None
        # Popped one by one, so that a list that cannot be released is not tried a second time. The
        # lists go before the agent forgets the peer that they refer to.
        while self.lists:
            _, pair = self.lists.popitem()
            for prepared in pair:
                prepared.release()
        if self.loaded:
            self.loaded = False
            with contextlib.suppress(FORGOTTEN):  # NIXL forgot it by itself
                agent.api.remove_remote_agent(nixl_name(self.peer))

    def detach_agent(self) -> list[Any]:
        """Forget what the peer has of an agent that is destroyed elsewhere; return its lists, which
        posts under way may still need."""
        lists = [prepared for pair in self.lists.values() for prepared in pair]
        self.lists.clear()
        self.routes, self.loaded, self.in_flight, self.retry_at = None, False, 0, 0.0
        return lists


@dataclass(slots=True, eq=False)
class Post:
    """A part under way, and the agent that posted it."""

    agent: NixlAgent
    handle: Any
    peer: NixlPeer
    job: ActiveJob


# --- UCX ------------------------------------------------------------------------------------------

# NIXL writes by it. By default it listens on the loopback alone: it would take every interface it
# finds, and any process that reaches its port can write into registered memory. Memory shared
# between processes of one machine, and CUDA's transports, are no network devices: they are used in
# any case. What the user has set is never overridden. NIXL's metadata has no
# version in it, and is read by native code that takes its form for granted: so the handshake
# compares the loaded versions.

_log = logging.getLogger("prefixkv.transport")

LOOPBACK: Final = "lo"
_VARIABLE: Final = "UCX_NET_DEVICES"
_CONNECT: Final = "UCX_TCP_CONN_NB"
_environment = threading.RLock()  # held while the variable may be ours


def net_devices(interface: str) -> str:
    """Return UCX's NET_DEVICES for `TransportConfig.interface`; "" if the user set them."""
    # Under the lock, since `ucx_options` may have set the variable for a moment.
    with _environment:
        return "" if _VARIABLE in os.environ else interface or LOOPBACK


def check_interface(interface: str, what: str, is_local: bool) -> None:
    """Raise ConfigError unless an address is local or an interface for KV has been named. `what`
    names the address (bind, or a prefill's) in the message."""
    if not is_local and not interface and _VARIABLE not in os.environ:
        raise ConfigError(
            f"{what}, which is not this machine's loopback, and KV travels on that alone: name the "
            "network's interface in TransportConfig(interface=...), as UCX calls it: "
            '"eth0", or "eth0,mlx5_0:1"'
        )


def warn_if_open(interface: str) -> None:
    """Log a warning if UCX will listen beyond the loopback."""
    devices = os.environ.get(_VARIABLE) or interface or LOOPBACK
    if devices != LOOPBACK:
        _log.warning(
            "KV travels over %s without encryption or authentication, and whoever reaches its "
            "ports can write into registered memory: that network has to be isolated",
            devices,
        )


@contextmanager
def ucx_options(interface: str) -> Iterator[dict[str, str]]:
    """Yield the options that keep NIXL's UCX backend, created inside this context, to the named
    interfaces, and have it connect without waiting.

    One interface is an option of the backend. Several cannot be, since NIXL splits its options at
    commas: they are put into the environment while the backend is created.
    """
    # By default UCX 1.23 waits in connect(), for two minutes where a peer's machine is gone; and if
    # the peer dies between that and what is sent next, UCX hands on an endpoint that it then
    # destroys, and the process ends by an assertion or a segmentation fault.
    config = [] if _CONNECT in os.environ else ["TCP_CONN_NB=y"]
    # The environment belongs to the whole process: one agent at a time, and undone at once.
    with _environment:
        devices = net_devices(interface)
        several = "," in devices
        if several:
            os.environ[_VARIABLE] = devices
        elif devices:
            config.append(f"NET_DEVICES={devices}")
        try:
            yield {"engine_config": ",".join(config)} if config else {}
        finally:
            if several:
                del os.environ[_VARIABLE]


def loaded_libraries() -> Libraries:
    """Return the versions of the loaded libraries; "" where not loaded or not told. UCX is loaded
    with the first agent's backend, so ask after that."""
    module = sys.modules.get("nixl._api")
    if module is None:
        return Libraries()
    nixl = ""
    with suppress(PackageNotFoundError):  # `nixl._api` is a module of nixl_cu13, say
        nixl = version(module.__name__.partition(".")[0].replace("_", "-"))
    return Libraries(nixl, _ucx())


def _ucx() -> str:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = {line.split(maxsplit=5)[-1].strip() for line in file if "/libucp" in line}
        # Of two, it is not known which one NIXL has taken.
        if len(paths) != 1:
            return ""
        told = ctypes.CDLL(paths.pop()).ucp_get_version_string
    except (OSError, AttributeError):
        return ""
    told.restype = ctypes.c_char_p
    return str(told().decode())
