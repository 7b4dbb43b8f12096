"""NIXL as bare as it gets, for the stack to be compared with: an agent, a buffer, handles posted as
fast as they go."""

from __future__ import annotations

import time
from typing import Any, Final

from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.kv_pool import KVPool
from prefixkv.paging import Pages
from prefixkv.transport.nixl import agent as nixl_agent
from prefixkv.transport.nixl.agent import memory_type_of
from prefixkv.transport.runs import cut_parts, paired_runs, part_indices

WINDOW: Final = 8  # posts under way, as in the transport
_ROW: Final = 4096
_nixl: Any = vars(nixl_agent)["nixl_api"]  # as its one importer loads it, with quiet logs
AgentType: Any = _nixl.nixl_agent


def make_agent(name: str, *layouts: KVLayout) -> Any:
    """A NIXL agent, set as the transport's are, with the memory of these pools registered."""
    sync = _nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
    config = _nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=sync)
    agent = AgentType(name, config)
    for layout in layouts:
        regions = [(address, length, layout.device_id, "") for address, length in layout.regions]
        agent.register_memory(regions, memory_type_of(layout), backends=["UCX"])
    return agent


class RawAgent:
    """An agent with one contiguous buffer and, besides, a pool's memory."""

    def __init__(self, name: str, num_bytes: int, pool: KVPool, shared: bool = False) -> None:
        """`shared`: the buffer lies in small pages that can be shared."""
        self.name = name
        self.num_bytes = num_bytes
        self._pool = pool
        self._memory_type = memory_type_of(pool.layout)
        self._device_id = pool.layout.device_id
        self._buffer = KVPool.create(
            1, num_bytes // _ROW, 1, 1, _ROW, dtype="uint8", attention="mla", device=pool.device,
            shared=shared,
        )  # fmt: skip
        self.api = make_agent(name, self._buffer.layout, pool.layout)
        self.address = self._buffer.layout.regions[0][0]
        self.peer = ""
        self.theirs = 0

    def introduction(self) -> tuple[str, bytes, int, KVLayout]:
        return self.name, bytes(self.api.get_agent_metadata()), self.address, self._pool.layout

    def connect(self, introduction: tuple[str, bytes, int, KVLayout]) -> None:
        """The peer's pool is on a device like ours, as both sides of a benchmark have it."""
        self.peer, metadata, self.theirs, layout = introduction
        self.api.add_remote_agent(metadata)
        self._runs = paired_runs(self._pool.layout, layout)
        self._lists = (
            self.api.prep_xfer_dlist("", self._runs.src, self._memory_type),
            self.api.prep_xfer_dlist(self.peer, self._runs.dst, self._memory_type),
        )

    def buffer_write(self) -> list[Any]:
        """The handle that writes the whole buffer."""
        ours, theirs = (
            self.api.get_xfer_descs([(at, self.num_bytes, self._device_id)], self._memory_type)
            for at in (self.address, self.theirs)
        )
        return [self.api.initialize_xfer("WRITE", ours, theirs, self.peer, b"part")]

    def page_writes(
        self, src: Pages, dst: Pages, post_bytes: int, post_descriptors: int
    ) -> list[Any]:
        """Handles that write these pages of the pool: the very descriptors that the transport
        posts."""
        handles = []
        for part in cut_parts(self._runs, src, dst, post_bytes, post_descriptors):
            indices = part_indices(self._runs, part, src, dst)
            local, remote = self._lists
            handles.append(
                self.api.make_prepped_xfer("WRITE", local, indices[0], remote, indices[1], b"part")
            )
        return handles

    def write(self, handles: list[Any], window: int = WINDOW) -> float:
        """Post them all, at most `window` at a time; returns when the first was posted, on the
        monotonic clock."""
        began_s = time.monotonic()
        waiting, going = list(reversed(handles)), list[Any]()
        while waiting or going:
            while waiting and len(going) < window:
                handle = waiting.pop()
                if self.api.transfer(handle) != "DONE":
                    going.append(handle)
            going = [handle for handle in going if self.api.check_xfer_state(handle) != "DONE"]
        return began_s

    def arrived_s(self, count: int) -> float:
        """When the last of so many notifications came."""
        while count:
            count -= sum(map(len, self.api.get_new_notifs().values()))
        return time.monotonic()
