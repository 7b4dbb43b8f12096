"""Classes that are chosen by name: eviction policies, admission policies."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from prefixkv.errors import ConfigError


class Named(Protocol):
    """An object whose class has a name to be chosen by."""

    name: str


T = TypeVar("T", bound=Named)
C = TypeVar("C", bound=type[Named])


class Registry(Generic[T]):
    """The classes of one kind, by name.

    Args:
        kind: what they are, for error texts.
        base: the class that all of them derive from; it may be abstract.
    """

    def __init__(self, kind: str, base: type[T]) -> None:
        self._kind = kind
        self._base = base
        self._classes: dict[str, type[T]] = {}

    def add(self, chosen: C) -> C:
        """Make a class known by its `name`; a decorator. It replaces one of the same name.

        Raises ConfigError, with nothing changed, for what is no class derived from the base, and a
        name that is no string.
        """
        given: Any = chosen
        if not isinstance(given, type) or not issubclass(given, self._base):
            raise ConfigError(f"{self._kind} {chosen!r} is no class derived from {self._base!r}")
        if not isinstance(getattr(given, "name", None), str) or not given.name:
            raise ConfigError(f"{self._kind} {chosen!r} has no name")
        self._classes[given.name] = given
        return chosen

    def names(self) -> list[str]:
        return sorted(self._classes)

    def make(self, chosen: str | T) -> T:
        """An object by its class's name, made with the default settings; or the object itself.

        Raises:
            ConfigError: an unknown name, or an object of another kind.
        """
        if isinstance(chosen, str):
            if chosen in self._classes:
                return self._classes[chosen]()
        elif isinstance(chosen, self._base):
            return chosen
        raise ConfigError(f"{self._kind} {chosen!r} is not one of {', '.join(self.names())}")
