"""Sizes of host tiers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from prefixkv.cli.replay.curves import amount
from prefixkv.cli.replay.tiers import HostResult
from prefixkv.cli.replay.trace import Trace
from prefixkv.errors import ConfigError, check_range
from prefixkv.settings import parse_size

_MOST_BLOCKS: Final = 10**9


class HostSize(NamedTuple):
    """`number` of `unit`: "x" (times the device's capacity), "blocks" or "bytes"."""

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


def host_row(host: HostResult, capacity: int, trace: Trace) -> str:
    """Format a line of the table, below that of the device."""
    return (
        f"  + host {host.host_blocks:,} blocks{_size_in_words(host, capacity, trace)}: finds "
        f"{host.host_hit_ratio:.4f} more, {host.block_hit_ratio:.4f} in all; writes "
        f"{_amount(host.written_blocks, trace)}, loads {_amount(host.loaded_blocks, trace)} for "
        f"{host.loads:,} requests"
    )


def _amount(blocks: float, trace: Trace) -> str:
    """Format it in bytes, or in tokens where those of a token are not known."""
    tokens = blocks * trace.block_tokens
    if trace.bytes_per_token:
        return amount(tokens * trace.bytes_per_token)
    return f"{tokens:,.0f} tokens"


def _times(host: HostResult, capacity: int) -> str:
    return f"{host.host_blocks / capacity:.3g}x"


def _size_in_words(host: HostResult, capacity: int, trace: Trace) -> str:
    """Format it in capacities of the device, and in bytes where they are known."""
    size = f", {_amount(host.host_blocks, trace)}" if trace.bytes_per_token else ""
    return f" ({_times(host, capacity)}{size})"
