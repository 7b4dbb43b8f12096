"""These run in the environment that has SGLang; see `tests/integration/sglang/test_inside.py`."""

from __future__ import annotations

import sys

from tests.integration.sglang import stubs

sys.dont_write_bytecode = True
stubs.install()
