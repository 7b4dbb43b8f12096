"""Registries of classes that are chosen by name: eviction policies, admission policies."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from prefixkv.errors import ConfigError, shown


class Named(Protocol):
    """An object with the name that its class is chosen by."""

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
        """Make a class (a policy, say) available in the registry by its `name`, replacing one of
        the same name. Works as a decorator.

        Raises:
            ConfigError: it is no class derived from the base, or its name is no string. Nothing was
                changed.
        """
        # Users call this too, so the types are checked, whatever the annotation says.
        given: Any = chosen
        if not isinstance(given, type) or not issubclass(given, self._base):
            raise ConfigError(
                f"{self._kind} {shown(chosen)} is no class derived from {self._base!r}"
            )
        if not isinstance(getattr(given, "name", None), str) or not given.name:
            raise ConfigError(f"{self._kind} {shown(chosen)} has no name")
        self._classes[given.name] = given
        return chosen

    def names(self) -> list[str]:
        """Return all names in the registry, sorted."""
        return sorted(self._classes)

    def make(self, chosen: str | T) -> T:
        """Return a new object of the registry's class named `chosen`, with default settings; an
        object is returned as is.

        Raises:
            ConfigError: an unknown name, or an object of another kind.
        """
        # An unknown name falls through to the error.
        if isinstance(chosen, str):
            if chosen in self._classes:
                return self._classes[chosen]()
        elif isinstance(chosen, self._base):
            return chosen
        raise ConfigError(f"{self._kind} {shown(chosen)} is not one of {', '.join(self.names())}")
