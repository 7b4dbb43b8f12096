"""These run in the environment that has SGLang; see `tests/engines/sglang/test_inside.py`."""

from __future__ import annotations

import sys

from tests.engines.sglang import stubs

sys.dont_write_bytecode = True
stubs.install()
