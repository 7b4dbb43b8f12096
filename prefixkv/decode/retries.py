"""Retries of a request after a failed transfer: how many, and at which prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from prefixkv.config import Retarget
from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import RequestError, UserErrors


@dataclass(frozen=True, slots=True)
class Retries:
    """Limit of `most` retries per request, and the user's choice of worker for each.

    An exception that `retarget` raises is kept in `errors`.
    """

    most: int
    retarget: Retarget | None
    errors: UserErrors

    def next_prefill(self, req: DecodeRequest, error: Exception) -> str | None:
        """Return the address that the user wants for the next attempt; None: the same as before."""
        if self.retarget is None:
            return None
        # The user's code runs in the middle of a change: what it raises, and what it returns that
        # is no address, must not stop that. The retry then goes where the last attempt went.
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
