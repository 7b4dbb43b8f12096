"""One life of a control object as a value: a number for each state that it can be in.

A control object is pure, so what follows from a state and an input follows always. Each state is
kept as a pickle under the number of its *digest*: all that decides its behaviour, with times
relative to the present one, and without counters and sequence numbers. Heartbeats are off: when
time goes on, the world says what has been heard by then (`Actors.later`). What an input does in a
state is worked out once and looked up from then on.

This is the one file of the explorer that knows how control objects are made and what is in them.
"""

import io
import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np

from prefixkv.config import ControlConfig
from prefixkv.control import effects
from prefixkv.control.decode.control import DecodeControl
from prefixkv.control.handshake import OurSide
from prefixkv.control.lives import PeerClock
from prefixkv.control.prefill.control import PrefillControl
from prefixkv.memory.mesh import Mesh, writers_to
from prefixkv.protocol import commands, events, messages
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Hello, ModelDigest, Promise, Topology
from prefixkv.protocol.timers import Backoff, Timers, Wait
from prefixkv.transport import base as transport
from tests.support.control_effects import effects_of, leftovers_of
from tests.support.mesh_pools import mesh_layout


class ControlError(Exception):
    """A control object has raised, which none may."""


FAR_S = 1e6  # heartbeats, suspicion and the end of a healthy wait are this far off: never
TIMING = ControlConfig(
    heartbeat_s=FAR_S, suspect_after_s=10 * FAR_S, forget_after_s=20 * FAR_S, resend_s=1.0,
    bootstrap_timeout_s=10.0, waiting_timeout_s=12.0, transfer_timeout_s=11.0, ack_timeout_s=10.0,
    drain_timeout_s=9.0, parked_timeout_s=10.0, fence_settle_s=1.0, longest_wait_s=FAR_S,
)  # fmt: skip
PAST_DEADLINES_S = 20.0
PAGE_SIZE = 4
USE_PAGES = 4  # of either pool belong to a use
HEADS = 2


class Use(NamedTuple):
    """One request: `worker` of decode asks for it. Two may have one `room`."""

    number: int
    worker: int
    room: int
    chunks: int = 1  # of one page each
    prompt: int = -1  # requests of one prompt have one KV; -1: of its own
    generation: int = 0

    @property
    def ticket(self) -> int:
        return 11 + self.number

    @property
    def digest(self) -> bytes:
        return b"prompt %9d" % (self.number if self.prompt < 0 else self.prompt)

    @property
    def aux(self) -> bytes:
        return b"aux of " + self.digest

    @property
    def pages(self) -> tuple[int, ...]:
        return tuple(range(self.number * USE_PAGES, self.number * USE_PAGES + self.chunks))

    @property
    def fill_len(self) -> int:
        return self.chunks * PAGE_SIZE

    # --- what schedulers say ----------------------------------------------------------------------

    def decode_key(self) -> RoomKey:
        return RoomKey(self.room, self.generation)

    def prefill_key(self, decode: PeerId) -> RoomKey:
        """`decode` is rank 0 of the worker that asks."""
        return RoomKey(self.room, self.generation, decode.name)

    def open(self) -> commands.OpenRoom:
        pages = np.array(self.pages, "<i4").tobytes()
        what = self.fill_len, 0, pages, self.ticket, self.digest
        return commands.OpenRoom(Promise(*self.decode_key().numbers, *what), address(0))

    def refuse(self) -> commands.RefuseRoom:
        return commands.RefuseRoom(self.decode_key(), self.ticket, address(0), "refused")

    def add(self, decode: PeerId) -> commands.AddRoom:
        return commands.AddRoom(self.prefill_key(decode), self.fill_len, self.digest)

    def chunk(self, decode: PeerId, number: int) -> commands.SendChunk:
        src = np.array(self.pages[number : number + 1], np.int32)
        last = number == self.chunks - 1
        key = self.prefill_key(decode)
        return commands.SendChunk(key, number, src, last, self.aux if last else b"", None)


def address(rank: int) -> str:
    return f"tcp://p{rank}"


# --- making control objects -----------------------------------------------------------------------

_DIGEST = ModelDigest("m", "none", "uint8", "mha", 1, HEADS, 8)


_LIVES = (0, 5, 3, 8)  # the first, second, third are from 1 on: lives are in no order


def prefill_id(rank: int, life: int) -> PeerId:
    return PeerId(f"p/{rank}" if rank else "p", _LIVES[life])


def decode_id(worker: int, rank: int, life: int) -> PeerId:
    return PeerId(f"d{worker}/{rank}" if rank else f"d{worker}", _LIVES[life])


def route(peer: PeerId) -> bytes:
    return f"{peer.name} {peer.incarnation}".encode()


def new_prefill(rank: int, life: int, num_ranks: int) -> PrefillControl:
    endpoints = ("", *map(address, range(1, num_ranks))) if rank == 0 else ()
    topology = Topology(PAGE_SIZE, num_ranks)
    me = prefill_id(rank, life)
    return PrefillControl(me, OurSide(_DIGEST, topology, rank, option_names={}), TIMING, endpoints)


def new_decode(worker: int, rank: int, life: int, num_ranks: int) -> DecodeControl:
    layout, _ = mesh_layout("layer_major", 16, PAGE_SIZE, 1, HEADS // num_ranks, head_bytes=8)
    me, topology = decode_id(worker, rank, life), Topology(PAGE_SIZE, num_ranks)
    leader = decode_id(worker, 0, life)
    what = _DIGEST, topology, layout, b"agent", rank
    hello = Hello(*what, leader if num_ranks > 1 else None)
    return DecodeControl(me, hello, TIMING)


def writers(num_writers: int, num_readers: int, rank: int) -> tuple[int, ...]:
    """The prefill ranks that write to this decode rank."""
    return writers_to(Mesh(1, HEADS, num_writers), Mesh(1, HEADS, num_readers), rank)


class _JobIds:
    """Counts from above the jobs that are known, so that states do not differ by how many there
    have been."""

    def __init__(self, last: int) -> None:
        self.last = last

    def __next__(self) -> int:
        self.last += 1
        return self.last


def _tidy(control: Any) -> None:
    """Take out of a control object what only tells how it came to be."""
    control.counters.clear()
    control._out = []
    control._seq = repeat(1)  # the wire numbers frames (`Frames.raw`)
    if isinstance(control, PrefillControl):
        rooms = control._rooms
        rooms._job_ids = _JobIds(max(rooms.jobs, default=0))  # type: ignore[assignment]
        for peer in control._peers.all():
            peer.live.in_seq = min(peer.live.in_seq, 1)
            peer.hello = _SHARED.setdefault(peer.hello, peer.hello)
    else:
        for link in control._links.all():
            link.live.in_seq = min(link.live.in_seq, 1)
            link.reply = _SHARED.setdefault(link.reply, link.reply)


_SHARED: dict[Any, Any] = {}  # bodies that state after state holds


def _effects(control: Any, what: Any, now_s: float) -> list[Any]:
    try:
        return effects_of(control, what, now_s)
    except Exception as error:
        raise ControlError(f"{type(what).__name__} raised {error!r}") from error


def lives(control: Any) -> list[tuple[PeerId | None, PeerClock]]:
    """What a control object has heard, and when."""
    if isinstance(control, PrefillControl):
        return [(peer.id, peer.live) for peer in control._peers.all()]
    return [(link.peer, link.live) for link in control._links.all()]


# --- digests --------------------------------------------------------------------------------------

# `deaths`: no process is named here, so none is ever looked at.
_SKIPPED = {
    "counters", "news", "_out", "_say", "_todo", "_send", "_seq", "_job_ids", "_look_ids",
    "_timing", "timing", "deaths",
}  # fmt: skip
_ATOMS = (type(None), bool, int, str, bytes)


class _Digest:
    """All that decides a control object's behaviour, as nested tuples. Times are relative."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self._seen: dict[int, int] = {}

    def of(self, what: Any) -> Any:
        kind = type(what)
        if kind in _ATOMS:
            return what
        if kind is float:
            return self._time(what)
        if isinstance(what, tuple | list | deque):
            return tuple(map(self.of, what))
        if isinstance(what, Enum):
            return what.value
        if isinstance(what, dict) and kind.__module__ in ("builtins", "collections"):
            return tuple((self.of(key), self.of(value)) for key, value in what.items())
        if isinstance(what, set | frozenset):
            return tuple(sorted(map(self.of, what), key=repr))
        if kind is np.ndarray:
            return what.tobytes()
        if isinstance(what, Exception):
            return kind.__name__, str(what)
        if kind in (MethodType, FunctionType, BuiltinMethodType):
            return None
        if kind is Hello or kind is messages.HelloReply or kind is ControlConfig:
            return what
        return self._object(what)

    def _object(self, what: Any) -> Any:
        known = self._seen.get(id(what))
        if known is not None:
            return "seen", known
        self._seen[id(what)] = len(self._seen)
        if isinstance(what, PeerClock):
            return what.in_seq, what.heard_s >= self._now_s
        if isinstance(what, Backoff):
            return what._pause_s, self._time(what.due_s)
        if isinstance(what, Wait):
            return what._patience_s, self._time(what.due_s), self._time(what.last_s)
        if isinstance(what, Timers):
            due = sorted(entry for entry in what._heap if what._wake_s.get(entry[2]) == entry[0])
            return tuple({key: self._time(at_s) for at_s, _, key in due}.items())
        fields = getattr(what, "__struct_fields__", None) or _slots(type(what)) or vars(what)
        name = type(what).__name__
        if not fields:
            raise TypeError(f"the explorer does not know what a {name} holds")
        entries = dict(what) if isinstance(what, dict) else None
        held = (self.of(getattr(what, of)) for of in fields if of not in _SKIPPED)
        return name, self.of(entries), *held

    def _time(self, at_s: float) -> float:
        """What has passed has passed; what is far off never comes."""
        left_s = at_s - self._now_s
        return 0.0 if left_s <= 0 else FAR_S if left_s > FAR_S / 2 else left_s


def _slots(kind: type) -> tuple[str, ...]:
    return tuple(getattr(kind, "__slots__", ()))


class _Pickler(pickle.Pickler):
    def persistent_id(self, what: Any) -> Any:
        if isinstance(what, Hello | messages.HelloReply):
            return _SHARED.setdefault(what, what) and _number(what)
        return "timing" if what is TIMING else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, number: Any) -> Any:
        return TIMING if number == "timing" else _NUMBERED[number]


_NUMBERED: list[Any] = []
_NUMBERS: dict[Any, int] = {}


def _number(what: Any) -> int:
    if what not in _NUMBERS:
        _NUMBERS[what] = len(_NUMBERED)
        _NUMBERED.append(what)
    return _NUMBERS[what]


# --- frames ---------------------------------------------------------------------------------------


class Frames:
    """A number for every frame that is said, whatever its sequence number."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._frames: list[messages.Frame] = []

    def id_of(self, raw: bytes) -> int:
        number = self._ids.get(raw)
        if number is None:
            number = self._ids[raw] = len(self._frames)
            self._frames.append(messages.decode(raw))
        return number

    def heartbeat(self, me: PeerId) -> int:
        return self.id_of(messages.encode(me, 1, messages.Heartbeat()))

    def sender(self, number: int) -> PeerId:
        return self._frames[number].sender

    def raw(self, number: int, stale: bool) -> bytes:
        """Links keep order. So a frame is newer than what its receiver has taken of this sender (1,
        or 0: nothing), or a copy of something older."""
        frame = self._frames[number]
        return messages.encode(frame.sender, 1 if stale else 2, frame.body)

    def __getitem__(self, number: int) -> Any:
        return self._frames[number].body


# --- states ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _State:
    pickled: bytes
    now_s: float
    wake_s: float | None  # from now; None: never


class Actors:
    """The states of all control objects, each once. `num_inputs` were worked out."""

    def __init__(self) -> None:
        self.frames = Frames()
        self.num_inputs = 0
        self._states: list[_State] = []
        self._ids: dict[Any, int] = {}
        self._after: dict[tuple[int, Any], tuple[int, tuple[Any, ...]]] = {}
        self._passed: dict[tuple[int, float, frozenset[PeerId]], int] = {}
        self._talks: dict[int, dict[Any, bool]] = {}
        self._known: dict[int, frozenset[PeerId]] = {}
        self._same: dict[frozenset[PeerId], frozenset[PeerId]] = {}
        self._left: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._states)

    def add(self, control: Any, now_s: float = 0.0) -> int:
        """The number of the state that this control object is in."""
        _tidy(control)
        digest = _Digest(now_s).of(control)
        number = self._ids.get(digest)
        if number is None:
            number = self._ids[digest] = len(self._states)
            raw = io.BytesIO()
            _Pickler(raw, 5).dump(control)
            wakes = [at_s - now_s for at_s in control.timers._wake_s.values()]
            if isinstance(control, PrefillControl):
                wakes.append(control._tombs.due_s - now_s)
            wake_s = min(wakes, default=FAR_S)
            soon = None if wake_s > FAR_S / 2 else max(wake_s, 0.0)
            self._states.append(_State(raw.getvalue(), now_s, soon))
        return number

    def load(self, number: int) -> tuple[Any, float]:
        """A copy of the control object, and its time."""
        state = self._states[number]
        return _Unpickler(io.BytesIO(state.pickled)).load(), state.now_s

    def take(self, number: int, name: Any, build: Callable[[], Any]) -> tuple[int, tuple[Any, ...]]:
        """The state after an input, and what it says. `name` stands for the input that `build`
        makes."""
        known = self._after.get((number, name))
        if known is None:
            self.num_inputs += 1
            control, now_s = self.load(number)
            words = map(self._word, _effects(control, build(), now_s))
            said = tuple(word for word in words if word is not None)
            known = self._after[number, name] = self.add(control, now_s), said
        return known

    def later(self, number: int, seconds: float, heard: frozenset[PeerId]) -> int:
        """The same state when so much time has passed, and by now these have been heard; others
        have been silent for longer than any patience."""
        after = self._passed.get((number, seconds, heard))
        if after is None:
            control, now_s = self.load(number)
            now_s += seconds
            for peer, live in lives(control):
                live.heard_s = now_s - (0.0 if peer in heard else PAST_DEADLINES_S)
            after = self._passed[number, seconds, heard] = self.add(control, now_s)
        return after

    def talks(self, number: int) -> dict[Any, bool]:
        """Of a decode rank: by address, whether it says heartbeats there; of a prefill rank: what
        it knows. By life, whether a word of that is taken."""
        found = self._talks.get(number)
        if found is None:
            control, _ = self.load(number)
            found = {peer: True for peer, _ in lives(control) if peer is not None}
            if isinstance(control, DecodeControl):
                found |= {link.address: link.ready for link in control._links.all()}
            self._talks[number] = found
        return found

    def known(self, number: int) -> frozenset[PeerId]:
        """The lives that it has taken a frame of. Equal ones are one object."""
        found = self._known.get(number)
        if found is None:
            control, _ = self.load(number)
            heard = (peer for peer, live in lives(control) if peer is not None and live.in_seq)
            lives_heard = frozenset(heard)
            found = self._known[number] = self._same.setdefault(lives_heard, lives_heard)
        return found

    def wake_s(self, number: int) -> float | None:
        return self._states[number].wake_s

    def leftovers(self, number: int) -> dict[str, Any]:
        """What is there that should not be, once what expires has expired."""
        left = self._left.get(number)
        if left is None:
            control, now_s = self.load(number)
            effects_of(control, effects.Tick(), now_s + PAST_DEADLINES_S)
            left = self._left[number] = leftovers_of(control)
        return left

    def _word(self, effect: Any) -> Any:
        """An effect as a tuple; None where the world has nothing to do."""
        match effect:
            case effects.SendFrame():
                return "send", effect.to, self.frames.id_of(effect.raw)
            case transport.WriteJob():
                src, dst = tuple(effect.src_pages.tolist()), tuple(effect.dst_pages.tolist())
                tag = effect.tag._replace(num_pages=len(dst)).pack()
                return "write", effect.job_id, effect.peer, src, dst, tag
            case effects.Cancel():
                return "cancel", effect.job_id
            case effects.Renew():
                return ("renew",)
            case effects.RemovePeer():
                return "remove", effect.peer
            case effects.Settle():
                return "settle", effect.token
            case events.RoomEnded():
                return "ended", effect.key, effect.poll is KVPoll.SUCCESS, effect.aux
            case events.RoomDrained():
                return "drained", effect.key
            case events.RoomOverdue():
                return "overdue", effect.key
            case events.Bootstrapped():
                return "boot", effect.key
            case events.SourceFree():
                return "free", effect.key
            case effects.AddPeer():
                return "load", effect.peer
            case effects.Expect() | effects.Connect() | effects.Disconnect():
                return None
        raise AssertionError(f"nothing carries out {effect}")
