"""Blocks that are being loaded, by vLLM's hash: a request that lacks one of them waits for it,
instead of having it sent again."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from prefixkv.spi import check_laws


class Flights:
    """Which request loads a block. A block that two load is that of the one that began first."""

    def __init__(self) -> None:
        self._carrier: dict[Hashable, str] = {}
        self._blocks: dict[str, list[Hashable]] = {}  # that a request carries

    def __len__(self) -> int:
        return len(self._carrier)

    def begin(self, rid: str, hashes: Iterable[Hashable]) -> None:
        """`rid` loads these blocks, from now on until `land`."""
        mine = self._blocks.setdefault(rid, [])
        for block in hashes:
            if block not in self._carrier:
                self._carrier[block] = rid
                mine.append(block)

    def carrier(self, block: Hashable) -> str | None:
        """The request that loads this block."""
        return self._carrier.get(block)

    def land(self, rid: str) -> None:
        """The request's blocks are here, or will not come. Unknown: no-op."""
        for block in self._blocks.pop(rid, ()):
            del self._carrier[block]

    def check_invariants(self) -> None:
        carried = {block: rid for rid, blocks in self._blocks.items() for block in blocks}
        check_laws({"each block has one carrier": carried == self._carrier}, self._carrier)
