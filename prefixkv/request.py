"""A request as an engine submits it, the same on both sides."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec
import numpy as np

from prefixkv.cache.radix_key import RadixKey, check_size
from prefixkv.digest import begin_hash, prompt_digest
from prefixkv.errors import RequestError, shown, shown_namespace, travels
from prefixkv.paging import MAX_INDEX

MAX_TEXT_CHARS: Final = 1024
"""Limit for a request's name, and for the addresses and names that it gives."""

RETURNS_AFTER_S: Final = (30, 120, 600)
"""Classes for `Hints.returns_after`: a pause is of the first one that it does not exceed."""

MAX_SESSION_CHARS: Final = 256


class DeviceEvent(Protocol):
    """The type of `ready=` and `after=`: a CUDA event, or any object with `query()`."""

    def query(self) -> bool: ...


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """What a client says of the session that a request belongs to. Never a promise: nothing but
    pages of its own namespace is kept or lost by it (docs/policies.md has a table).

    `msgspec.convert` makes one of a client's JSON, and ignores fields that it does not know.

    Args:
        session: a name for the session, unique in its namespace; at most 256 characters. It is
            needed to announce the next turn (`DecodeNode.announce`).
        ends: no further turn comes.
        returns_after: the next turn comes within 30, 120 or 600 seconds (`RETURNS_AFTER_S`).
        shared: other sessions begin with this prompt, so it does not go with this session.
        demote: this path is not needed again; the session goes on elsewhere.
        version: of this record.
    """

    session: Annotated[str, msgspec.Meta(max_length=MAX_SESSION_CHARS)] = ""
    ends: bool = False
    returns_after: Literal[30, 120, 600] | None = None
    shared: bool = False
    demote: bool = False
    version: Literal[1] = 1

    @property
    def continues(self) -> float | None:
        """What `finish` is told unless the engine says it: seconds, 0 for an end, None."""
        return 0.0 if self.ends or self.demote else self.returns_after


NO_HINTS: Final = Hints()


@dataclass(slots=True, eq=False)
class Request:
    """One request. Its tokens are packed and checked once, when it is made.

    Args:
        rid: the engine's name for it, unique on a node while the request lives.
        tokens: the prompt; a sequence of ints, an int32/int64 array or tensor, or a RadixKey (which
            then names the namespace).
        max_new_tokens: the most tokens that may be generated, at least 1 (decode).
        room: uint64 that names the transfer between the two workers, drawn by the decode worker's
            side; free for use again once it has ended on both.
        prefill: address of the prefill worker's control socket (decode).
        decode: name of the decode worker that it is for, `DecodeConfig.name` (prefill).
        namespace: requests of two namespaces never share KV (LoRA adapter, tenant, salt, images):
            None, an int, a str, bytes, or a tuple of these, 64 KiB at most.
        cacheable: False for warm-up: neither matched nor kept.
        generation: number of the attempt at this room, which decode gives (`PrefillAsk`).
        priority: for eviction, higher stays longer; and for admission by `priority`, higher goes
            first.
        deadline_s: seconds after `add`. On decode: its KV has to be here by then, else it fails,
            with AdmissionTimeoutError or TransferTimeoutError. On prefill: it has to be sent by
            then. None: it waits for as long as its peer is heard, up to
            `ControlConfig.longest_wait_s`, and on decode in the queue for
            `DecodeConfig.waiting_timeout_s`.
        may_compute: False where something else than its KV is wanted of prefill: decode does not
            compute it itself, whatever `DecodeConfig.compute` says.
        hints: what its client says of the session (decode).

    Raises TokenError: tokens that are not integers in [0, 2**31). RequestError: another argument of
    the wrong type or out of its range; names it.

    `digest` is the prompt's (`prompt_digest`), which both sides compare. A node works it out from
    what its tree knows of the prompt's beginning.
    """

    rid: str
    tokens: Any
    max_new_tokens: int = 256
    room: int = field(kw_only=True)
    prefill: str = ""
    decode: str = ""
    namespace: Hashable = field(default=None, repr=False)  # as the key shows it
    cacheable: bool = True
    generation: int = 0
    priority: int = 0
    deadline_s: float | None = None
    may_compute: bool = True
    hints: Hints = NO_HINTS
    key: RadixKey = field(init=False)
    _digest: bytes = field(init=False, default=b"", repr=False)

    def __post_init__(self) -> None:
        # Two different namespaces for one request: no guess which one is meant.
        if isinstance(self.tokens, RadixKey) and self.namespace is not None:
            _check_namespace(self.namespace)
            if self.namespace != self.tokens.namespace:
                ours, theirs = map(shown_namespace, (self.namespace, self.tokens.namespace))
                raise RequestError(f"namespace is {ours}, that of the key is {theirs}")
        # Everything is checked here, where the stack still shows the caller at fault; what comes
        # later, down to the frames, relies on it.
        self.key = key = RadixKey(self.tokens, self.namespace)
        _check_text("rid", self.rid)
        if not len(key):
            raise RequestError(f"request {self.rid!r} has no tokens")
        if key.namespace is not None:
            _check_namespace(key.namespace)
            begin_hash(key.namespace)  # raises unless it has the same bytes everywhere
        _check_text("prefill", self.prefill)
        _check_text("decode", self.decode)
        # Values are made plain Python objects: numpy's do not travel in a frame.
        if type(self.cacheable) is not bool:
            if not isinstance(self.cacheable, np.bool_):
                raise RequestError(f"cacheable is {shown(self.cacheable)}, True or False is needed")
            self.cacheable = bool(self.cacheable)
        if type(self.may_compute) is not bool:
            raise RequestError(f"may_compute is {shown(self.may_compute)}, True or False is needed")
        if self.hints is not NO_HINTS:
            _check_hints(self.hints)
        self.max_new_tokens = whole_number("max_new_tokens", self.max_new_tokens, 1, MAX_INDEX + 1)
        self.room = whole_number("room", self.room, 0, 2**64)
        self.generation = whole_number("generation", self.generation, 0, MAX_INDEX + 1)
        self.priority = whole_number("priority", self.priority, -(2**63), 2**63)
        if self.deadline_s is not None:
            self.deadline_s = _seconds("deadline_s", self.deadline_s)

    @property
    def digest(self) -> bytes:
        """The prompt's digest, 32 bytes; worked out at first use, O(tokens)."""
        if not self._digest:
            self._digest = prompt_digest(self.key)
        return self._digest

    def know_digest(self, digest: bytes) -> None:
        """Take over the digest, worked out elsewhere."""
        self._digest = digest


def check_request(request: object) -> None:
    if not isinstance(request, Request):
        raise RequestError(f"request is a {type(request).__name__}, a Request is needed")


def check_rid(rid: object) -> None:
    if not isinstance(rid, str):
        raise RequestError(f"rid is {shown(rid)}, the id of a request, a string, is needed")


def check_event(name: str, event: object) -> None:
    """Raise RequestError unless `event` is None or has a `query()`."""
    if event is not None and not callable(getattr(event, "query", None)):
        raise RequestError(f"{name} is a {type(event).__name__}, it has no query()")


def _check_namespace(namespace: Hashable) -> None:
    """Raise RequestError for a namespace that a dictionary would not find again: a list, NaN."""
    if namespace is None:
        return
    check_size(namespace)  # first, since all that follows visits each part of it
    # `==` of an array raises ValueError where a truth value is needed, that of a tensor
    # RuntimeError, as does one without end.
    try:
        hash(namespace)
        found_again = bool(namespace == namespace)
    except (TypeError, ValueError, RuntimeError):
        found_again = False
    if not found_again:
        raise RequestError(
            f"namespace is {shown_namespace(namespace)}, it has to be hashable and equal to itself"
        )


def check_session(session: object, namespace: Hashable) -> None:
    """Raise RequestError for what no `Hints` names a session by, or no request a namespace."""
    _check_text("session", session)
    _check_namespace(namespace)


def _check_hints(hints: Any) -> None:
    if not isinstance(hints, Hints):
        raise RequestError(f"hints is a {type(hints).__name__}, a Hints is needed")
    try:
        msgspec.convert(msgspec.structs.asdict(hints), Hints)
    except msgspec.ValidationError as error:
        raise RequestError(str(error).replace("$.", "hints.")) from None
    _check_text("hints.session", hints.session)
    if hints.ends and hints.returns_after is not None:
        raise RequestError("hints.ends is True, hints.returns_after has to be None")


def _check_text(name: str, value: Any) -> None:
    """Raise RequestError for no string, a long one, or one that no message carries."""
    if type(value) is str and len(value) <= MAX_TEXT_CHARS and value.isascii():  # as a rule
        return
    if not isinstance(value, str):
        raise RequestError(f"{name} is {shown(value)}, a string is needed")
    if len(value) > MAX_TEXT_CHARS:
        raise RequestError(
            f"{name} has {len(value)} characters, at most {MAX_TEXT_CHARS} are taken"
        )
    if not travels(value):
        raise RequestError(f"{name} is {value!r}, which UTF-8 has no bytes for")


def whole_number(name: str, value: Any, low: int, end: int) -> int:
    """Return `value` as an int in [low, end), else raise RequestError. No frame takes numpy's."""
    if type(value) is int and low <= value < end:
        return value
    # Whatever is no integer becomes a value out of range: one error for both.
    try:
        whole = operator.index(value)
    except TypeError:
        whole = low - 1
    if isinstance(value, bool) or not low <= whole < end:
        raise RequestError(f"{name} is {shown(value)}, a whole number in [{low}, {end}) is needed")
    return whole


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = -1.0
    # Written so that NaN fails too.
    if isinstance(value, bool | str) or not seconds >= 0:
        raise RequestError(f"{name} is {shown(value)}, a number of at least 0 is needed")
    return seconds
