"""Sizes of host tiers in words, and what a replay says about them: which size is worth it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from prefixkv.cli.replay.curves import amount
from prefixkv.cli.replay.run import ReplayResult
from prefixkv.cli.replay.tiers import HostResult
from prefixkv.cli.replay.trace import Trace
from prefixkv.spi import ConfigError, check_range, parse_size

WORTH: Final = 0.05
"""A doubling of the host tier is worth it if of what is sent it saves at least this share."""

LEAST_TIMES: Final = 2
"""A host tier below this many times the device's pool is too small: it holds copies of what the
device has."""

_MOST_BLOCKS: Final = 10**9


class HostSize(NamedTuple):
    """The size of a host tier, as it was given: `number` of `unit`, which is "x" (times the
    device's capacity), "blocks" or "bytes"."""

    text: str
    number: float
    unit: str

    def blocks(self, capacity: int, block_bytes: int) -> int:
        """Return the host tier's size in whole blocks, rounded down.

        Args:
            capacity: of the device, in blocks.
            block_bytes: of a block; 0: unknown.
        Raises:
            ConfigError: a size in bytes, and `block_bytes` is unknown or larger than that.

        >>> HostSize("4x", 4.0, "x").blocks(1000, 0)
        4000
        """
        if self.unit == "x":
            found = int(self.number * capacity)
        elif self.unit == "blocks":
            found = int(self.number)
        elif not block_bytes:
            raise ConfigError(
                f"a host tier of {self.text}: the trace does not say what the KV of a token takes, "
                "--bytes-per-token does"
            )
        else:
            found = int(self.number) // block_bytes
            if not found and self.number:
                raise ConfigError(
                    f"a host tier of {self.text} has no room for a block of {block_bytes:,} bytes"
                )
        check_range(f"a host tier of {self.text}", found, 0, _MOST_BLOCKS)
        return found


def host_sizes(setting: str, given: Iterable[str | int]) -> list[HostSize]:
    """Return the sizes of host tiers that are named. Raises ConfigError, which names the setting.

    >>> [size.number for size in host_sizes("--host", ["4x", "1.5GiB", 300])]
    [4.0, 1610612736.0, 300.0]
    """
    return [_size(setting, one) for one in given]


def _size(setting: str, given: str | int) -> HostSize:
    """Return the size of a host tier that one text, or a number of blocks, names."""
    text = str(given).strip()
    size = parse_size(text)
    if isinstance(given, bool) or not isinstance(given, str | int) or size is None:
        raise ConfigError(
            f"{setting} {given!r} is no size: 4x (times the capacity), 64GiB, or blocks"
        )
    number, unit = size
    if not unit and not number.is_integer():
        raise ConfigError(f"{setting} {given!r}: blocks are whole")
    return HostSize(text, number, unit or "blocks")


def worth_taking(capacity: int, device_ratio: float, hosts: Sequence[HostResult]) -> list[bool]:
    """Return for each host tier, smallest first, whether each doubling from the last one that was
    worth it (at first from the device itself) saves at least `WORTH` of what is sent."""
    found = []
    size, sent = capacity, 1 - device_ratio
    for host in hosts:
        doublings = math.log2(host.host_blocks / size) if host.host_blocks > size else 0
        left = 1 - host.block_hit_ratio
        pays = doublings > 0 and left <= sent * (1 - WORTH) ** doublings
        if pays:
            size, sent = host.host_blocks, left
        found.append(pays)
    return found


def host_row(host: HostResult, capacity: int, trace: Trace) -> str:
    """Format what a host tier found as a line of the command's table, below that of its device."""
    return (
        f"  + host {host.host_blocks:,} blocks{_size_in_words(host, capacity, trace)}: finds "
        f"{host.host_hit_ratio:.4f} more, {host.block_hit_ratio:.4f} in all; writes "
        f"{_amount(host.written_blocks, trace)}, loads {_amount(host.loaded_blocks, trace)} for "
        f"{host.loads:,} requests"
    )


def host_sentence(result: ReplayResult, trace: Trace, warm: float = 0.0) -> str:
    """Return what a replay says about host tiers behind one device: which size to take, if any.

    Args:
        result: with at least one host tier.
        trace: that was replayed.
        warm: share of its requests that only warmed the tiers.
    """
    capacity, hosts = result.capacity_blocks, result.host
    pays = worth_taking(capacity, result.block_hit_ratio, hosts)
    device = 1 - result.block_hit_ratio
    largest, parts = hosts[-1], []
    if any(pays):
        at = max(at for at, one in enumerate(pays) if one)
        taken, sent = hosts[at], 1 - hosts[at].block_hit_ratio
        less = f", {device / sent:.1f} times less" if sent else ""
        parts += [
            f"take {taken.host_blocks:,} blocks{_size_in_words(taken, capacity, trace)}",
            f"the device finds {result.block_hit_ratio:.1%} of the blocks and the host "
            f"{taken.host_hit_ratio:.1%} more, so that {sent:.1%} are sent instead of {device:.1%}"
            f"{less}",
            _copied(taken, trace, warm),
        ]
        if at + 1 < len(hosts):
            parts.append(
                f"more does not pay: with {_times(largest, capacity)} still "
                f"{1 - largest.block_hit_ratio:.1%} are sent"
            )
        else:
            parts.append("what a larger one brings was not replayed")
    else:
        parts.append(
            f"none of these sizes is worth it: without a host tier {device:.1%} of the blocks are "
            f"sent, and with {_times(largest, capacity)} still {1 - largest.block_hit_ratio:.1%}"
        )
    small = [one for one in hosts if one.host_blocks < LEAST_TIMES * capacity]
    if small:
        sizes = " and ".join(_times(one, capacity) for one in small)
        parts.append(
            f"warning: {sizes} the pool is less than twice, and such a host tier holds little but "
            "copies of what the device has"
        )
    return f"{result.trace}, {capacity:,} blocks, {result.policy}, host tier: {'; '.join(parts)}."


def _copied(host: HostResult, trace: Trace, warm: float) -> str:
    """Say how much is copied to and from a host tier, and at what rate."""
    requests = trace.requests[int(warm * len(trace.requests)) :]
    seconds = requests[-1].time_s - requests[0].time_s
    blocks = (host.written_blocks, host.loaded_blocks)
    written, loaded = (_amount(one, trace) for one in blocks)
    rates = ""
    if seconds > 0:
        write, load = (_amount(one / seconds, trace) for one in blocks)
        rates = f", {write} and {load} a second"
    return f"it writes {written} and loads {loaded}{rates}"


def _amount(blocks: float, trace: Trace) -> str:
    """Format an amount of KV: in bytes, or in tokens where those of a token are not known."""
    tokens = blocks * trace.block_tokens
    if trace.bytes_per_token:
        return amount(tokens * trace.bytes_per_token)
    return f"{tokens:,.0f} tokens"


def _times(host: HostResult, capacity: int) -> str:
    """Format a host tier's size in capacities of the device."""
    return f"{host.host_blocks / capacity:.3g}x"


def _size_in_words(host: HostResult, capacity: int, trace: Trace) -> str:
    """Format a host tier's size in capacities of the device, and in bytes where they are known."""
    size = f", {_amount(host.host_blocks, trace)}" if trace.bytes_per_token else ""
    return f" ({_times(host, capacity)}{size})"
