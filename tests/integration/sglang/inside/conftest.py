"""These run in the environment that has SGLang; see `tests/integration/sglang/test_inside.py`."""

import sys
from collections.abc import Iterator

import pytest

from tests.integration.sglang import stubs

sys.dont_write_bytecode = True
stubs.install()

from prefixkv.engines.sglang import plugin  # noqa: E402 - SGLang's names are there by now
from tests.integration.sglang.inside.pair import Pair  # noqa: E402


@pytest.fixture
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HOST_IP", "127.0.0.1")
    monkeypatch.delenv("PREFIXKV_TRANSFER", raising=False)
    plugin.load()


@pytest.fixture
def pair(this_machine: None) -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()
