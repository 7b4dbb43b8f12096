"""Both control objects under test, each opposite a peer that is played by hand: what it says, and
what it hears; meshes: `mesh_wire.py`.

The folder protects what one side does about a word of the other, an input of its engine, or time.
Beside it: the rooms' machines alone (../protocol), every state of two small sides
(../../laws/explore), orders of arrival at small pools (../../laws/liveness, by test_liveness.py),
whole workers over a bad network (test_engine_sim.py), sockets and threads (../runtime).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, get_args, get_origin

import msgspec
import numpy as np

from prefixkv.config import ControlConfig
from prefixkv.control.decode.control import DecodeControl, DecodeInput
from prefixkv.control.effects import Expect, FrameReceived, RelaySlots, SendFrame, Tick
from prefixkv.control.handshake import OurSide
from prefixkv.control.prefill.control import PrefillControl, PrefillInput
from prefixkv.memory.kv_layout import KVLayout, Slab
from prefixkv.protocol import messages
from prefixkv.protocol.commands import AddRoom, GroupChunk, OpenRoom, SendChunk
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Hello, HelloReply, ModelDigest, Promise, Topology
from prefixkv.transport.base import WriteDone, WriteFailed
from tests.support.control_effects import effects_of
from tests.unit.protocol.rooms import DECODE, PAGE_SIZE, PREFILL, PROMPT, SENT, TIMING, promise
from tests.unit.protocol.rooms import KEY as KEY
from tests.unit.protocol.rooms import ids as ids

NUM_PAGES = 16
ADDRESS = "tcp://prefill"
ROUTE = b"route"
DIGEST = ModelDigest("llama", "none", "uint8", "mha", 1, 1, 8)
TOPOLOGY = Topology(PAGE_SIZE)
LAYOUT = KVLayout(
    PAGE_SIZE, 1, 1, 8, "uint8", "mha", "layer_major", num_pages=NUM_PAGES,
    slabs=(Slab(4096, 32, 8, 8), Slab(4096 + 32 * NUM_PAGES, 32, 8, 8)),
    regions=((4096, 64 * NUM_PAGES),),
)  # fmt: skip
HELLO = Hello(DIGEST, TOPOLOGY, LAYOUT, b"agent")


def newer(peer: PeerId) -> PeerId:
    """The same name, started again."""
    return PeerId(peer.name, peer.incarnation + 1)


class Alike:
    """Equal to every error of this class and text: errors travel as text, so the one that comes
    back is another object."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self.error) and str(other) == str(self.error)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Alike({self.error!r})"


class Opposite:
    """The peer, and the clock. `said` keeps all bodies that the control object under test has sent,
    oldest first."""

    control: DecodeControl | PrefillControl

    def __init__(self, me: PeerId) -> None:
        self.now_s = 100.0
        self.said: list[Any] = []
        self.seq = count(1)  # over all senders, so that no frame is dropped for its number alone
        self.me = me

    def raw(self, body: Any, by: PeerId | None = None, seq: int | None = None) -> bytes:
        return messages.encode(by or self.me, next(self.seq) if seq is None else seq, body)

    def on(self, what: Any) -> list[Any]:
        """What follows from an input, with a frame's body in place of the frame."""
        out = []
        for effect in effects_of(self.control, what, self.now_s):
            if isinstance(effect, SendFrame):
                body = messages.decode(effect.raw).body
                self.said.append(body)
                out.append(body)
            else:
                out.append(effect)
        return out

    def take_said(self) -> list[Any]:
        said, self.said = self.said, []
        return said

    def pause(self, seconds: float) -> Tick:
        """Let the clock go on; returns what then has to be put in."""
        self.now_s += seconds
        return Tick()

    def after(self, seconds: float) -> list[Any]:
        return self.on(self.pause(seconds))


class PrefillPeer(Opposite):
    """A hand-played prefill worker of one rank opposite a real `DecodeControl`."""

    control: DecodeControl

    def __init__(self, timing: ControlConfig = TIMING, hello: Hello = HELLO) -> None:
        super().__init__(PREFILL)
        self.control = DecodeControl(DECODE, hello, timing)
        self.reply = HelloReply(hello.digest, TOPOLOGY, (ADDRESS,))
        self.known = 0  # as the last Hello said
        self.expected = 0  # as the transport was told last

    def on(self, what: DecodeInput) -> list[Any]:
        """As above. Expect is set aside in `expected`: it comes last, and only where it changed."""
        effects = super().on(what)
        self.expected = take_expect(effects, self.expected)
        assert self.expected == self.control._rooms.num_expected
        for at, body in enumerate(effects):
            if isinstance(body, Hello):
                self.known = body.known
                effects[at] = bare = msgspec.structs.replace(body, known=0, nonce=0)
                self.said = [bare if said is body else said for said in self.said]
            elif isinstance(body, messages.Promise | messages.Abort):
                assert body.digest in (PROMPT, b"")
                assert body.life
                digest = body.digest if isinstance(body, messages.Promise) else b""
                effects[at] = bare_word = msgspec.structs.replace(body, digest=digest, life=0)
                self.said = [bare_word if said is body else said for said in self.said]
        return effects

    def say(self, body: Any, by: PeerId | None = None) -> list[Any]:
        return self.on(FrameReceived(ADDRESS, self.raw(body, by)))

    def open(self, which: Promise | None = None, address: str = ADDRESS) -> list[Any]:
        return self.on(OpenRoom(which or promise(), address))

    def greet(self, by: PeerId | None = None, **changes: Any) -> list[Any]:
        """Reply, and again where a Hello asks first whether that is no late word."""
        said = self.say(msgspec.structs.replace(self.reply, **{"known": self.known, **changes}), by)
        if kinds(said) == ["Hello"]:
            self.said.pop()
            return self.say(msgspec.structs.replace(self.reply, known=self.known, **changes), by)
        return said

    def poll(self, key: RoomKey = KEY) -> KVPoll | None:
        """How far a room is; None once it has ended and is drained."""
        room = self.control._rooms.get(key)
        return None if room is None else room.poll

    def opened(self) -> PrefillPeer:
        """The room of `promise()` is open and the promise has been said."""
        self.open()
        self.greet()
        self.take_said()
        return self

    def pass_time(self, seconds: float, *, step_s: float = 0.25) -> list[Any]:
        """Tick through `seconds`, and collect what happens."""
        out = []
        for _ in range(round(seconds / step_s)):
            out += self.after(step_s)
        return out

    def outcome(
        self,
        ok: bool = True,
        *,
        num_pages: int = 2,
        drained: bool = True,
        generation: int = 0,
        room: int = 7,
        aux: bytes = b"first",
    ) -> messages.Outcome:
        return messages.Outcome(
            room, generation, 0, ok, 1, num_pages, aux, "" if ok else "broke", drained
        )


def to_life(body: Any, life: PeerId) -> Any:
    """The body, said to this prefill process if it names none."""
    if isinstance(body, messages.Promise | messages.Abort) and not body.life:
        return msgspec.structs.replace(body, life=life.incarnation)
    return body


class DecodePeer(Opposite):
    """A hand-played decode worker of one rank opposite a real `PrefillControl`, rank 0 of its
    worker."""

    control: PrefillControl

    def __init__(
        self,
        timing: ControlConfig = TIMING,
        hello: Hello = HELLO,
        topology: Topology = TOPOLOGY,
        staging: RelaySlots | None = None,
        weights_version: str = "",
        **more: Any,
    ) -> None:
        super().__init__(DECODE)
        self.hello = hello
        ours = OurSide(hello.digest, topology, **more)
        what = (ADDRESS,), staging, weights_version
        self.control = PrefillControl(PREFILL, ours, timing, *what)

    def raw(self, body: Any, by: PeerId | None = None, seq: int | None = None) -> bytes:
        """To this life of prefill."""
        return super().raw(to_life(body, PREFILL), by, seq)

    def on(self, what: PrefillInput) -> list[Any]:
        effects = super().on(what)
        self.control.check_invariants()
        return effects

    def say(
        self, body: Any, by: PeerId | None = None, *, credential: str = "", route: bytes = ROUTE
    ) -> list[Any]:
        """As `on`. A Hello that is answered with a nonce is said again with it."""
        said = self.on(FrameReceived(route, self.raw(body, by), credential))
        if isinstance(body, Hello) and kinds(said) == ["HelloWanted"] and not body.nonce:
            nonce = self.said.pop().nonce
            body = msgspec.structs.replace(body, nonce=nonce)
            said = self.on(FrameReceived(route, self.raw(body, by), credential))
        return said

    def known(self) -> DecodePeer:
        """Introduced, nothing more."""
        self.say(self.hello)
        self.take_said()
        return self

    def bootstrapped(self, which: Promise | None = None) -> DecodePeer:
        """The room of `promise()`: promised and added."""
        which = which or promise()
        self.known().say(which)
        self.on(add_room(RoomKey(*which.key.numbers, DECODE.name), which.fill_len))
        self.take_said()
        return self

    def chunk(
        self, first_page: int, src_pages: Sequence[int], *, last: bool = False, key: RoomKey = SENT,
        state_slot: int = -1, clip: bool = False,
    ) -> list[Any]:  # fmt: skip
        return self.on(send_chunk(key, first_page, src_pages, last, b"first", state_slot, clip))

    def ended(
        self, job_id: int, error: Exception | None = None, *, drained: bool = True
    ) -> list[Any]:
        return self.on(write_ended(job_id, error, drained))


def add_room(key: RoomKey = SENT, num_tokens: int = 10, digest: bytes = PROMPT) -> AddRoom:
    return AddRoom(key, num_tokens, digest)


def of_another_version(raw: bytes) -> bytes:
    """The same frame, under the next version's number and with a body that this one cannot read."""
    frame = msgspec.msgpack.decode(raw)
    return msgspec.msgpack.encode([frame[0] + 1, *frame[1:-1], "unheard of"])


def take_expect(effects: list[Any], expected: int) -> int:
    """How many rooms are expected after these effects, and `expected` before. Takes Expect out of
    them: it is the last. For the same number it is said again only where notifications lack."""
    if effects and isinstance(effects[-1], Expect):
        expected = effects.pop().num_rooms
    assert not any(isinstance(effect, Expect) for effect in effects)
    return expected


def send_chunk(
    key: RoomKey, first_page: int, src_pages: Sequence[int], last: bool, aux: bytes,
    state_slot: int = -1, clip: bool = False,
) -> SendChunk:  # fmt: skip
    src = np.array(src_pages, dtype=np.int32)
    groups = () if state_slot < 0 else (GroupChunk(0, np.array([state_slot], np.int32)),)
    return SendChunk(key, first_page, src, last, aux if last else b"", None, clip, groups)


WRITE_BYTES = 64


def write_ended(job_id: int, error: Exception | None, drained: bool) -> WriteDone | WriteFailed:
    if error is None:
        return WriteDone(job_id, WRITE_BYTES)
    return WriteFailed(job_id, error, drained)


def kinds(actions: Sequence[Any]) -> list[str]:
    """The names of what happened, in order."""
    return [type(action).__name__ for action in actions]


def of(effects: Sequence[Any], kind: type) -> list[Any]:
    """The effects of this kind."""
    return [effect for effect in effects if isinstance(effect, kind)]


def members(union: Any) -> set[Any]:
    """The types that a union is of.

    >>> members(FrameReceived[str] | Tick) == {FrameReceived, Tick}
    True
    """
    return {get_origin(kind) or kind for kind in get_args(union)}
