"""Witnesses of the calls that an engine makes on its nodes, for the conformance kit.

A witness puts itself around the methods of one node. Between two calls of an engine's loop no page
changes its owner, so it can say exactly which bytes the engine had no right to change; and it fills
the slots that the engine has to write with junk, so that it sees what was not written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixkv import (
    DecodeNode,
    DecodeRequest,
    KVPool,
    OutOfPagesError,
    PrefillAsk,
    PrefillNode,
    PrefillRequest,
    Request,
)
from prefixkv.conformance.interface import Side
from prefixkv.errors import CallerError, InternalError
from prefixkv.spi import DeviceEvent, Pages, pages_for

ByteArray = npt.NDArray[np.uint8]
Tell = Callable[[str, str], None]  # law, what was seen

_UNOWNED: Final = ("FREE", "CACHED")
_JUNK_BYTES: Final = 0x40  # below it floats of every dtype are finite


def _token_bytes(pool: KVPool, pages: Pages | list[int], start: int, end: int) -> ByteArray:
    """Return the KV of tokens [start, end): [tokens, bytes]."""
    size = pool.layout.page_size
    first = start // size
    data = pool.read_pages(pages[first : pages_for(end, size)]).numpy()
    # [page, slab, slot, head, byte] becomes a row per slot.
    rows = data.transpose(0, 2, 1, 3, 4).reshape(len(data) * size, -1)
    return rows[start - first * size : end - first * size].copy()


@dataclass(slots=True)
class Notes:
    """What the witnesses of one run share. `probe` False: no byte is read or written, only calls
    are watched."""

    tell: Tell
    random: np.random.Generator
    probe: bool
    one_token: bool  # per request and step: nothing behind the next slot is written
    # Decode's, by room and generation, until prefill is asked.
    asks: dict[tuple[int, int], PrefillAsk] = field(default_factory=dict)
    added: list[tuple[Side, Request]] = field(default_factory=list)


class _Watch:
    """What is alike on both sides: calls that are refused, and pages that no request has."""

    WATCHED: tuple[str, ...] = ()
    side: Side

    def __init__(self, node: DecodeNode | PrefillNode, notes: Notes) -> None:
        self._pool, self.node = node.pool, node
        self._tell, self._random, self._notes = notes.tell, notes.random, notes
        # The inside of an opaque page has no slots that anyone but its kernels knows.
        self.probe = notes.probe and not node.pool.layout.opaque
        self.calls: Counter[str] = Counter()
        self.blamed: BaseException | None = None  # the exception that was reported already
        self._done: dict[Any, int] = {}  # tokens with KV of what the engine computes
        self._junk: dict[Any, ByteArray] = {}  # of these: from prefix_len on
        self._writing: list[tuple[DeviceEvent, set[int]]] = []  # pages, until the event
        self._unowned: list[int] = []
        self._bytes: ByteArray | None = None
        if notes.probe:  # what was never computed must not matter
            for page in range(node.pool.layout.num_pages):
                self._put_junk(page, slice(None))
        self._note_unowned()
        for name in self.WATCHED:
            setattr(node, name, self._watched(name, getattr(node, name)))

    def _watched(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        before = getattr(self, f"_before_{name}", None)
        after = getattr(self, f"_after_{name}", None)

        @wraps(inner)
        def call(*args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            self.look(f"{self.side}'s {name}")
            if before is not None:
                before(*args, **options)
            try:
                result = inner(*args, **options)
                if after is not None:
                    after(result, *args, **options)
                return result
            except OutOfPagesError as error:
                self._short(error, *args, **options)
                raise
            except (CallerError, InternalError) as error:
                law = "calls" if isinstance(error, CallerError) else "law 1"
                self.blamed = error
                self._tell(law, f"{self.side}'s {name} raised {type(error).__name__}: {error}")
                raise
            finally:
                # Only here do pages change their owner.
                self._note_unowned()

        return call

    def _short(self, error: OutOfPagesError, *args: Any, **options: Any) -> None:
        """The watched call found too few pages."""

    def look(self, when: str) -> None:
        """Compare the bytes that the engine may not have changed since the last call."""
        if self._bytes is None:
            return
        now = self._pool.read_pages(self._unowned).numpy()
        changed = (now != self._bytes).any(axis=(1, 2, 3, 4))
        if changed.any():
            pages = [page for page, is_changed in zip(self._unowned, changed, strict=True)
                     if is_changed]  # fmt: skip
            state = self.node.pages.allocator.state(pages[0]).name.lower()
            self._tell("law 4", f"before {when}, {self.side}'s engine wrote page {pages[0]}, which "
                       f"is {state} ({len(pages)} such pages)")  # fmt: skip
            self._bytes = now

    def _note_unowned(self) -> None:
        """Remember the bytes of the pages that no request has, as the call left them."""
        if self.probe:
            state = self.node.pages.allocator.state
            self._writing = [one for one in self._writing if not one[0].query()]
            busy = set().union(*(pages for _, pages in self._writing))
            everything = range(self._pool.layout.num_pages)
            self._unowned = [page for page in everything
                             if state(page).name in _UNOWNED and page not in busy]  # fmt: skip
            self._bytes = self._pool.read_pages(self._unowned).numpy()

    def _put_junk(self, page: int, slots: slice) -> None:
        data = self._pool.read_pages([page])
        part = data.numpy()[0, :, slots]
        part[:] = self._random.integers(0, _JUNK_BYTES, part.shape, np.uint8)
        self._pool.write_pages([page], data)

    def _handed_out(self, result: list[Any], limit: Any = None) -> None:
        """Put junk where the engine has to write KV of requests that it is to compute."""
        size = self._pool.layout.page_size
        for req in result:
            first = self._done[req] = req.prefix_len
            if self.probe and first < req.fill_len:  # else it lacks a state alone
                for at, page in enumerate(req.pages[first // size :].tolist()):
                    self._put_junk(page, slice(None if at else first % size, None))
                self._junk[req] = _token_bytes(self._pool, req.pages, first, req.fill_len)

    def _check_computed(self, req: Any, end: int, event: DeviceEvent | None) -> None:
        """Tell if a chunk is not written, as far as `event` lets it be looked at."""
        junk, start, begin = self._junk.get(req), self._done.get(req, end), req.prefix_len
        if junk is None or req.state.ended or not start < end <= req.fill_len:
            return
        if event is not None and not event.query():
            del self._junk[req]
            return
        now = _token_bytes(self._pool, req.pages, start, end)
        same = (now == junk[start - begin : end - begin]).all(axis=1)
        unwritten = np.flatnonzero(same) + start
        if len(unwritten):
            self._tell("law 8", f"{req.rid}: tokens up to {end} were handed over, and the KV of "
                       f"token {unwritten[0]} was not computed (computing begins at prefix_len, "
                       f"{begin})")  # fmt: skip

    def _explain_computed(self) -> Iterator[tuple[str, str]]:
        for req, done in self._done.items():
            if not req.state.ended:
                so_far = f"{done} of its {req.fill_len} tokens came"
                yield "law 7", f"{req.rid} was handed out to be computed, {so_far}"

    def _never_called(self, *names: str) -> Iterator[tuple[str, str]]:
        for name in names:
            if not self.calls[name]:
                yield "calls", f"{self.side}'s engine never calls {name}"


class _Slot(NamedTuple):
    """A slot with junk in it, and the KV that it had before."""

    position: int
    page: int
    junk: ByteArray
    before: ByteArray


class DecodeWitness(_Watch):
    WATCHED = ("add", "pop_preallocated", "pop_transferred", "pop_failed", "pop_needs_prefill",
               "pop_local", "computed", "append_many", "reserve_many", "finish", "retract",
               "abort")  # fmt: skip
    side = "decode"

    def __init__(self, node: DecodeNode, notes: Notes) -> None:
        super().__init__(node, notes)
        self._computes = node.config.compute is not None
        self.requests: dict[str, DecodeRequest] = {}
        self.rooms: dict[int, str] = {}  # whose they are
        # Tokens that found no page, by request, with their position.
        self._owed: dict[DecodeRequest, tuple[int, int]] = {}
        self._named: Counter[str] = Counter()  # to be retracted, and not retracted yet
        self._slots: dict[DecodeRequest, _Slot] = {}  # the next step has to write these
        self._written: dict[DecodeRequest, _Slot] = {}  # the step that found no page wrote these

    def _after_add(self, result: DecodeRequest, request: Request) -> None:
        self.requests[result.rid] = result
        self.rooms[request.room] = result.rid
        self._notes.added.append(("decode", request))

    def _after_pop_transferred(self, result: list[DecodeRequest]) -> None:
        for req in result:
            if req.resumed:
                self._mark(req, self._slots)

    _after_pop_local = _Watch._handed_out

    def _before_computed(
        self, req: DecodeRequest, end: int, aux: bytes = b"", after: DeviceEvent | None = None
    ) -> None:
        self._check_computed(req, end, after)

    def _after_computed(
        self, result: None, req: DecodeRequest, end: int, aux: bytes = b"",
        after: DeviceEvent | None = None,
    ) -> None:  # fmt: skip
        if after is not None:
            self._writing.append((after, set(req.pages.tolist())))
        self._done[req] = end
        if end == req.fill_len:
            self._forget_computed(req)

    def _after_pop_failed(self, result: list[DecodeRequest], *args: Any, **options: Any) -> None:
        for req in result:
            self._forget_computed(req)

    def _forget_computed(self, req: DecodeRequest) -> None:
        self._done.pop(req, None)
        self._junk.pop(req, None)

    def _after_pop_needs_prefill(self, result: list[PrefillAsk]) -> None:
        for ask in result:
            self._notes.asks[ask.room, ask.generation] = ask

    def _before_append_many(self, reqs: Sequence[DecodeRequest], token_ids: Sequence[int]) -> None:
        self._check_not_again()
        for req, token in zip(reqs, token_ids, strict=False):
            owed = self._owed.get(req)
            if owed is not None and owed[0] == len(req.output) and owed[1] != token:
                self._tell("tokens", f"{req.rid}: token {owed[0]} was {owed[1]} when it found no "
                           f"page, and then {token}")  # fmt: skip
            slot = self._slots.pop(req, None)
            if slot is not None and self._has_junk(req, slot):
                self._tell("law 8", f"{req.rid}: a token was appended, and the KV of the one "
                           f"before it, at position {slot.position}, was not written")  # fmt: skip

    def _check_not_again(self) -> None:
        """Put back what junk has hidden since a step found no page; tell if it was repeated."""
        size = self._pool.layout.page_size
        for req, slot in self._written.items():
            if self._has_junk(req, slot):
                data = self._pool.read_pages([slot.page])
                kept = data.numpy()[0, :, slot.position % size]
                kept[:] = slot.before.reshape(kept.shape)
                self._pool.write_pages([slot.page], data)
            elif not req.state.ended and req.kv_len == slot.position and req.pages_held is not None:
                self._tell(
                    "tokens",
                    f"{req.rid}: its step at position {slot.position} found no "
                    "page for the token, and was made again: the token was not kept",
                )
        self._written.clear()

    def _has_junk(self, req: DecodeRequest, slot: _Slot) -> bool:
        """Return whether a slot is as `_mark` has left it, and still the request's next one."""
        size = self._pool.layout.page_size
        if req.pages_held is None or slot.position != req.kv_len:
            return False
        if req.pages[slot.position // size] != slot.page:
            return False
        now = _token_bytes(self._pool, req.pages, slot.position, slot.position + 1)
        return np.array_equal(now[0], slot.junk)

    def _mark(self, req: DecodeRequest, slots: dict[DecodeRequest, _Slot]) -> None:
        """Put junk into the slot at the request's `kv_len`, and remember it in `slots`."""
        size, position = self._pool.layout.page_size, req.kv_len
        if not self.probe or not self._notes.one_token or position // size >= len(req.pages):
            return
        page = int(req.pages[position // size])
        before = _token_bytes(self._pool, req.pages, position, position + 1)[0]
        # One slot alone: what lies behind it may be a draft's.
        self._put_junk(page, slice(position % size, position % size + 1))
        junk = _token_bytes(self._pool, req.pages, position, position + 1)[0]
        slots[req] = _Slot(position, page, junk, before)

    def _after_append_many(
        self, result: None, reqs: Sequence[DecodeRequest], token_ids: Sequence[int]
    ) -> None:
        for req in reqs:
            self._owed.pop(req, None)
            if not req.state.ended:
                self._mark(req, self._slots)

    def _short(self, error: OutOfPagesError, *args: Any, **options: Any) -> None:
        reqs, token_ids = args
        if isinstance(token_ids, int):  # a reservation: nothing was sampled for it
            return
        self._owed.update(
            (req, (len(req.output), int(token)))
            for req, token in zip(reqs, token_ids, strict=True) if not req.state.ended
        )  # fmt: skip
        self._named.update(error.retract[:1])
        # The step has written the newest tokens' KV. Nothing reads it before the tokens are
        # appended, so junk may lie there until then: it shows a step that is made again.
        for req in reqs:
            if not req.state.ended and req.output:
                self._mark(req, self._written)

    def _after_retract(self, result: None, rid: str, *args: Any, **options: Any) -> None:
        """Owe no token to a request that does not run any more."""
        for kept in (self._owed, self._slots, self._written):
            kept.pop(self.requests[rid], None)
        # One retraction may be enough for all that were named.
        self._named.clear()

    def explain(self) -> Iterator[tuple[str, str]]:
        """Yield why decode may not come to rest: (law, text) each."""
        loop = ["pop_preallocated", "pop_transferred", "pop_failed", "pop_needs_prefill"]
        yield from self._never_called(*loop, *["pop_local"] * self._computes)
        for rid, times in self._named.items():
            yield "order", f"{rid} was named for retraction {times} times, and was not retracted"
        for req in self._owed:
            if not req.state.ended and not self._named:
                num = len(req.output)
                yield "tokens", f"{req.rid}: its token {num} had no page, and was never appended"
        for (_, generation), ask in self._notes.asks.items():
            yield "order", f"prefill was never asked for {ask.rid} again (generation {generation})"
        for req in self.requests.values():
            state, num = req.state.value, len(req.output)
            if state == "running" and num >= req.max_new_tokens:
                yield "law 2", f"{req.rid} has all its tokens, and was never finished"
            elif not req.state.ended:
                so_far = f"{num} of {req.max_new_tokens} tokens"
                yield "law 7", f"{req.rid} is {state} for ever, with {so_far}"
        yield from self._explain_computed()


class PrefillWitness(_Watch):
    WATCHED = ("add", "pop_bootstrapped", "send_chunk", "pop_sent", "pop_failed", "abort")
    side = "prefill"

    def __init__(self, node: PrefillNode, notes: Notes) -> None:
        super().__init__(node, notes)
        self._handed: dict[PrefillRequest, tuple[list[int], ByteArray]] = {}

    def _before_add(self, request: Request) -> None:
        self._notes.added.append(("prefill", request))
        ask = self._notes.asks.pop((request.room, request.generation), None)
        if ask is None:
            return
        tokens = np.asarray(ask.tokens)
        for name, wanted, got in (
            ("tokens", tokens.tolist(), request.key.tokens().tolist()),
            ("namespace", ask.namespace, request.key.namespace),
            ("cacheable", ask.cacheable, request.cacheable),
            ("decode", ask.decode, request.decode),
        ):
            if wanted != got:
                self._tell("order", f"{ask.rid}: prefill was asked again with another {name}")

    _after_pop_bootstrapped = _Watch._handed_out

    def _before_send_chunk(
        self, req: PrefillRequest, end: int, last: bool = False, aux: bytes = b"",
        ready: Any = None, state_slot: int = -1,
    ) -> None:  # fmt: skip
        self._check_computed(req, end, ready)

    def _after_send_chunk(
        self, result: int, req: PrefillRequest, end: int, *args: Any, **options: Any
    ) -> None:
        if self._done.pop(req, None) is not None and end < req.fill_len:
            self._done[req] = end
        if req in self._junk and req.pages_held is not None:
            pages = req.pages.tolist()
            self._handed[req] = pages, _token_bytes(self._pool, pages, 0, end)

    def look(self, when: str) -> None:
        """Also compare what was handed over, until its request has ended."""
        super().look(when)
        for req, (pages, before) in list(self._handed.items()):
            if req.state.value not in ("computing", "sending"):
                del self._handed[req]
                continue
            # Where the tree had a page already, the request's row names the tree's from then on.
            now = _token_bytes(self._pool, pages, 0, len(before))
            size, present = self._pool.layout.page_size, req.pages.tolist()
            there = [pages[i // size] == present[i // size] for i in range(len(before))]
            changed = np.flatnonzero((now != before).any(axis=1) & np.array(there))
            if len(changed):
                self._tell("law 5", f"{req.rid}: the KV of token {changed[0]} changed before "
                           f"{when}, after it was handed over")  # fmt: skip
                self._handed[req] = pages, now

    def explain(self) -> Iterator[tuple[str, str]]:
        yield from self._never_called("pop_bootstrapped", "pop_sent", "pop_failed")
        yield from self._explain_computed()
