"""All exceptions, grouped by the side at fault.

`CallerError`: the engine or operator passed something wrong; state is as before the call.
`CapacityError`: nothing is wrong, there is no room; the numbers say how much is missing.
`PeerError`: another process sent or did something it must not; it harms its own rooms only.
`TransferError`: a write or a request's transfer failed; the request ends, the node goes on.
`InternalError`: a law of ours is broken. Report it; the state is in the message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from hashlib import blake2b
from traceback import format_exception, format_exception_only


class PrefixKVError(Exception):
    """Root of all errors raised by prefixkv."""


# --- the caller's -------------------------------------------------------------------------------


# A ValueError too, so that code that knows nothing of prefixkv handles a bad argument as usual.
class CallerError(PrefixKVError, ValueError):
    """An argument or a call that the contract forbids. Nothing was changed."""


class ConfigError(CallerError):
    """A setting out of its range; names the setting, the value and the bound."""


class TokenError(CallerError):
    """Tokens that are not integers in [0, 2**31)."""


class LockError(CallerError):
    """A lock unlocked twice, or a lock or match of another cache."""


class PageStateError(CallerError):
    """A page id out of range, named twice, or not in the state that a transition starts from."""


class RequestError(CallerError):
    """Cannot be taken: too long for the pool, a duplicate id, a room in use, ended."""


class AuxTooLargeError(CallerError):
    """The aux payload of a request is larger than its frame may be."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"aux payload of {size_bytes} bytes, the limit is {limit_bytes}")


class TraceError(CallerError):
    """A trace file that cannot be read, or a malformed line in it (its number is named)."""


class DrainingError(RequestError):
    """A request for a node that is being drained: it takes no new ones."""


class LeaseError(CallerError):
    """A staging lease ended twice, or in a state that it cannot be ended from."""


class ClosedError(CallerError):
    """A call on a node, channel or transport that has been closed."""


# --- no room ------------------------------------------------------------------------------------


class CapacityError(PrefixKVError):
    """Not enough of something; a later call may succeed."""


class OutOfPagesError(CapacityError):
    """Fewer pages are free or evictable than asked for.

    `retract` names the requests that would make room if retracted, best first (empty if unknown).
    """

    def __init__(
        self, needed: int, free: int, evictable: int = 0, retract: tuple[str, ...] = ()
    ) -> None:
        hint = f"; retract {', '.join(retract)}" if retract else ""
        super().__init__(f"{needed} pages needed, {free} free and {evictable} evictable{hint}")
        self.needed = needed
        self.free = free
        self.evictable = evictable
        self.retract = retract


class AdmissionTimeoutError(CapacityError):
    """A request was not admitted by its deadline: there was no room, or others came first."""


# --- a peer's -----------------------------------------------------------------------------------


class PeerError(PrefixKVError):
    """A peer sent or did what the protocol forbids."""


class ProtocolError(PeerError):
    """A malformed, unknown, stale or out-of-range message. Counted and dropped, never fatal."""


class VersionError(ProtocolError):
    """A frame of another version of the protocol; names both numbers."""

    def __init__(self, theirs: int, ours: int) -> None:
        super().__init__(f"protocol version {theirs}, ours is {ours}")
        self.theirs = theirs
        self.ours = ours


class OverpromisedError(ProtocolError):
    """A promise by which a peer has promised more pages at once than its pool has."""


class FormerLifeError(ProtocolError):
    """A message of an incarnation that is over: it was replaced, it was fenced, or it has left.

    `life` is its `PeerId`, (name, incarnation); None if it is not known.
    """

    def __init__(self, text: str, life: tuple[str, int] | None = None) -> None:
        super().__init__(text)
        self.life = life


class HandshakeError(PeerError):
    """Two nodes that cannot work together. Names the field, what is wrong with it, and both values.

    `option` is the engine's option that sets the field, as its user knows it. `text` is the whole
    message, where it is of no two values, and no option sets them.
    """

    def __init__(
        self,
        field: str,
        ours: object,
        theirs: object,
        reason: str = "differs",
        option: str = "",
        text: str = "",
    ) -> None:
        name = f"{field} ({option})" if option else field
        super().__init__(text or f"{name} {reason}: ours {ours!r}, theirs {theirs!r}")
        self._has_own_text = bool(text)
        self.field = field
        self.ours = ours
        self.theirs = theirs
        self.reason = reason
        self.option = option

    def named(self, options: Mapping[str, str]) -> HandshakeError:
        """Return this error with the engine's option, if `options` has one for the field.

        A tag is words of the form `key=value`. Each word counts as a field, and those that differ
        are named.

        >>> HandshakeError("tag", "a=1 b=2", "a=1 b=3").named({"tag.b": "--b"})
        HandshakeError("tag (--b) differs: ours 'a=1 b=2', theirs 'a=1 b=3'")
        >>> HandshakeError("groups[0].window", 24, 32).named({"groups": "--model"})
        HandshakeError('groups[0].window (--model) differs: ours 24, theirs 32')
        """
        if self._has_own_text:
            return self
        field = self.field.removeprefix("layout.")
        found = [
            options[key] for key in _fields_of(field, self.ours, self.theirs) if key in options
        ]
        # Each option once, in the order of the words; else that of the field as a whole, or of the
        # list that it is in.
        whole = options.get(field) or options.get(field.partition("[")[0], "")
        option = ", ".join(dict.fromkeys(found)) or whole
        if not option:
            return self
        return HandshakeError(self.field, self.ours, self.theirs, self.reason, option)


def _fields_of(field: str, ours: object, theirs: object) -> list[str]:
    if not isinstance(ours, str) or not isinstance(theirs, str):
        return []
    # Words that only one side has. Listed in the order of both tags, so that the message is stable.
    words = set(ours.split()) ^ set(theirs.split())
    keys = [word.partition("=")[0] for word in (*ours.split(), *theirs.split()) if word in words]
    return [f"{field}.{key}" for key in keys]


class NameTakenError(HandshakeError):
    """Two processes have one worker's name. `theirs` says which one it belongs to."""

    def __init__(self, why: str) -> None:
        super().__init__("name", "", why, "is taken", text=why)


class RefusedError(HandshakeError):
    """A peer refuses to work with us. `theirs` is what it says."""

    def __init__(self, by: str, why: str) -> None:
        super().__init__(f"refused by {by}", "", why, "", text=f"refused by {by}: {why}")


class MetadataError(HandshakeError):
    """A peer's NIXL metadata that is not loaded here: it is of another agent than the peer's."""

    def __init__(self, why: str) -> None:
        text = f"NIXL metadata is refused: {why}"
        super().__init__("agent_metadata", None, why, "is refused", text=text)


# --- a transfer's -------------------------------------------------------------------------------


class TransferError(PrefixKVError):
    """A request's KV did not arrive whole."""


class TransferTimeoutError(TransferError):
    """A waiting state outlived its deadline."""


class PeerLostError(TransferError):
    """The peer of a transfer was restarted, fenced or cut off.

    `peer` is its `PeerId`, (name, incarnation), as `fence` takes it; None if it is not known.
    """

    def __init__(self, text: str, peer: tuple[str, int] | None = None) -> None:
        super().__init__(text)
        self.peer = peer


class PromptMismatchError(TransferError):
    """Two sides were given different prompts or namespaces for one room. Nothing was written."""


class ChecksumError(TransferError):
    """A page does not hold the bytes that were written to it; the text names room, page and chunk.
    Nothing of the room is cached."""


class WeightsVersionError(TransferError):
    """The weights of one side are of another version than the request's KV.

    `request_version` is the version that the request was promised under, or runs under.
    `current_version` is what `whose` has now. `option` is the engine's option that sets it.
    """

    def __init__(
        self,
        request_version: str,
        current_version: str,
        whose: str = "this worker",
        option: str = "",
    ) -> None:
        name = f"weights_version ({option})" if option else "weights_version"
        super().__init__(
            f"{name} differs: the request is of {request_version!r}, "
            f"{whose} has {current_version!r}"
        )
        self.versions = request_version, current_version
        """Version that the request has, and the other version."""
        self.whose = whose

    def named(self, options: Mapping[str, str]) -> WeightsVersionError:
        """Return this error with the engine's option for `weights_version`, if there is one."""
        option = options.get("weights_version", "")
        return WeightsVersionError(*self.versions, self.whose, option) if option else self


class AbortedError(TransferError):
    """The request was aborted, by this side or the other."""


class NotFiniteError(TransferError):
    """An engine has computed NaN, or infinity, for the request: its `fail` takes this error."""


# --- ours ---------------------------------------------------------------------------------------


class InternalError(PrefixKVError, AssertionError):
    """An invariant of prefixkv is broken; the message carries the state."""


def ours(error: BaseException) -> PrefixKVError:
    """Return the error that ends a request: a foreign one (of the engine's event, of a library, of
    the system) is the cause of a TransferError. Never raises.

    >>> ours(OSError("gone"))
    TransferError('OSError: gone')
    """
    if isinstance(error, PrefixKVError):
        return error
    wrapped = TransferError(format_exception_only(error)[0].strip())
    wrapped.__cause__ = error
    return wrapped


# --- a user's code ------------------------------------------------------------------------------


class UserErrors:
    """Exceptions of the user's code (a policy, a log handler, an event), caught while state was
    changed.

    The change goes on without the user's result. A later call raises the first of them, before it
    changes anything: each at most once, and never two calls in a row, so that a loop that continues
    gets its results. `say` gets the text of what is not raised.
    """

    def __init__(self, say: Callable[[str], object] | None = None) -> None:
        self.say = say
        # All that were caught. Only the first is kept to be raised: it mostly causes the others.
        self.num = 0
        self.due: Exception | None = None
        self._raised_last = False

    def caught(self, error: Exception) -> None:
        """Note an exception, to be raised later. Call it in the handler that caught it."""
        self.num += 1
        if self.due is None:
            self.due = error

    def said(self, what: str, error: Exception) -> None:
        """Count an exception that is not to be raised, and hand it to `say`."""
        self.num += 1
        if self.say is not None:
            self.say("\n".join([what, *format_exception(error)]))

    def raise_due(self) -> None:
        """Raise the first exception since the last one raised, but never in two calls in a row."""
        if self._raised_last or self.due is None:
            self._raised_last = False
            return
        # Cleared before raising, so that it is raised once.
        error, self.due = self.due, None
        self._raised_last = True
        raise error


# --- checks -------------------------------------------------------------------------------------


def travels(text: str) -> bool:
    """Return whether a message can carry `text`: it has no unpaired surrogates, as of JSON.

    >>> travels("id-1"), travels("\\ud800")
    (True, False)
    """
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """Return an argument as an error shows it, cut to 100 characters. Never raises.

    >>> shown([1, 2]), shown(10**5000)
    ('[1, 2]', 'a int')
    """
    try:
        return repr(value)[:100]
    except Exception:
        return f"a {type(value).__name__}"


def nearest(name: str, known: Collection[str]) -> str:
    """Return the end of an error text about an unknown name: the nearest known one.

    >>> nearest("lruu", ["adaptive", "lru"]), nearest("x", ["lru"])
    ('; the nearest is lru', '')
    """
    near = get_close_matches(name, sorted(known), n=1)
    return f"; the nearest is {near[0]}" if near else ""


def shown_secret(value: object) -> str:
    """Return 24 characters that stand for a secret in logs, labels and errors.

    >>> shown_secret("tenant 1")
    'blake2b:72f8be1a12c4e215'
    """
    return "blake2b:" + blake2b(repr(value).encode(), digest_size=8).hexdigest()


def shown_namespace(namespace: object) -> str:
    """Return a namespace as logs, labels and errors show it. Never raises.

    Text, numbers and a `Namespace`, which hides its salt itself, are shown as they are. Of bytes
    and tuples any part may be a salt.

    >>> shown_namespace("legal"), shown_namespace(("legal", "tenant 1"))
    ("'legal'", 'blake2b:d593ede5bebb8484')
    """
    if type(namespace) in (tuple, list, bytes):
        return shown_secret(namespace)
    return shown(namespace)


def check_laws(laws: Mapping[str, bool], *state: object) -> None:
    """Raise InternalError, naming each law that is broken, with the state.

    >>> check_laws({"every page has one owner": False}, "pages 3 and 4")
    Traceback (most recent call last):
    prefixkv.errors.InternalError: broken: every page has one owner; pages 3 and 4
    """
    if broken := [law for law, holds in laws.items() if not holds]:
        raise InternalError(f"broken: {'; '.join(broken)}; {', '.join(map(str, state))}")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError unless `value` is in [low, high]."""
    if not low <= value <= high:
        raise ConfigError(f"{name} is {shown(value)}, must be in [{low}, {high}]")
