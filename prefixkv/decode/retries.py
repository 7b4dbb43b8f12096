"""Whether a request whose transfer has failed is asked for again, and at which prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from prefixkv.config import Retarget
from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import RequestError, UserErrors


@dataclass(frozen=True, slots=True)
class Retries:
    """At most `most` a request. `retarget` is the user's: what it raises is kept in `errors`."""

    most: int
    retarget: Retarget | None
    errors: UserErrors

    def next_prefill(self, req: DecodeRequest, error: Exception) -> str | None:
        """Where the user wants the next attempt; None: where the last one was."""
        if self.retarget is None:
            return None
        try:
            prefill = self.retarget(req, error)
            if prefill is not None:
                check_address(req.rid, prefill)
        except Exception as fault:
            self.errors.caught(fault)
            return None
        return prefill


def check_address(rid: str, prefill: object) -> None:
    """Raise RequestError for what cannot be the address of a prefill worker."""
    if not isinstance(prefill, str):
        raise RequestError(f"prefill is {prefill!r}, a string is needed")
    if not prefill:
        raise RequestError(f"request {rid!r} names no prefill worker")
