"""Protects staging's two machines rule by rule, without a transport: leases, receiver, sender.
The lease table's model is laws/lease_machine; with bytes and ranks, tests/support/sim_engines."""

from collections.abc import Callable
from typing import Any


class Saying:
    """A machine that is made of what it says its actions to: each call returns what was said."""

    def __init__(self, make: Callable[[Callable[[Any], None]], Any]) -> None:
        self._said: list[Any] = []
        self._machine = make(self._said.append)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._machine, name)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            self._said.clear()
            answer = found(*args)
            return [*self._said] if answer is None else answer

        return call
