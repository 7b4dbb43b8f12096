"""Settings of the workers of `prefixkv serve`: each that was said is used, or refused by name.

Each setting has one place: what `serve` has for a role, or what all workers need alike, is not said
in a table. Of the few that each role may have by itself (`_SHARED`) an option or a variable of
`serve` goes before the table [workers.ROLE], and that before the file above it. What workers cannot
share is numbered: names, ports, addresses, and the file of a record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from prefixkv.errors import ConfigError, HandshakeError, nearest
from prefixkv.serving.config import KINDS, ServeConfig
from prefixkv.settings import FILE, PREFIX, VARIABLE, Found, build, find, settings_of
from prefixkv.spi import check_page_sizes

TABLE: Final = "workers"
"""Table of a file for `serve`: [workers.prefill] and [workers.decode] hold settings of workers."""

_ONLY_FRONT: Final = "workers answer their front alone"
_ALIKE: Final = "all workers need the same; set it above the tables"
_SET_BY_SERVE: Final = {
    "host": "workers listen where the front reaches them; above the tables it is the front's",
    "status_host": "workers listen where the front reaches them; above the tables it is the "
    "front's",
    "api_key": "workers and front share a key of each start; above the tables it is the clients'",
    "parent": "no worker outlives serve",
    "limits_max_requests_per_client": _ONLY_FRONT,
    "model": _ALIKE,
    "seed": _ALIKE,
    "dtype": _ALIKE,
}
"""Settings of workers that no one else may set, and why."""

_SHARED: Final = ("device", "context", "threads", "page_size")
# Variables of these names are those of `serve`, not of its workers.
_OF_SERVE: Final = frozenset({
    "host", "port", "status_host", "status_port", "api_key", "request_log",
    "limits_max_requests_per_client", "limits_max_body_bytes", "model", "seed", "dtype",
    "chunk_tokens", "checkpoints", *_SHARED,
})  # fmt: skip
_HOST_SIZES: Final = ("host_memory_times", "host_memory_num_bytes", "host_memory_num_pages")
_PORTS: Final = ("port", "status_port")
_ADDRESSES: Final = (
    "bind", "kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_snapshot_endpoint",
)  # fmt: skip
_MAX_PORT: Final = 65_535


class ServePlan(NamedTuple):
    """Settings of `prefixkv serve`, and by role and name those of its workers that are set."""

    config: ServeConfig
    tables: dict[str, dict[str, Any]]


def find_workers(
    tables: Any, where: str, environ: Mapping[str, str]
) -> dict[str, dict[str, Found]]:
    """Find settings by role, in the table `workers` of the file, which `where` names, and in the
    environment. Raises ConfigError."""
    if not isinstance(tables, Mapping):
        raise ConfigError(f"{where}: {TABLE}: {tables!r} is not a table")
    for role in tables:
        if role not in KINDS:
            hint = nearest(role, KINDS).replace("nearest is ", f"nearest is {TABLE}.")
            raise ConfigError(f"{where}: there is no table {TABLE}.{role}{hint}")
    fronts = {PREFIX + name.upper() for name in _OF_SERVE}
    theirs = {name: text for name, text in environ.items() if name not in fronts}
    return {
        role: find(kind, tables.get(role, {}), where, theirs, under=f"{TABLE}.{role}.")
        for role, kind in KINDS.items()
    }


def plan(found: Mapping[str, Found], workers: Mapping[str, Mapping[str, Found]]) -> ServePlan:
    """Decide the settings of `serve`, from `find`, and of its workers, from `find_workers`. Raises
    ConfigError, with the place, for one that would be ignored, or that workers cannot have."""
    said = {role: dict(workers.get(role, {})) for role in KINDS}
    for role, given in said.items():
        for name, why in (_SET_BY_SERVE | names_of_serve(role)).items():
            if name in given:
                raise ConfigError(f"{given[name].where}: serve sets it itself: {why}")
        if "name" in given and given["name"].rank == VARIABLE:
            raise ConfigError(
                f"{given['name'].where}: names one worker; those of serve are named in "
                f"[{TABLE}.prefill] and [{TABLE}.decode]"
            )
        for name in _SHARED:
            if name in given and name in found and found[name].rank > given[name].rank:
                del given[name]
    config = build(ServeConfig, found)
    if size := config.host_size():
        decode = said["decode"]
        for name in _HOST_SIZES:
            if name in decode:
                raise ConfigError(
                    f"{decode[name].where}: beside host_memory, which says how much it is"
                )
        decode[size[0]] = found["host_memory"]._replace(value=size[1])
    nums = {"prefill": config.prefill, "decode": config.decode}
    keys = said["decode"].get("control_curve_public_key")
    if keys is not None and config.decode > 1:
        raise ConfigError(
            f"{keys.where}: a pair of keys is one worker's, and there are {config.decode} decode "
            "workers"
        )
    for role, num in nums.items():
        # The first and the last: what one of them may have, those between may have too.
        for number in {0, num - 1}:
            made = numbered(_values(said[role]), role, number, num)
            made_found = {
                name: Found(value, said[role][name].where if name in said[role] else name, FILE)
                for name, value in made.items()
            }
            build(KINDS[role], made_found)
    _check_page_sizes(config, said)
    _check_names(said, nums)
    _check_ports(found, config, said, nums)
    return ServePlan(config, {role: _values(given) for role, given in said.items()})


def names_of_serve(role: str) -> dict[str, str]:
    """Return the settings of a worker that `serve` has for its role, with where they are set."""
    names = {
        "num_pages": f"it is {role}_pages above the tables",
        "window_pages": f"it is {role}_window_pages above the tables",
    }
    if role == "prefill":
        names |= dict.fromkeys(("chunk_tokens", "checkpoints"), "it is above the tables")
    return names


def numbered(values: Mapping[str, Any], role: str, number: int, num: int) -> dict[str, Any]:
    """Return settings of one worker of `num`, its number from 0: names, ports and addresses count
    up.

    >>> numbered({"status_port": 9100}, "decode", 2, num=4)
    {'status_port': 9102, 'name': 'decode-2'}
    """
    made = dict(values)
    made["name"] = f"{values.get('name', role)}-{number}"
    for name in _PORTS:
        if values.get(name):
            made[name] = values[name] + number
    for name, address in _addresses(role, values):
        made[name] = _count_up(address, number, num)
    record = values.get("record")
    if record and num > 1:
        path = Path(record)
        made["record"] = str(path.with_name(f"{path.stem}-{number}{path.suffix}"))
    return made


def _addresses(role: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the setting and the fixed address of each socket of a node, that of cache events by
    default included, where they are on."""
    events = any(name.startswith("kv_events_") for name in values)
    for setting in settings_of(KINDS[role]):
        name = setting.name
        if name in values and name in _ADDRESSES:
            yield name, values[name]
        elif events and name in _ADDRESSES and name != "bind":
            yield name, setting.default or ""


def _count_up(address: str, number: int, num: int) -> str:
    """Return the address of a worker's socket, by its number.

    >>> _count_up("tcp://127.0.0.1:29600", 2, num=3), _count_up("tcp://127.0.0.1:*", 2, num=3)
    ('tcp://127.0.0.1:29602', 'tcp://127.0.0.1:*')
    """
    if port := _port_of(address):
        return f"{address.rpartition(':')[0]}:{port + number}"
    # A path names one socket, so each of several workers has a path of its own.
    return f"{address}-{number}" if address.startswith("ipc://") and num > 1 else address


def _port_of(address: str) -> int:
    port = address.rpartition(":")[2]
    is_fixed = address.startswith("tcp://") and port.isascii() and port.isdecimal()
    return int(port) if is_fixed else 0


def _values(given: Mapping[str, Found]) -> dict[str, Any]:
    return {name: one.value for name, one in given.items()}


def _check_page_sizes(config: ServeConfig, said: Mapping[str, Mapping[str, Found]]) -> None:
    sizes = {
        role: given["page_size"].value if "page_size" in given else config.page_size
        for role, given in said.items()
    }
    try:
        check_page_sizes(sizes["decode"], sizes["prefill"])
    except HandshakeError as error:
        place = next(given["page_size"] for given in said.values() if "page_size" in given)
        raise ConfigError(f"{place.where}: {error}") from None


def _check_names(said: Mapping[str, Mapping[str, Found]], nums: Mapping[str, int]) -> None:
    # Numbers are all that differs within a role, so two names are equal where what precedes is.
    first = {
        role: numbered(_values(given), role, 0, nums[role])["name"] for role, given in said.items()
    }
    if first["prefill"] == first["decode"]:
        place = next(given["name"] for given in said.values() if "name" in given)
        raise ConfigError(f"{place.where}: a worker of each kind would be {first['decode']!r}")


def _check_ports(
    found: Mapping[str, Found],
    config: ServeConfig,
    said: Mapping[str, Mapping[str, Found]],
    nums: Mapping[str, int],
) -> None:
    """Raise ConfigError if two processes would have one port, or a port would be too large."""
    # (place, first port, number of ports)
    taken = [
        (found[name].where if name in found else f"the front's {name}", port, 1)
        for name, port in zip(_PORTS, (config.listen.port, config.listen.status_port), strict=True)
        if port
    ]
    for role, given in said.items():
        values = _values(given)
        fixed = [(name, values.get(name, 0)) for name in _PORTS]
        fixed += [(name, _port_of(address)) for name, address in _addresses(role, values)]
        for name, port in fixed:
            if not port:
                continue
            where = given[name].where if name in given else f"{TABLE}.{role}, {name}"
            last = port + nums[role] - 1
            if last > _MAX_PORT:
                raise ConfigError(f"{where}: the ports of {nums[role]} workers end at {last}")
            for other, begin, num in taken:
                if (shared := max(begin, port)) < min(begin + num, last + 1):
                    raise ConfigError(
                        f"{where}: port {shared} is wanted twice: {other} has {_ports(begin, num)},"
                        f" this {_ports(port, nums[role])}, one per worker"
                    )
            taken.append((where, port, nums[role]))


def _ports(begin: int, num: int) -> str:
    return str(begin) if num == 1 else f"{begin} to {begin + num - 1}"
