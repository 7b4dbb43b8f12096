"""The range of room numbers, for each of SGLang's processes."""

from __future__ import annotations

from typing import Final

ROOMS: Final = range(1, 2**63)
"""Valid room numbers. To SGLang 0 is a room whose metadata has not arrived, and it keeps the
numbers in signed 64 bits."""
