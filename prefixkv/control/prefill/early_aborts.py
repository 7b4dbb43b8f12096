"""Aborts that came before the engine's request. They are kept, so that it fails at once."""

from __future__ import annotations

from typing import Final, NamedTuple

from prefixkv.config import ControlConfig
from prefixkv.control.prefill.peers import Peer
from prefixkv.errors import TransferError
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.messages import Abort
from prefixkv.protocol.sender_events import abort_error

_MAX_REASON: Final = 1000  # characters


class _Early(NamedTuple):
    until_s: float
    error: TransferError
    digest: bytes  # of the aborted prompt; b"": of any prompt

    def is_of(self, digest: bytes) -> bool:
        return not (self.digest and digest) or self.digest == digest


class EarlyAborts:
    """Owned by a `PrefillControl`."""

    def __init__(self, timing: ControlConfig) -> None:
        self._timing = timing
        # By the decode worker's name, so that no other worker can fill its limit. Within one, in
        # the order of arrival, which is that of the deadlines: `expire` looks only at the first.
        self._aborted: dict[str, dict[RoomKey, _Early]] = {}

    def keep(self, key: RoomKey, abort: Abort, peer: Peer, now_s: float) -> None:
        """Keep an abort for `parked_timeout_s`: its request fails at once. Bounded per worker."""
        error = abort_error(abort.reason[:_MAX_REASON], abort.versions)
        self.keep_end(key, error, (abort.ticket, abort.digest), peer, now_s)

    def keep_end(
        self, key: RoomKey, error: TransferError, use: tuple[int, bytes], peer: Peer, now_s: float
    ) -> None:
        """Keep that a use of the room has ended with `error`; `use` is its ticket and digest."""
        ticket, digest = use
        # Even if the abort finds no space below, the use is over: a late promise for it is refused.
        peer.past.add((key, ticket), answered=True)
        # Before the limit is looked at: an earlier abort of this room gives its place back.
        self.take(key)
        kept = self._aborted.setdefault(key.decode, {})
        # Beyond a limit the abort is lost: the request then waits for its timeout, which costs the
        # peer only time. Nothing of another worker is ever evicted for it.
        if len(kept) < self._timing.max_parked_per_peer:
            until_s = now_s + self._timing.parked_timeout_s
            kept[key] = _Early(until_s, error, digest)

    def take(self, key: RoomKey, digest: bytes = b"") -> TransferError | None:
        """Remove and return the error of an abort of the room; None if there is none, or it was for
        another prompt than `digest` names (b"": any). Removed even then: the number is in use
        again."""
        early = self._aborted.get(key.decode, {}).pop(key, None)
        if early is None:
            return None
        return early.error if early.is_of(digest) else None

    def take_all(self, numbers: tuple[int, int]) -> TransferError | None:
        """Remove all aborts of the number, by any decode worker, and return one's error, or None.
        For an offer, which belongs to no worker yet."""
        keys = [RoomKey(*numbers, name) for name in self._aborted]
        errors = [error for key in keys if (error := self.take(key)) is not None]
        return errors[0] if errors else None

    def expire(self, now_s: float) -> None:
        """Forget the aborts that are due. O(expired + decode workers with an abort)."""
        for name, kept in list(self._aborted.items()):
            while kept and kept[key := next(iter(kept))].until_s <= now_s:
                self.take(key)
            if not kept:
                del self._aborted[name]

    def all(self) -> dict[RoomKey, str]:
        """Return the decode worker of each abort: for audits."""
        return {key: name for name, kept in self._aborted.items() for key in kept}
