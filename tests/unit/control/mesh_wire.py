"""Control objects of meshes under test, each opposite ranks that are played by hand. The model has
2 layers, 4 heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from prefixkv.config import ControlConfig
from prefixkv.control.decode.control import DecodeControl, DecodeInput
from prefixkv.control.effects import FrameReceived, RelaySlots, SendFrame
from prefixkv.control.handshake import OurSide
from prefixkv.control.prefill.control import PrefillControl
from prefixkv.memory.kv_layout import BLOCK_BYTES, RelayArea
from prefixkv.memory.mesh import Mesh
from prefixkv.protocol import messages
from prefixkv.protocol.commands import AddRoom, OpenRoom
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.messages import (
    Hello,
    HelloReply,
    HelloWanted,
    ModelDigest,
    Promise,
    Topology,
)
from tests.support.control_effects import effects_of
from tests.support.mesh_pools import mesh_layout
from tests.unit.control import wire
from tests.unit.control.wire import add_room as add_wire_room
from tests.unit.control.wire import ids, send_chunk, take_expect, to_life, write_ended
from tests.unit.protocol.rooms import PROMPT

TIMING = wire.TIMING
HEAD_BYTES = 128
PAGE_SIZE = 4
NUM_PAGES = 16
DIGEST = ModelDigest("m", "none", "uint8", "mha", 2, 4, HEAD_BYTES)
KEY, SENT = RoomKey(7, 0), RoomKey(7, 0, "d")  # as decode and prefill know it
AREA = RelayArea(BLOCK_BYTES * 10, 8 * BLOCK_BYTES, 4 * BLOCK_BYTES)
SLOTS = RelaySlots(2, 4 * BLOCK_BYTES, 2)
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
    return Promise(*KEY.numbers, fill_len, prefix_len, ids(pages), ticket, digest=PROMPT)


def add_room(key: RoomKey = SENT, num_tokens: int = 10) -> AddRoom:
    return add_wire_room(key, num_tokens)


class _Ranks(wire.Opposite):
    """The ranks of a peer, each with a name and a place of its own."""

    def on(self, what: Any) -> list[Any]:
        """What follows from an input, with (address or route, body) in place of a frame."""
        return [
            (effect.to, messages.decode(effect.raw).body)
            if isinstance(effect, SendFrame)
            else effect
            for effect in effects_of(self.control, what, self.now_s)
        ]


class Writers(_Ranks):
    """A real DecodeControl, rank `rank` of `tp`, opposite the ranks of a prefill worker of
    `prefill_tp`."""

    control: DecodeControl

    def __init__(
        self, prefill_tp: int = 2, tp: int = 1, rank: int = 0, staging: RelayArea | None = None
    ) -> None:
        super().__init__(me := PeerId(f"d/{rank}", 5))
        self.prefill_tp = prefill_tp
        self.expected = 0  # as the transport was told last
        self.control = DecodeControl(me, hello(tp, rank, me, relay=staging), TIMING)
        self.peers = [PeerId(f"p/{i}", 5) for i in range(prefill_tp)]
        self.known = [0] * prefill_tp  # by rank, as the last Hello said

    def on(self, what: DecodeInput) -> list[Any]:
        """As above. Expect is set aside in `expected`."""
        effects = super().on(what)
        self.expected = take_expect(effects, self.expected)
        assert self.expected == self.control._rooms.num_expected
        for address, hello in bodies(effects, Hello):
            if address in ADDRESSES[: self.prefill_tp]:
                self.known[ADDRESSES.index(address)] = hello.known
        return effects

    def say(
        self, rank: int, body: Any, *, by: PeerId | None = None, address: str = ""
    ) -> list[Any]:
        raw = self.raw(body, by or self.peers[rank])
        return self.on(FrameReceived(address or ADDRESSES[rank], raw))

    def reply(
        self, rank: int, /, *, by: PeerId | None = None, address: str = "", **changes: Any
    ) -> list[Any]:
        fields = {
            "digest": DIGEST, "topology": Topology(PAGE_SIZE, self.prefill_tp), "rank": rank,
            "endpoints": ("", *ADDRESSES[1 : self.prefill_tp]) if rank == 0 else ("",), **changes,
        }  # fmt: skip
        reply = HelloReply(**{"known": self.known[rank], **fields})
        said = self.say(rank, reply, by=by, address=address)
        if len(said) == 1 and bodies(said, Hello):  # which asks whether that is no late word
            reply = HelloReply(known=self.known[rank], **fields)
            return self.say(rank, reply, by=by, address=address)
        return said

    def open(self, which: Promise | None = None) -> list[Any]:
        return self.on(OpenRoom(which or promise(), ADDRESSES[0]))

    def opened(self, **changes: Any) -> Writers:
        """The room is promised to all."""
        self.open()
        for rank in range(self.prefill_tp):
            self.reply(rank, **changes)
        return self

    def outcome(
        self, rank: int, *, ok: bool = True, drained: bool = True, ticket: int = 1, units: int = 0
    ) -> list[Any]:
        """`units` of its unit pages were notified before."""
        said = 1, 3, b"aux%d" % rank, "" if ok else "broke", drained, ticket
        return self.say(rank, messages.Outcome(*KEY.numbers, rank, ok, *said, num_units=units))


class Readers(_Ranks):
    """A real PrefillControl, rank `rank` of `tp`, opposite the ranks of decode workers."""

    control: PrefillControl

    def __init__(
        self, tp: int = 1, rank: int = 0, page_size: int = PAGE_SIZE, *,
        digest: ModelDigest = DIGEST, timing: ControlConfig = TIMING,
        staging: RelaySlots | None = None,
    ) -> None:  # fmt: skip
        super().__init__(me := PeerId(f"p/{rank}", 5))
        topology, endpoints = Topology(page_size, tp), ADDRESSES[1:tp]
        ours = OurSide(digest, topology, rank)
        self.control = PrefillControl(me, ours, timing, ("", *endpoints), staging)

    def say(self, by: PeerId, body: Any, credential: str = "") -> list[Any]:
        """As `on`. A Hello that is answered with a nonce is said again with it."""
        raw = self.raw(to_life(body, self.control.me), by)
        said = self.on(FrameReceived(by.name.encode(), raw, credential))
        if isinstance(body, Hello) and not body.nonce and (wanted := bodies(said, HelloWanted)):
            again = msgspec.structs.replace(body, nonce=wanted[0][1].nonce)
            return self.say(by, again, credential)
        return said

    def greet(self, tp: int, name: str = "d", incarnation: int = 5, **changes: Any) -> list[PeerId]:
        """The ranks of a decode worker introduce themselves."""
        ranks = [PeerId(f"{name}/{rank}" if rank else name, incarnation) for rank in range(tp)]
        for rank, peer in enumerate(ranks):
            self.say(peer, hello(tp, rank, ranks[0], **changes))
        return ranks

    def chunk(self, first_page: int, src_pages: Sequence[int], last: bool = False) -> list[Any]:
        return self.on(send_chunk(SENT, first_page, src_pages, last, b"aux"))

    def ended(
        self, job_id: int, error: Exception | None = None, *, drained: bool = True
    ) -> list[Any]:
        return self.on(write_ended(job_id, error, drained))


def bodies(actions: Sequence[Any], kind: type) -> list[tuple[Any, Any]]:
    """(to whom, body) of the frames of this kind."""
    return [
        action for action in actions if isinstance(action, tuple) and isinstance(action[1], kind)
    ]
