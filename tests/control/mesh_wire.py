"""Endpoints of meshes under test, each opposite ranks that are played by hand. The model has 2
layers, 4 heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from prefixkv.control import decode as decode_endpoint
from prefixkv.control import prefill as prefill_endpoint
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.staging_area import BLOCK_BYTES, StagingArea
from prefixkv.protocol import messages
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.messages import Hello, HelloReply, ModelDigest, Promise, Topology
from tests.control import wire
from tests.control.wire import ids
from tests.models.mesh_pools import mesh_layout

TIMING = replace(wire.TIMING, max_peers=8)  # ranks, not workers
HEAD_BYTES = 128
PAGE_SIZE = 4
NUM_PAGES = 16
DIGEST = ModelDigest("m", "1", "none", "uint8", "mha", 2, 4, HEAD_BYTES)
KEY = RoomKey(7, 0)
AREA = StagingArea(BLOCK_BYTES * 10, 8 * BLOCK_BYTES, 4 * BLOCK_BYTES)
ADDRESSES = ("tcp://p0", "tcp://p1", "tcp://p2", "tcp://p3")


def mesh(tp: int) -> Mesh:
    return Mesh(2, 4, tp)


def hello(
    tp: int, rank: int, worker: PeerId, *, page_size: int = PAGE_SIZE, **changes: Any
) -> Hello:
    shard = mesh(tp).shard(rank)
    layout, _ = mesh_layout(
        "layer_major",
        NUM_PAGES,
        page_size,
        shard.num_layers,
        shard.num_heads,
        head_bytes=HEAD_BYTES,
    )
    fields = {"digest": DIGEST, "topology": Topology(page_size, tp), "layout": layout, **changes}
    return Hello(agent_metadata=b"agent", rank=rank, worker=worker, **fields)


def promise(
    ticket: int = 1, *, fill_len: int = 10, pages: Sequence[int] = (3, 9, 5), prefix_len: int = 0
) -> Promise:
    return Promise(*KEY, fill_len, prefix_len, ids(pages), ticket)


class _Opposite:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.seq = count(1)
        self.said: list[tuple[Any, Any]] = []  # (to whom, body)

    def call(self, method: str, *args: Any) -> list[Any]:
        """The actions, with (address or route, body) in place of a frame."""
        out: list[Any] = []
        for action in getattr(self.endpoint, method)(*args, self.now_s):  # type: ignore[attr-defined]
            if isinstance(action, decode_endpoint.SendFrame):
                out.append((action.address, messages.decode(action.raw).body))
            elif isinstance(action, prefill_endpoint.SendFrame):
                out.append((action.route, messages.decode(action.raw).body))
            else:
                out.append(action)
        return out

    def after(self, seconds: float) -> list[Any]:
        self.now_s += seconds
        return self.call("tick")


class Writers(_Opposite):
    """A real DecodeEndpoint, rank `rank` of `tp`, opposite the ranks of a prefill worker of
    `prefill_tp`."""

    def __init__(
        self, prefill_tp: int = 2, tp: int = 1, rank: int = 0, staging: StagingArea | None = None
    ) -> None:
        super().__init__()
        me = PeerId(f"d/{rank}", 5)
        self.prefill_tp = prefill_tp
        self.endpoint = decode_endpoint.DecodeEndpoint(
            me, hello(tp, rank, me, staging=staging), TIMING
        )
        self.peers = [PeerId(f"p/{i}", 5) for i in range(prefill_tp)]

    def say(
        self, rank: int, body: Any, *, by: PeerId | None = None, address: str = ""
    ) -> list[Any]:
        raw = messages.encode(by or self.peers[rank], next(self.seq), body)
        return self.call("on_frame", address or ADDRESSES[rank], raw)

    def reply(
        self, rank: int, /, *, by: PeerId | None = None, address: str = "", **changes: Any
    ) -> list[Any]:
        fields = {
            "digest": DIGEST, "topology": Topology(PAGE_SIZE, self.prefill_tp), "rank": rank,
            "endpoints": ("", *ADDRESSES[1 : self.prefill_tp]) if rank == 0 else ("",), **changes,
        }  # fmt: skip
        return self.say(rank, HelloReply(**fields), by=by, address=address)

    def open(self, which: Promise | None = None) -> list[Any]:
        return self.call("open", which or promise(), ADDRESSES[0])

    def opened(self, **changes: Any) -> Writers:
        """The room is promised to all."""
        self.open()
        for rank in range(self.prefill_tp):
            self.reply(rank, **changes)
        return self

    def outcome(
        self, rank: int, *, ok: bool = True, drained: bool = True, ticket: int = 1
    ) -> list[Any]:
        error = "" if ok else "broke"
        return self.say(
            rank, messages.Outcome(*KEY, rank, ok, 1, 3, b"aux%d" % rank, error, drained, ticket)
        )


class Readers(_Opposite):
    """A real PrefillEndpoint, rank `rank` of `tp`, opposite the ranks of decode workers."""

    def __init__(
        self, tp: int = 1, rank: int = 0, page_size: int = PAGE_SIZE, slot_bytes: int = 0
    ) -> None:
        super().__init__()
        topology = Topology(page_size, tp)
        self.endpoint = prefill_endpoint.PrefillEndpoint(
            PeerId(f"p/{rank}", 5),
            DIGEST,
            topology,
            TIMING,
            ("", *ADDRESSES[1:tp]),
            rank,
            slot_bytes,
        )

    def say(self, by: PeerId, body: Any, credential: str = "") -> list[Any]:
        return self.call(
            "on_frame", by.name.encode(), credential, messages.encode(by, next(self.seq), body)
        )

    def greet(self, tp: int, name: str = "d", incarnation: int = 5, **changes: Any) -> list[PeerId]:
        """The ranks of a decode worker introduce themselves."""
        ranks = [PeerId(f"{name}/{rank}", incarnation) for rank in range(tp)]
        for rank, peer in enumerate(ranks):
            self.say(peer, hello(tp, rank, ranks[0], **changes))
        return ranks

    def chunk(self, first_page: int, src_pages: Sequence[int], last: bool = False) -> list[Any]:
        src = np.array(src_pages, np.int32)
        return self.call("chunk", KEY, first_page, src, last, b"aux" if last else b"", None)

    def ended(
        self, job_id: int, error: Exception | None = None, *, drained: bool = True
    ) -> list[Any]:
        return self.call("on_write_ended", job_id, error, drained)


def bodies(actions: Sequence[Any], kind: type) -> list[tuple[Any, Any]]:
    """(to whom, body) of the frames of this kind."""
    return [
        action for action in actions if isinstance(action, tuple) and isinstance(action[1], kind)
    ]


def of(actions: Sequence[Any], kind: type) -> list[Any]:
    """The actions of this kind, frames apart."""
    return [action for action in actions if isinstance(action, kind)]
