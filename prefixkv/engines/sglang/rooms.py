"""The numbers that a room may have, in each of SGLang's processes."""

from __future__ import annotations

from typing import Final

ROOMS: Final = range(1, 2**63)
"""SGLang takes 0 for a room whose metadata has not come, and keeps the numbers in 64 bits."""
