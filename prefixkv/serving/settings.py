"""Settings of a process: from a TOML file, the environment (`PREFIXKV_...`) and options, the later
before the earlier. Which there are follows from the fields of a dataclass.

A field that is a dataclass is a table of the file, `[control]`; its field `heartbeat_s` is the
option `--control-heartbeat-s` and the variable `PREFIXKV_CONTROL_HEARTBEAT_S`. With `flat` in its
metadata its fields are set as if they were its parent's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, NamedTuple, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of

from prefixkv.spi import ConfigError

PREFIX: Final = "PREFIXKV_"
_PLAIN: Final = (bool, int, float, str)

T = TypeVar("T")


class Setting(NamedTuple):
    """One setting. `name` has its table before it: "control_heartbeat_s"."""

    name: str
    key: tuple[str, ...]
    kind: type
    default: Any
    help: str

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


def settings_of(kind: type) -> list[Setting]:
    """Every setting of a dataclass; fields that are not plain values (nor tables of them) are none,
    and those of a field that its metadata names in `but`."""
    return list(_settings(kind, (), None, ()))


def _settings(
    kind: type, table: tuple[str, ...], base: Any, but: Collection[str]
) -> Iterator[Setting]:
    for field, its_kind in _fields(kind, but):
        default = _default(field) if base is None else getattr(base, field.name)
        key = (*table, field.name)
        plain, table_of = _plain(its_kind), _table_of(its_kind)
        if plain is not None:
            yield Setting("_".join(key), key, plain, default, field.metadata.get("help", ""))
        elif table_of is not None:
            yield from _settings(table_of, _key(field, table), default, _but(field))


def _fields(kind: type, but: Collection[str]) -> Iterator[tuple[Field[Any], Any]]:
    hints = hints_of(kind)
    for field in fields(kind):
        if field.name not in but:
            yield field, hints[field.name]


def _but(field: Field[Any]) -> Collection[str]:
    but: Collection[str] = field.metadata.get("but", ())
    return but


def _key(field: Field[Any], table: tuple[str, ...]) -> tuple[str, ...]:
    return table if field.metadata.get("flat") else (*table, field.name)


def _options_of(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _table_of(kind: Any) -> type | None:
    found = [one for one in _options_of(kind) if isinstance(one, type) and is_dataclass(one)]
    return found[0] if found else None


def _plain(kind: Any) -> type | None:
    for one in _options_of(kind):
        if get_origin(one) is Literal:
            return str
        if get_origin(one) is Mapping:
            return dict
        if one in _PLAIN:
            return one  # type: ignore[no-any-return]
    return None


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None


# --- where they come from -------------------------------------------------------------------------


def load(
    kind: type[T],
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    but: Collection[str] = (),
) -> T:
    """A `kind` with what is set; the rest has its defaults.

    Args:
        file: TOML, or None.
        environ: variables; those that are no setting are left alone.
        options: by name of the setting; None is not set.
        but: tables of the file that belong to others.

    Raises: ConfigError, naming the setting and where it stands, for one that is unknown or wrong.
    """
    known = {setting.name: setting for setting in settings_of(kind)}
    found: dict[str, Any] = {}
    if file is not None:
        found |= flatten(read_toml(file), known, str(file), but)
    found |= read_environ(environ or {}, known)
    found |= {name: value for name, value in (options or {}).items() if value is not None}
    built: T = _build(kind, found, (), None, ())
    return built


def read_toml(file: Path) -> dict[str, Any]:
    """Raises ConfigError for a file that is not read."""
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"{file} is not read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None


def flatten(
    tables: Mapping[str, Any], known: Mapping[str, Setting], where: str, but: Collection[str] = ()
) -> dict[str, Any]:
    """Tables as settings by name. Raises ConfigError for one that is not known, or not of its
    kind."""
    by_key = {setting.key: setting for setting in known.values()}
    found: dict[str, Any] = {}

    def walk(table: Mapping[str, Any], key: tuple[str, ...]) -> None:
        for name, value in table.items():
            at = (*key, name)
            if not key and name in but:
                continue
            if (
                at not in by_key
                and isinstance(value, Mapping)
                and any(k[: len(at)] == at for k in by_key)
            ):
                walk(value, at)
            elif at not in by_key:
                raise ConfigError(f"{where}: there is no setting {'.'.join(at)}")
            else:
                setting = by_key[at]
                found[setting.name] = _checked(setting, value, f"{where}: {'.'.join(at)}")

    walk(tables, ())
    return found


def _checked(setting: Setting, value: Any, where: str) -> Any:
    wanted = (int, float) if setting.kind is float else (setting.kind,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and setting.kind is not bool):
        raise ConfigError(f"{where} is {value!r}, {_named(setting.kind)} is needed")
    return value


def read_environ(environ: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, Any]:
    """What variables set, by name. Raises ConfigError for one that is not of its kind."""
    found = {}
    for setting in known.values():
        if setting.kind is dict:
            continue  # in files only
        if (text := environ.get(setting.variable)) is not None:
            found[setting.name] = _parsed(setting, text)
    return found


def _parsed(setting: Setting, text: str) -> Any:
    try:
        if setting.kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return setting.kind(text)
    except (ValueError, KeyError):
        raise ConfigError(
            f"{setting.variable} is {text!r}, {_named(setting.kind)} is needed"
        ) from None


def _named(kind: type) -> str:
    names = {
        bool: "true or false", int: "a whole number", float: "a number", str: "a string",
        dict: "a table",
    }  # fmt: skip
    return names[kind]


def as_environ(values: Mapping[str, Any], known: Mapping[str, Setting]) -> dict[str, str]:
    """Settings by name as variables for a child process."""
    return {
        known[name].variable: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in values.items()
    }


def _build(
    kind: type, found: Mapping[str, Any], table: tuple[str, ...], base: Any, but: Collection[str]
) -> Any:
    """A `kind` with what was found, the rest as in `base`, or its defaults."""
    given: dict[str, Any] = {}
    for field, its_kind in _fields(kind, but):
        default = _default(field) if base is None else getattr(base, field.name)
        table_of = _table_of(its_kind)
        if _plain(its_kind) is not None:
            if (name := "_".join((*table, field.name))) in found:
                given[field.name] = found[name]
        elif table_of is not None:
            key, not_these = _key(field, table), _but(field)
            names = [one.name for one in _settings(table_of, key, default, not_these)]
            if any(name in found for name in names):
                given[field.name] = _build(table_of, found, key, default, not_these)
    if base is not None:
        return replace(base, **given)
    missing = [
        ".".join((*table, field.name))
        for field, _ in _fields(kind, but)
        if field.name not in given and field.default is MISSING and field.default_factory is MISSING
    ]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: needed beside the rest of its table")
    return kind(**given)
