"""Objects that are closed on leaving a `with`; those that are used from one thread, and the check
of that, which `PREFIXKV_DEBUG=1` turns on.

The thread that makes the first call owns the object from then on. Making the object is no call: a
thread may make one for another. Once the owner has ended, the next thread that calls owns it.

Without the variable nothing is checked, and nothing is paid for: only with it an object is made of
a derived class, which wraps each public method.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Final, Self

from prefixkv.errors import CallerError

VARIABLE: Final = "PREFIXKV_DEBUG"
"""Variable of the environment that turns the check on with "1". Read when an object is made."""


class Closing(ABC):
    """Base of classes with a `close`."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class OneThread(Closing):
    """Base of classes with objects that are used from one thread. `any_thread` names the methods
    that any thread may call."""

    any_thread: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, *_args: Any, **_named: Any) -> Self:
        made: type[Self] = _checked_class(cls) if os.environ.get(VARIABLE) == "1" else cls
        return super().__new__(made)


@functools.cache
def _checked_class(kind: type[Any]) -> type[Any]:
    @functools.wraps(kind.__init__)
    def init(self: Any, *args: Any, **named: Any) -> None:
        # The calls that a constructor makes of its own object make no owner.
        self._owner = None
        kind.__init__(self, *args, **named)
        self._owner = None

    methods = {
        name: _checked_method(kind, name)
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in kind.any_thread
    }
    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    # By the metaclass that the class has.
    make: Any = type(kind)
    made: type[Any] = make(kind.__name__, (kind,), {"__init__": init, **named, **methods})
    return made


def _checked_method(kind: type[Any], name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(kind, name))
    def checked(self: Any, *args: Any, **named: Any) -> Any:
        thread = threading.current_thread()
        owner, first = self._owner or (None, "")
        # An owner that has ended calls nothing any more.
        if owner is None or not owner.is_alive():
            self._owner = thread, name
        elif owner is not thread:
            raise CallerError(
                f"{kind.__name__}.{name} is called in thread {thread.name!r}, but the object is "
                f"used from thread {owner.name!r}, which called {first} first"
            )
        return getattr(kind, name)(self, *args, **named)

    return checked
