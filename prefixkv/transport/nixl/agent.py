"""One NIXL agent: created, its memory registered, destroyed. With `nixl/loop.py`, which drives it,
the only user of nixl.

- An error of one part says nothing about the others and keeps its type; `bare` takes its traceback.
- A post refused with an error may have begun: NIXL hands its descriptors on one by one and stops at
  the first that fails. Only what NIXL refuses before that counts as never posted.
- Only destroying the agent fences its writes. Every handle that is kept, also in the frames of a
  traceback, keeps the agent: so errors leave here without their tracebacks, and logs get text.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from typing import Any, Final

from prefixkv.errors import MetadataError, TransferError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.staging_area import StagingArea
from prefixkv.memory.state_layout import StateLayout
from prefixkv.transport.interfaces import ucx_options
from prefixkv.transport.runs import Runs

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

    def __init__(
        self, name: str, layout: KVLayout, staging: StagingArea | None = None,
        state: StateLayout | None = None, interface: str = "",
    ) -> None:  # fmt: skip
        """Create an agent and register the memory with UCX, which also brings the notifications.
        Staging area and state are on the layout's device. Raises what NIXL raises."""
        self.name = name
        self._memory_type = memory_type_of(layout)
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
        ranges = [*layout.regions]
        if staging is not None:
            ranges.append((staging.base, staging.num_bytes))
        if state is not None:
            ranges += state.regions
        regions = [(address, num_bytes, layout.device_id, "") for address, num_bytes in ranges]
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


def error_of(state: str) -> Exception | None:
    """Return the error that the state of a post stands for, None for DONE and PROC."""
    return None if state in ("DONE", "PROC") else TransferError(f"NIXL reports state {state}")
