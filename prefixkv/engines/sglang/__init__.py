"""prefixkv under SGLang (docs/sglang.md): `--radix-cache-backend prefixkv`, its radix cache, and
`--disaggregation-transfer-backend prefixkv`, its transfers.

SGLang finds `plugin.load` by the entry point group `sglang.srt.plugins`. What is taken from SGLang
is in `internals.py` and `internals_transfer.py`. Of the tree, `keys.py`, `slots.py`, `order.py`,
`clock.py`, `waiting.py` and `joins.py` know nothing of it; of the transfers, `memory.py`,
`sends.py`, `receives.py`, `fences.py` and `transfer_options.py`.
"""

TESTED = "0.5.23"
"""The version of SGLang that this is for. With another it stands down: SGLang promises
nothing of what is hooked and derived from, and its names changed three times in a year."""

NAME = "prefixkv"
"""Of the backend."""
