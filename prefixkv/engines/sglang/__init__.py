"""Plug-ins for SGLang (docs/sglang.md): the radix cache, `--radix-cache-backend prefixkv`, and the
transfers, `--disaggregation-transfer-backend prefixkv`.

SGLang finds `plugin.load` by the entry point group `sglang.srt.plugins`. All imports from SGLang
are in `internals.py` and `internals_transfer.py`; only `cache.py`, `events.py`, `plugin.py` and
`transfer.py` use them.
"""

TESTED = "0.5.23"
"""The supported version of SGLang. With another one the plug-in does nothing: SGLang gives no
promise for the methods that are hooked here, and their names changed three times in a year."""

NAME = "prefixkv"
"""Name of both backends on SGLang's command line."""

ROOMS = range(1, 2**63)
"""Valid room numbers. To SGLang 0 is a room whose metadata has not arrived, and it keeps the
numbers in signed 64 bits."""
