"""Both endpoints under test, each opposite a peer that is played by hand: what it says, and what it
hears."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np

from prefixkv.config import ControlConfig
from prefixkv.control import decode as decode_endpoint
from prefixkv.control import prefill as prefill_endpoint
from prefixkv.errors import TransferTimeoutError
from prefixkv.memory.kv_layout import KVLayout, Slab
from prefixkv.protocol import messages
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Hello, HelloReply, ModelDigest, Promise, Topology

PAGE_SIZE = 4
NUM_PAGES = 16
ADDRESS = "tcp://prefill"
ROUTE = b"route"
TIMING = ControlConfig(
    heartbeat_s=1.0, suspect_after_s=3.0, forget_after_s=50.0, resend_s=0.5,
    bootstrap_timeout_s=10.0, waiting_timeout_s=20.0, transfer_timeout_s=15.0, ack_timeout_s=8.0,
    drain_timeout_s=6.0, parked_timeout_s=5.0, max_parked_per_peer=3, max_peers=2,
    fence_settle_s=0.0,
)  # fmt: skip
DIGEST = ModelDigest("llama", "1", "none", "uint8", "mha", 1, 1, 8)
TOPOLOGY = Topology(PAGE_SIZE)
LAYOUT = KVLayout(
    PAGE_SIZE, 1, 1, 8, "uint8", "mha", "layer_major", num_pages=NUM_PAGES,
    slabs=(Slab(4096, 32, 8, 8), Slab(4096 + 32 * NUM_PAGES, 32, 8, 8)),
    regions=((4096, 64 * NUM_PAGES),),
)  # fmt: skip
HELLO = Hello(DIGEST, TOPOLOGY, LAYOUT, b"agent")
DECODE, PREFILL = PeerId("decode-0", 5), PeerId("prefill-0", 5)


def ids(pages: Iterable[int]) -> bytes:
    return np.array(list(pages), dtype="<i4").tobytes()


def promise(room: int = 7, generation: int = 0, *, fill_len: int = 10, prefix_len: int = 4,
            pages: Sequence[int] = (3, 9)) -> Promise:  # fmt: skip
    """By default a prompt of 10 tokens, 4 of them cached: pages 3 and 9 are promised."""
    return Promise(room, generation, fill_len, prefix_len, ids(pages))


KEY = RoomKey(7, 0)


def newer(peer: PeerId) -> PeerId:
    """The same name, started again."""
    return PeerId(peer.name, peer.incarnation + 1)


class _Opposite:
    """The peer, and the clock. `said` keeps all bodies that the endpoint under test has sent,
    oldest first."""

    def __init__(self, me: PeerId) -> None:
        self.now_s = 100.0
        self.said: list[Any] = []
        self.seq = count(1)  # over all senders, so that nobody is turned away for his number alone
        self.me = me

    def raw(self, body: Any, by: PeerId | None = None, seq: int | None = None) -> bytes:
        return messages.encode(by or self.me, next(self.seq) if seq is None else seq, body)

    def heard(self, actions: Sequence[Any], frame_type: type) -> list[Any]:
        """The actions, with a frame's body in place of the frame."""
        out = []
        for action in actions:
            if isinstance(action, frame_type):
                body = messages.decode(action.raw).body
                self.said.append(body)
                out.append(body)
            else:
                out.append(action)
        return out

    def take_said(self) -> list[Any]:
        said, self.said = self.said, []
        return said


class PrefillPeer(_Opposite):
    """A hand-played prefill worker opposite a real `DecodeEndpoint`."""

    def __init__(self, timing: ControlConfig = TIMING) -> None:
        super().__init__(PREFILL)
        self.endpoint = decode_endpoint.DecodeEndpoint(DECODE, HELLO, timing)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call the endpoint with the time appended."""
        return self.heard(
            getattr(self.endpoint, method)(*args, self.now_s), decode_endpoint.SendFrame
        )

    def say(self, body: Any, by: PeerId | None = None) -> list[Any]:
        return self.call("on_frame", ADDRESS, self.raw(body, by))

    def open(self, which: Promise | None = None, address: str = ADDRESS) -> list[Any]:
        return self.call("open", which or promise(), address)

    def greet(self, by: PeerId | None = None, **changes: Any) -> list[Any]:
        reply = {"digest": DIGEST, "topology": TOPOLOGY, "endpoints": (ADDRESS,), **changes}
        return self.say(HelloReply(**reply), by)

    def opened(self) -> PrefillPeer:
        """The room of `promise()` is open and the promise has been said."""
        self.open()
        self.greet()
        self.take_said()
        return self

    def after(self, seconds: float) -> list[Any]:
        self.now_s += seconds
        return self.call("tick")

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


class DecodePeer(_Opposite):
    """A hand-played decode worker opposite a real `PrefillEndpoint`."""

    def __init__(self, timing: ControlConfig = TIMING) -> None:
        super().__init__(DECODE)
        self.endpoint = prefill_endpoint.PrefillEndpoint(
            PREFILL, DIGEST, TOPOLOGY, timing, (ADDRESS,)
        )

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.heard(
            getattr(self.endpoint, method)(*args, self.now_s), prefill_endpoint.SendFrame
        )

    def say(
        self, body: Any, by: PeerId | None = None, *, credential: str = "", route: bytes = ROUTE
    ) -> list[Any]:
        return self.call("on_frame", route, credential, self.raw(body, by))

    def known(self) -> DecodePeer:
        """Introduced, nothing more."""
        self.say(HELLO)
        self.take_said()
        return self

    def bootstrapped(self, which: Promise | None = None) -> DecodePeer:
        """The room of `promise()`: promised and added."""
        which = which or promise()
        self.known().say(which)
        self.call("add", RoomKey(which.room, which.generation), which.fill_len)
        self.take_said()
        return self

    def chunk(
        self, first_page: int, src_pages: Sequence[int], *, last: bool = False, key: RoomKey = KEY
    ) -> list[Any]:
        src = np.array(src_pages, dtype=np.int32)
        aux = b"first" if last else b""
        return self.call("chunk", key, first_page, src, last, aux, None)

    def ended(
        self, job_id: int, error: Exception | None = None, *, drained: bool = True
    ) -> list[Any]:
        return self.call("on_write_ended", job_id, error, drained)

    def after(self, seconds: float) -> list[Any]:
        self.now_s += seconds
        return self.call("tick")


def kinds(actions: Sequence[Any]) -> list[str]:
    """The names of what happened, in order."""
    return [type(action).__name__ for action in actions]


def check_table(machine: Any, module: Any) -> None:
    """Every state of a machine has a row, of events that its module knows, and every row leads
    somewhere."""
    assert set(machine._TABLE) == set(KVPoll)
    for row in machine._TABLE.values():
        assert set(row) <= set(module.Event.__args__)
        assert all(callable(getattr(machine, handler)) for handler in row.values())


def check_deadline(laws: Any, tick: Any, deadline_s: float) -> None:
    """The machine of `laws` fails at its deadline, not before, and wants to be woken by then."""
    laws.on(tick, deadline_s - 0.01)
    assert not laws.machine.poll.ended
    assert laws.machine.wake_s <= deadline_s
    laws.on(tick, 0.01)
    assert isinstance(laws.ended.error, TransferTimeoutError)
