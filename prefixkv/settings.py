"""Settings: declared once, with their bounds, and converted by one module from every source.

A settings class is a frozen dataclass. A field's type says its kind, unit and bounds (`heartbeat_s:
Seconds = 1.0`), and `doc(...)` what `--help` says; a string below it says more. `__post_init__`
calls `check_fields`, so every source is refused alike: "worker.toml: control.heartbeat_s: 0 is not
above 0".

A settings class as a field is a table, `[control]`, with `--control-heartbeat-s` and
`PREFIXKV_CONTROL_HEARTBEAT_S`. With `flat` its fields are set as its parent's, except `but`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import ipaddress
import math
import re
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from prefixkv.errors import CallerError, ConfigError, nearest, shown

PREFIX: Final = "PREFIXKV_"  # of the variables of the environment
MAX_COUNT: Final = 2**31 - 1
MAX_BYTES: Final = 2**62 - 1

T = TypeVar("T")

# --- types of settings ----------------------------------------------------------------------------

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Bytes = Annotated[int, Meta(ge=1, le=MAX_BYTES, extra={"unit": "bytes"})]
BytesOrZero = Annotated[int, Meta(ge=0, le=MAX_BYTES, extra={"unit": "bytes"})]
Seconds = Annotated[float, Meta(gt=0, extra={"unit": "seconds"})]
SecondsOrZero = Annotated[float, Meta(ge=0, extra={"unit": "seconds"})]
Number = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Port = Annotated[int, Meta(ge=0, le=65_535)]


def doc(text: str) -> Meta:
    """Describe a setting in its annotation. Those without are in `--help-all` only."""
    return Meta(description=text)


class Kind(NamedTuple):
    """One alternative of a field's type: a plain type and its bounds."""

    base: Any  # bool, int, float, str, NoneType, a Literal, or Mapping[str, str]
    metas: tuple[Meta, ...]

    def explain(self, value: Any) -> str:
        """Say which bound `value` breaks; "" where it breaks none, or is of another type."""
        if self.base is str and isinstance(value, str):
            return self._explain_length(len(value))
        is_mine = self.base is float or (self.base is int and isinstance(value, int))
        if not is_mine or not _is_number(value):
            return ""
        for meta in self.metas:
            if meta.ge is not None and value < meta.ge:
                return f"{shown(value)} is below {meta.ge}"
            if meta.gt is not None and value <= meta.gt:
                return f"{shown(value)} is not above {meta.gt}"
            if meta.le is not None and value > meta.le:
                return f"{shown(value)} is above {meta.le}"
        return ""

    def _explain_length(self, length: int) -> str:
        # The text itself is not shown: it may be a key.
        for meta in self.metas:
            if meta.min_length is not None and length < meta.min_length:
                return f"has {length} characters, fewer than {meta.min_length}"
            if meta.max_length is not None and length > meta.max_length:
                return f"has {length} characters, more than {meta.max_length}"
        return ""

    @property
    def words(self) -> str:
        """Name of the type for an operator."""
        if get_origin(self.base) is Literal:
            return self.range
        names = {
            bool: "true or false", int: "a whole number", float: "a number", str: "a string",
            NoneType: "none",
        }  # fmt: skip
        return names.get(self.base, "a table of strings")

    @property
    def range(self) -> str:
        """Unit and bounds, as `--help-all` shows them."""
        if get_origin(self.base) is Literal:
            return f"one of {', '.join(filter(None, get_args(self.base)))}"
        parts: list[str] = []
        for meta in self.metas:
            if meta.extra:
                parts.append(meta.extra["unit"])
            if meta.ge is not None:
                parts.append(f"at least {meta.ge}")
            if meta.gt is not None:
                parts.append(f"above {meta.gt}")
            if meta.le is not None and meta.le not in (MAX_COUNT, MAX_BYTES):
                parts.append(f"at most {meta.le}")
        return ", ".join(parts)


class Field(NamedTuple):
    """A field of a settings class, as its annotation declares it."""

    name: str
    default: Any  # MISSING: it has to be given
    help: str
    kinds: tuple[Kind, ...]  # what text can say
    plain: Any  # these as one type, with their bounds, for msgspec
    bare: Any  # the same without bounds
    classes: tuple[type, ...]  # whose objects are taken as they are
    is_open: bool  # a part of its type says nothing that can be checked
    table: type | None  # the settings class
    flat: bool
    but: Collection[str]
    owner: type

    @property
    def sentences(self) -> str:
        """The string below the field in its class, else what `--help` says."""
        return sentences_of(self.owner).get(self.name) or self.help

    @property
    def is_plain(self) -> bool:
        """True if a file, a variable or an option can set this field."""
        return any(kind.base is not NoneType for kind in self.kinds)

    @property
    def is_mapping(self) -> bool:
        return any(get_origin(kind.base) is Mapping for kind in self.kinds)

    def check(self, value: Any) -> None:
        """Raise ConfigError for a value that a constructor was given. Objects are not checked."""
        if not self.is_open and not isinstance(value, self.classes):
            self.convert(value, self.name)

    def convert(self, value: Any, where: str) -> Any:
        """Convert data to the field's type. A ConfigError begins with `where`."""
        if isinstance(value, Real) and not isinstance(value, bool):  # numbers of numpy, too
            value = int(value) if isinstance(value, Integral) else float(value)
        try:
            is_nan = isinstance(value, float) and math.isnan(value)  # which no bounds refuse
            if self.plain is not MISSING and not is_nan:
                return msgspec.convert(value, self.plain)
        # msgspec takes an array for a mapping, and asks for its keys; a text may have no bytes.
        except (msgspec.ValidationError, AttributeError, UnicodeEncodeError):
            pass
        reasons = (kind.explain(value) for kind in self.kinds)
        reason = next(filter(None, reasons), f"{_shown(value)} is not {self._wanted}")
        raise ConfigError(f"{where}: {reason}")

    def convert_text(self, text: str, where: str) -> Any:
        """Convert the text of an option or a variable; a table is JSON. Raises ConfigError."""
        # Without the bounds first: an error is to show the number, not its text.
        try:
            said = msgspec.json.decode(text) if self.is_mapping else text
            value = msgspec.convert(said, self.bare, strict=False)
        except (msgspec.MsgspecError, UnicodeEncodeError):
            raise ConfigError(f"{where}: {text!r} is not {self._wanted}") from None
        return self.convert(value, where)

    @property
    def _wanted(self) -> str:
        names = [kind.words for kind in self.kinds if kind.base is not NoneType]
        names += [f"a {one.__name__}" for one in self.classes]
        names += [kind.words for kind in self.kinds if kind.base is NoneType]
        return " or ".join(names)


@cache
def fields_of(kind: type) -> tuple[Field, ...]:
    """Return the fields of a settings class, read once per class."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(_field(kind, one, hints[one.name]) for one in fields(kind) if one.init)


@cache
def sentences_of(kind: type) -> dict[str, str]:
    """Return the strings below a class's own fields; empty where the sources are not installed."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except OSError:
        return {}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for above, node in pairwise(tree.body):
        if isinstance(above, ast.AnnAssign) and isinstance(node, ast.Expr):
            name, text = ast.unparse(above.target), ast.literal_eval(node.value)
            found[name] = " ".join(text.split())
    return found


def _field(owner: type, field: dataclasses.Field[Any], hint: Any) -> Field:
    base, metas = _split(hint)
    is_union = get_origin(base) in (Union, UnionType)
    alternatives = get_args(base) if is_union else (hint,)
    plain: list[Any] = []
    classes: list[type] = []
    is_open = False
    for one in alternatives:
        its_base = _split(one)[0]
        if its_base in (bool, int, float, str, NoneType) or get_origin(its_base) in (
            Literal, Mapping,
        ):  # fmt: skip
            plain.append(one)
        elif isinstance(its_base, type) and not getattr(its_base, "_is_protocol", False):
            classes.append(its_base)
        else:
            is_open = True
    kinds = tuple(Kind(*_split(one)) for one in plain)
    return Field(
        name=field.name,
        default=field.default if field.default_factory is MISSING else field.default_factory(),
        help=next((meta.description for meta in metas if meta.description), ""),
        kinds=kinds,
        plain=_union(plain),
        bare=_union([kind.base for kind in kinds]),
        classes=tuple(classes),
        is_open=is_open,
        table=next(filter(is_dataclass, classes), None),
        flat=field.metadata.get("flat", False),
        but=field.metadata.get("but", ()),
        owner=owner,
    )


def _split(hint: Any) -> tuple[Any, tuple[Meta, ...]]:
    if get_origin(hint) is Annotated:
        return hint.__origin__, hint.__metadata__
    return hint, ()


def _union(kinds: list[Any]) -> Any:
    return Union[tuple(kinds)] if kinds else MISSING  # noqa: UP007 - of a list


def _shown(value: Any) -> str:
    """A table, a list or an object may have keys in it: its type alone is shown."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return shown(value)
    return "a table" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def check_fields(config: Any) -> None:
    """Raise ConfigError for a field that is not of its declared type, or out of its bounds."""
    for field in fields_of(type(config)):  # type: ignore[arg-type]
        field.check(getattr(config, field.name))


def check_order(config: Any, low: str, high: str) -> None:
    """Raise ConfigError if `low` is above `high`, which may be of a table:
    "control.longest_wait_s"."""
    value, most = getattr(config, low), config
    for name in high.split("."):
        most = getattr(most, name)
    if value > most:
        raise ConfigError(f"{low}: {value} is above {high}, {most}")


# --- settings by name -----------------------------------------------------------------------------


class Setting(NamedTuple):
    """One setting. `name` has its table in front, "control_heartbeat_s"; `key` has them apart;
    `default` is None where there is none. `is_off`: its table is not there until a setting of the
    table is given."""

    name: str
    key: tuple[str, ...]
    field: Field
    default: Any
    is_off: bool

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def path(self) -> str:
        return ".".join(self.key)


def settings_of(kind: type) -> list[Setting]:
    """List all settings that a file, a variable or an option can set."""
    return list(_settings(kind, (), MISSING, ()))


def _settings(
    kind: type, table: tuple[str, ...], base: Any, but: Collection[str]
) -> Iterator[Setting]:
    for field in fields_of(kind):
        if field.name in but:
            continue
        default = field.default if base is MISSING else getattr(base, field.name)
        if field.table is not None:
            its_base = MISSING if default is None else default
            yield from _settings(field.table, _table(field, table), its_base, field.but)
        elif field.is_plain:
            key = (*table, field.name)
            default = None if default is MISSING else default
            yield Setting("_".join(key), key, field, default, base is MISSING and bool(table))


def _table(field: Field, table: tuple[str, ...]) -> tuple[str, ...]:
    return table if field.flat else (*table, field.name)


def convert(kind: type[T], tables: Any, where: str) -> T:
    """Build a `kind` from tables, as JSON or a dictionary has them.

    Raises ConfigError, which names the setting, its value and its bound, for one that is unknown,
    of another type, out of its bounds, or missing.

    >>> from prefixkv.config import DecodeConfig
    >>> convert(DecodeConfig, {"control": {"hartbeat_s": 2}}, "decode")
    Traceback (most recent call last):
    prefixkv.errors.ConfigError: decode: there is no setting control.hartbeat_s; the nearest is control.heartbeat_s
    """  # noqa: E501 - a line of output
    found = read_tables(kind, tables, where)
    try:
        return _build(kind, found)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


class Found(NamedTuple):
    """A setting's value and place: "worker.toml: control.heartbeat_s", a variable, an option."""

    value: Any
    where: str
    rank: int  # FILE, VARIABLE or OPTION: the larger goes before the smaller


FILE: Final = 0
VARIABLE: Final = 1
OPTION: Final = 2


def load(
    kind: type[T],
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    but: Collection[str] = (),
) -> T:
    """Build a `kind` from a file, the environment and options, the later before the earlier.

    Args:
        file: TOML, or None.
        environ: variables; those that are no setting are left alone.
        options: by name of the setting, as text or as a value; None is not set.
        but: tables of the file that are not of this class.

    Raises ConfigError as `convert` does, with the file, the variable or the option in front.
    """
    tables = read_toml(file) if file is not None else {}
    return build(kind, find(kind, tables, str(file), environ, options, but=but))


def find(
    kind: type,
    tables: Any,
    where: str,
    environ: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    under: str = "",
    but: Collection[str] = (),
) -> dict[str, Found]:
    """Return the settings that are set, by name, each from the place that goes before the others.
    `tables`: of a file, which `where` names; `under` is the path of these tables in it, with a dot
    at its end, or "". `environ`, `options`, `but`: as for `load`.

    Raises ConfigError, with the place, for one unknown, of another type or out of its bounds.
    """
    if isinstance(tables, Mapping):
        tables = {name: table for name, table in tables.items() if name not in but}
    values = read_tables(kind, tables, where, under, also=but)
    environ, options = environ or {}, options or {}
    found: dict[str, Found] = {}
    for setting in settings_of(kind):
        name, field = setting.name, setting.field
        if name in values:
            found[name] = Found(values[name], f"{where}: {under}{setting.path}", FILE)
        if (text := environ.get(setting.variable)) is not None:
            value = field.convert_text(text, setting.variable)
            found[name] = Found(value, setting.variable, VARIABLE)
        if (option := options.get(name)) is not None:
            take = field.convert_text if isinstance(option, str) else field.convert
            found[name] = Found(take(option, setting.option), setting.option, OPTION)
    return found


def build(kind: type[T], found: Mapping[str, Found]) -> T:
    """Build a `kind` of what `find` returned. Raises ConfigError, with the place, if settings
    contradict each other, or one is missing."""
    try:
        return _build(kind, {name: one.value for name, one in found.items()})
    except ConfigError as error:
        # The text begins with the setting's path. Its place is known if somebody has set it.
        path, colon, why = str(error).partition(": ")
        place = found.get(path.replace(".", "_"))
        if place is None or not colon:
            raise
        raise ConfigError(f"{place.where}: {why}") from None


def as_environ(kind: type, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that set `values` in a child process. Raises ConfigError for
    an unknown name."""
    known = {setting.name: setting for setting in settings_of(kind)}
    for name in values:
        if name not in known:
            raise ConfigError(f"there is no setting {name!r}{nearest(name, known)}")
    return {
        known[name].variable: (
            msgspec.json.encode(value).decode() if isinstance(value, bool | Mapping) else str(value)
        )
        for name, value in values.items()
    }


def read_toml(file: Path) -> dict[str, Any]:
    """Parse a TOML file. Raises ConfigError if it cannot be read."""
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"{file} is not read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None


def read_tables(
    kind: type, tables: Any, where: str, under: str = "", also: Collection[str] = ()
) -> dict[str, Any]:
    """Flatten nested tables to settings by name. A ConfigError begins with `where` and the path
    below `under`. `also`: further names that the file may have."""
    by_key = {setting.key: setting for setting in settings_of(kind)}
    # Tables within tables: of "control.curve.public_key" these are control and control.curve.
    inner = {key[:depth] for key in by_key for depth in range(1, len(key))}
    others = {(name,) for name in also}
    found: dict[str, Any] = {}

    def walk(table: Any, at: tuple[str, ...]) -> None:
        if not isinstance(table, Mapping):
            path = f"{under}{'.'.join(at)}".rstrip(".")
            place = f"{where}: {path}" if path else where
            raise ConfigError(f"{place}: {_shown(table)} is not a table of settings")
        for setting in by_key.values() if not table else ():
            # An empty table of keys would pass for none, and mean that nothing is encrypted.
            if setting.key[:-1] == at != () and setting.field.default is MISSING:
                raise ConfigError(f"{where}: {under}{setting.path}: is missing")
        for name, value in table.items():
            key = (*at, str(name))
            if key in by_key:
                setting = by_key[key]
                path = f"{where}: {under}{setting.path}"
                found[setting.name] = setting.field.convert(value, path)
            elif key not in inner:
                is_table = isinstance(value, Mapping)
                # A table is meant for another table first, a value for another setting.
                known = [*inner, *others, *by_key] if is_table else [*by_key, *others, *inner]
                what = "table" if is_table else "setting"
                raise ConfigError(f"{where}: {_unknown(what, key, known, under)}")
            elif value is not None:  # null in JSON leaves a table out
                walk(value, key)

    walk(tables, ())
    return found


def _unknown(
    what: str, key: tuple[str, ...], known: Collection[tuple[str, ...]], under: str
) -> str:
    path, paths = ".".join(key), [".".join(one) for one in known]
    # The right name in the wrong table, else a slip of the pen.
    near = [".".join(one) for one in known if one[-1] == key[-1]] or get_close_matches(path, paths)
    hint = f"; the nearest is {under}{near[0]}" if near else ""
    return f"there is no {what} {under}{path}{hint}"


def _build(
    kind: type[T],
    found: Mapping[str, Any],
    table: tuple[str, ...] = (),
    base: Any = MISSING,
    but: Collection[str] = (),
) -> T:
    """The rest is as in `base`, or its defaults."""
    given: dict[str, Any] = {}
    # Tables first, the innermost before the others. A table of which nothing is set is left alone:
    # it may be None, and mean that something is off.
    for field in fields_of(kind):  # type: ignore[arg-type]
        if field.name in but:
            continue
        default = field.default if base is MISSING else getattr(base, field.name)
        if field.table is not None:
            at, its_base = _table(field, table), MISSING if default is None else default
            names = [one.name for one in _settings(field.table, at, its_base, field.but)]
            if any(name in found for name in names):
                given[field.name] = _build(field.table, found, at, its_base, field.but)
        elif (name := "_".join((*table, field.name))) in found:
            given[field.name] = found[name]
        if field.name not in given and default is MISSING:
            raise ConfigError(f"{'.'.join((*table, field.name))}: is missing")
    try:
        return kind(**given) if base is MISSING else replace(base, **given)
    except ConfigError as error:  # of two settings that contradict each other
        path = "".join(f"{name}." for name in table)
        raise ConfigError(f"{path}{error}") from None


# --- sizes and hosts in words ---------------------------------------------------------------------

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(x|[KMGT]i?B|B)?", re.ASCII | re.IGNORECASE)
_PREFIXES: Final = "kmgt"


def parse_size(text: str) -> tuple[float, str] | None:
    """Return a size as a number of "bytes", of "x" (times another size), or of "" without a unit;
    None if it is no size. GB are 10**9 bytes, GiB 2**30.

    >>> parse_size("1.5GiB"), parse_size("4x"), parse_size("300"), parse_size("4 apples")
    ((1610612736.0, 'bytes'), (4.0, 'x'), (300.0, ''), None)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    number, unit = float(match[1]), (match[2] or "").lower()
    if unit in ("", "x"):
        return number, unit
    power = 1 + _PREFIXES.index(unit[0]) if unit != "b" else 0
    return number * (1024 if "i" in unit else 1000) ** power, "bytes"


def is_loopback_host(host: str) -> bool:
    """Tell whether only this machine reaches a socket that is bound to `host`. A name other than
    localhost may resolve to anything, so it counts as reachable.

    >>> [is_loopback_host(host) for host in ("localhost", "127.0.0.1", "::1", "*", "node-1")]
    [True, True, True, False, False]
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --- arguments of calls ---------------------------------------------------------------------------


def at_least(bound: float, /, **settings: float) -> None:
    """Raise ConfigError for a setting below `bound`, or not a number."""
    for name, value in settings.items():
        if not _is_number(value) or not value >= bound:
            raise ConfigError(f"{name} is {shown(value)}, at least {bound} is needed")


def check_whole(name: str, value: Any, low: int, high: int) -> None:
    """Raise ConfigError unless `value` is a whole number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise ConfigError(f"{name} is {shown(value)}, must be in [{low}, {high}], whole")


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise ConfigError unless `value` is an object of `kind`."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is a {type(value).__name__}, a {kind.__name__} is needed")


def check_list(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is a list or a tuple."""
    if not isinstance(value, tuple | list):
        raise ConfigError(f"{name} is a {type(value).__name__}, a list is needed")


def check_callable(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is None or can be called."""
    if value is not None and not callable(value):
        raise ConfigError(f"{name}: {shown(value)} is not a function")


def check_time(now_s: float) -> None:
    """Raise CallerError unless `now_s` is a finite number. Called before anything changes: times
    are compared in the middle of a change."""
    if type(now_s) is not float:
        # An int may be too large for a float.
        if not _is_number(now_s) or not -MAX_BYTES <= now_s <= MAX_BYTES:
            raise CallerError(f"now_s is {shown(now_s)}, seconds of a monotonic clock are needed")
    elif now_s - now_s != 0:
        raise CallerError(f"now_s is {shown(now_s)}, seconds of a monotonic clock are needed")


def whole_count(name: str, value: Any) -> int:
    """Return `value` as an int. Raises CallerError unless it is a whole number, at least 0."""
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise CallerError(f"{name} is {shown(value)}, a whole number is needed")
        value = int(value)
    if value < 0:
        raise CallerError(f"{name} is {shown(value)}, at least 0 is needed")
    return int(value)


def check_flag(name: str, value: object, *, or_none: bool = False) -> None:
    """Raise CallerError unless `value` is True or False, or None with `or_none`."""
    if not isinstance(value, bool) and not (or_none and value is None):
        wanted = "True, False or None" if or_none else "True or False"
        raise CallerError(f"{name} is {shown(value)}, {wanted} is needed")


Continues: TypeAlias = bool | float | None
"""Whether a conversation goes on: True, within ten minutes; seconds, within these; False or 0, it
has ended; None, unknown."""

CONTINUES_S: Final = 600.0
"""What True stands for, in seconds."""


def check_continues(continues: Continues) -> float | None:
    """Return within how many seconds a conversation goes on; 0 if it has ended. Raises CallerError
    for anything but `Continues`."""
    if continues is None or isinstance(continues, bool):
        return None if continues is None else CONTINUES_S if continues else 0.0
    if not _is_number(continues) or not 0 <= continues <= MAX_BYTES:
        wanted = "True, False, None, or seconds"
        raise CallerError(f"continues is {shown(continues)}, {wanted} are needed")
    return float(continues)


def check_timeout(timeout_s: object) -> None:
    """Raise CallerError unless `timeout_s` is None, no limit, or a number; below 0 counts as 0."""
    is_time = timeout_s is None or _is_number(timeout_s)
    # An int may be too large to be added to a time.
    if not is_time or (isinstance(timeout_s, int) and abs(timeout_s) > MAX_BYTES):
        raise CallerError(f"timeout_s is {shown(timeout_s)}, seconds or None are needed")


def _is_number(value: object) -> bool:
    # Not `math.isnan`: an int may be larger than any float.
    return isinstance(value, Real) and not isinstance(value, bool) and bool(value == value)


# --- classes by name ------------------------------------------------------------------------------


class Named(Protocol):
    """An object with the name that its class is chosen by."""

    name: str


Kept = TypeVar("Kept", bound=Named)
Class = TypeVar("Class", bound=type[Named])


class Registry(Generic[Kept]):
    """The classes of one kind, by name. `kind`: what they are, for error texts. `base`: the class
    that all of them derive from; it may be abstract. `default`: the name that "" stands for."""

    def __init__(self, kind: str, base: type[Kept], default: str = "") -> None:
        self._kind = kind
        self._base = base
        self.default = default
        self._classes: dict[str, type[Kept]] = {}

    def add(self, chosen: Class) -> Class:
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

    def use_by_default(self, chosen: type[Kept]) -> None:
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

    def make(self, chosen: str | Kept) -> Kept:
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
