"""Registries of classes that are chosen by name: eviction policies, admission policies."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from prefixkv.errors import ConfigError, nearest, shown


class Named(Protocol):
    """An object with the name that its class is chosen by."""

    name: str


T = TypeVar("T", bound=Named)
C = TypeVar("C", bound=type[Named])


class Registry(Generic[T]):
    """The classes of one kind, by name. `kind`: what they are, for error texts. `base`: the class
    that all of them derive from; it may be abstract. `default`: the name that "" stands for."""

    def __init__(self, kind: str, base: type[T], default: str = "") -> None:
        self._kind = kind
        self._base = base
        self.default = default
        self._classes: dict[str, type[T]] = {}

    def add(self, chosen: C) -> C:
        """Add a class under its `name`, in place of one of the same name (decorator).

        Raises ConfigError, with nothing changed, unless it is derived from the base and its name is
        a string.
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

    def use_by_default(self, chosen: type[T]) -> None:
        """Have "" stand for this class, which was added."""
        self.default = chosen.name

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self._classes)

    def explain(self, name: str) -> str:
        """Say why `name` names no class, with the known names and the nearest; "" where it does."""
        if name in self._classes:
            return ""
        return f"{name!r} is not one of {', '.join(self.names())}{nearest(name, self._classes)}"

    def make(self, chosen: str | T) -> T:
        """Return a new object of the class named `chosen`, with default settings; for "" of the
        default class; an object as it is. Raises ConfigError for an unknown name, or an object of
        another kind."""
        if isinstance(chosen, str):
            chosen = chosen or self.default
            if why := self.explain(chosen):
                raise ConfigError(f"{self._kind} {why}")
            return self._classes[chosen]()
        if not isinstance(chosen, self._base):
            raise ConfigError(
                f"{self._kind} {shown(chosen)} is not one of {', '.join(self.names())}"
            )
        return chosen
