"""Blocks that are being loaded, by vLLM's hash: a request that lacks one of them waits for it
instead of loading it a second time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from prefixkv.spi import check_laws


class Flights:
    """Index from a block's hash to the request that loads it: the one that began first."""

    def __init__(self) -> None:
        self._carrier: dict[Hashable, str] = {}
        self._blocks: dict[str, list[Hashable]] = {}  # by request; the inverse of `_carrier`

    def __len__(self) -> int:
        return len(self._carrier)

    def begin(self, rid: str, hashes: Iterable[Hashable]) -> None:
        """Record that the request `rid` loads these blocks, until `land`."""
        mine = self._blocks.setdefault(rid, [])
        for block in hashes:
            # Two requests load one block where they do not join. The first stays its carrier, so
            # that `land` of the second does not end the wait of those that joined the first.
            if block not in self._carrier:
                self._carrier[block] = rid
                mine.append(block)

    def carrier(self, block: Hashable) -> str | None:
        """Return the request that loads this block, or None."""
        return self._carrier.get(block)

    def land(self, rid: str) -> None:
        """Forget a request's blocks: they have arrived, or will not. No-op for an unknown id."""
        for block in self._blocks.pop(rid, ()):
            del self._carrier[block]

    def check_invariants(self) -> None:
        carried = {block: rid for rid, blocks in self._blocks.items() for block in blocks}
        check_laws({"each block has one carrier": carried == self._carrier}, self._carrier)
