"""Traces of agents. Their block ids are private to the trace, so they say which prompts share a
beginning. Their times are partly relative: to a session's start, or to the end of other requests.

Sources: the sessions of callanjfox/kv-cache-tester (`docs/trace_replay_tester.md` there, and
AIPerf's page on replaying "Weka traces", which says how to interpret nested times);
`AgenticMooncakeHeader` and `AgenticMooncakeRow` of ai-dynamo's crate dynamo-data-gen, version 2
with a header and version 1 without.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

from prefixkv.cli.traces import number_in
from prefixkv.spi import TOKEN_LIMIT

SCHEMA = "dynamo.agentic_mooncake"
OUTPUT_TOKEN_S = 0.02
"""Assumed time per token of an answer, if a request waits for the end of another and the trace does
not say when that was."""

Found = tuple[float, list[Any], int]
"""One request: seconds, names of blocks, tokens of the prompt."""

_NUMBERS = (int, float)
_MOST = 10**15 - 1


class Sessions:
    """Reader of sessions, one JSON object each: `block_size`, and `requests` with `t` (s from the
    start), `in` (tokens) and `hash_ids` (of whole blocks). An entry with `requests` of its own is a
    sub-agent. Ids are private to the session. Sessions with equal numbers of tool tokens and of
    system tokens are assumed to share that prefix.

    The start of each is drawn from [0, spread_s), with a seed.
    """

    def __init__(self, spread_s: float) -> None:
        self._spread_s = spread_s
        self._random = Random(0)
        self._found: list[Found] = []
        self._num = 0
        self.block_tokens = 0

    def add(self, session: dict[str, Any]) -> None:
        """Read one agent's session of a trace. Raises TypeError if it does not fit."""
        size = number_in(session, "block_size", 1, 1 << 20)
        if size != (self.block_tokens or size):
            raise TypeError(f"block_size is {size}, that of the sessions before is different")
        self.block_tokens = size
        self._num += 1
        tools, system = (
            number_in({name: 0} | session, name, 0, _MOST)
            for name in ("tool_tokens", "system_tokens")
        )
        # The prefix that sessions share has no ids of its own: it is named after its two lengths.
        begin_s = self._random.uniform(0.0, self._spread_s)
        self._add_all(session, begin_s, ("shared", tools, system), (tools + system) // size, ())

    def _add_all(
        self, parent: dict[str, Any], begin_s: float, shared: Any, num_shared: int, path: Any
    ) -> None:
        """Read the requests of an agent's session, or of a sub-agent in it."""
        entries = parent["requests"]
        if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
            raise TypeError("requests is not a list of objects")
        for entry in entries:
            t = number_in(entry, "t", 0, _MOST, _NUMBERS)
            if "requests" in entry:
                # Some files count a sub-agent's times from its start, others from the session's.
                times = [inner.get("t") for inner in entry["requests"] if isinstance(inner, dict)]
                # A time before the sub-agent's start can only be relative to it.
                relative = any(type(one) in _NUMBERS and one < t for one in times)
                self._add_all(entry, begin_s + t * relative, shared, num_shared, path)
                continue
            length = number_in(entry, "in", 0, TOKEN_LIMIT - 1)
            ids = _ids(entry)
            # Files differ in whether a partial last block has an id.
            if len(ids) not in (length // self.block_tokens, -(-length // self.block_tokens)):
                raise TypeError(f"{len(ids)} hash_ids for {length} tokens of prompt")
            names = [
                (shared, at) if at < num_shared else (self._num, name)
                for at, name in enumerate(ids)
            ]
            self._found.append((begin_s + t, names, length))

    def requests(self) -> Iterator[Found]:
        """Yield the requests of all agents' sessions."""
        yield from self._found


class _AgentRow(NamedTuple):
    """One request of agentic Mooncake, with times still relative."""

    blocks: list[Any]
    num_tokens: int
    begin_s: float
    lasts_s: float
    after: list[tuple[str, bool, float]]  # request, True: its end (else its start), s from there


class Agentic:
    """Reader of Dynamo's agentic Mooncake: requests that wait for others.

    Rows of version 1 begin at `timestamp`, or `delay` and `tool_wait_ms` after the last of
    `wait_for` has ended. Rows of version 2 begin at `not_before_ms`, and not before all
    `dependencies`. A request lasts for `recorded_api_time_ms`, or `OUTPUT_TOKEN_S` per token of its
    answer. Ids mean the same in the whole file, or, where the file was made of sessions ("weka"),
    within one play.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._local = False
        self._header = False
        self._rows: dict[str, _AgentRow] = {}

    def add(self, entry: dict[str, Any]) -> None:
        """Read the header or one row of an agentic trace. Raises TypeError, or KeyError without
        `request_id`."""
        if "schema" in entry:
            if entry["schema"] != SCHEMA or entry.get("version") != 2 or self._rows:
                raise TypeError(f"this header is not that of {SCHEMA}, version 2")
            self._header = True
            self.block_tokens = number_in(entry, "block_size", 1, 1 << 20)
            source = entry.get("source")
            self._local = isinstance(source, dict) and source.get("format") == "weka"
            return
        name = entry["request_id"]
        if not isinstance(name, str) or name in self._rows:
            raise TypeError(f"request_id {name!r} is no text, or here twice")
        length = _number(entry, ("input_length", "input_tokens"), 0, TOKEN_LIMIT - 1, (int,))
        answer = _number(entry, ("output_length", "output_tokens"), 0, TOKEN_LIMIT - 1, (int,), 0)
        ids = _ids(entry)
        if len(ids) != (blocks := -(-length // self.block_tokens)):
            raise TypeError(f"{len(ids)} hash_ids, {length} tokens have {blocks} blocks")
        # The recorded time where there is one, else an estimate from the answer's length.
        lasts_ms = _number(
            entry, ("recorded_api_time_ms",), 0, _MOST, _NUMBERS, answer * OUTPUT_TOKEN_S * 1e3
        )
        # Part of each block's name, so that equal ids of two plays are different blocks.
        scope = entry.get("play_id") if self._local else None
        begin_ms, after = self._waits(entry)
        self._rows[name] = _AgentRow(
            [(scope, one) for one in ids], length, begin_ms / 1e3, lasts_ms / 1e3, after
        )

    def _waits(self, entry: dict[str, Any]) -> tuple[float, list[tuple[str, bool, float]]]:
        """Return an agentic row's earliest start in ms, and the requests that it waits for."""
        after = []
        # A header means version 2; without one the row is of version 1.
        if self._header:
            for one in _list(entry, "dependencies"):
                if not isinstance(one, dict) or one.get("trigger") not in (
                    "dispatch",
                    "completion",
                ):
                    raise TypeError(f"{one!r} is no dependency")
                delay_ms = _number(one, ("delay_ms",), 0, _MOST, _NUMBERS, 0)
                waits = str(one.get("request_id")), one["trigger"] == "completion", delay_ms / 1e3
                after.append(waits)
            return _number(entry, ("not_before_ms",), 0, _MOST, _NUMBERS), after
        delay_ms = _number(entry, ("delay", "delay_ms"), 0, _MOST, _NUMBERS, 0)
        delay_ms += _number(entry, ("tool_wait_ms",), 0, _MOST, _NUMBERS, 0)
        after = [(str(one), True, delay_ms / 1e3) for one in _list(entry, "wait_for")]
        begin_ms = 0.0
        if not after:
            begin_ms = _number(entry, ("timestamp", "created_time"), 0, _MOST, _NUMBERS)
        return begin_ms, after

    def requests(self) -> Iterator[Found]:
        """Yield the requests of an agentic trace with absolute times. Raises ValueError for one
        that waits for a request that is missing, or for itself."""
        # Depth first, with a stack of its own: chains of requests may be longer than Python's
        # recursion allows. `asked`: rows on which others wait already; meeting one again is a
        # circle.
        begins: dict[str, float] = {}
        asked: set[str] = set()
        for first in self._rows:
            stack = [first]
            while stack:
                name = stack[-1]
                row = self._rows[name]
                missing = [one for one, _, _ in row.after if one not in begins]
                # All that it waits for has a start, so its own is the latest of these.
                if name in begins or not missing:
                    stack.pop()
                    begins[name] = max(
                        [row.begin_s]
                        + [
                            begins[one] + (self._rows[one].lasts_s if ends else 0.0) + delay_s
                            for one, ends, delay_s in row.after
                        ]
                    )
                    continue
                if name in asked:
                    raise ValueError(f"request {name!r} waits for itself")
                asked.add(name)
                for one in missing:
                    if one not in self._rows:
                        raise ValueError(f"request {name!r} waits for {one!r}, which is not there")
                stack += missing
        # In the file's order; `Trace.in_order` sorts them.
        for name, row in self._rows.items():
            yield begins[name], row.blocks, row.num_tokens


def _ids(entry: dict[str, Any]) -> list[int]:
    """Return the `hash_ids` of an entry in an agents' trace. Raises TypeError if they are no list
    of integers."""
    ids = entry.get("hash_ids")
    if not isinstance(ids, list) or not all(type(name) is int for name in ids):
        raise TypeError("hash_ids is not a list of integers")
    return ids


def _list(entry: dict[str, Any], name: str) -> list[Any]:
    """Return a list under this name in an agents' trace, empty if it is missing. Raises TypeError
    for anything else."""
    value = entry.get(name, [])
    if not isinstance(value, list):
        raise TypeError(f"{name} is {value!r}, a list is needed")
    return value


def _number(
    entry: dict[str, Any],
    names: tuple[str, ...],
    low: int,
    high: int,
    kinds: tuple[type, ...],
    default: float | None = None,
) -> Any:
    """Return the number under the first of these names that an entry of an agents' trace has; null
    counts as missing. Raises TypeError if it is out of range, or missing without a default."""
    for name in names:
        if entry.get(name) is not None:
            return number_in(entry, name, low, high, kinds)
    if default is None:
        return number_in(entry, names[0], low, high, kinds)
    return default
