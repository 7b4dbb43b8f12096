"""Workers as child processes, where the process says what no worker of ours does."""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec
import pytest

from prefixkv.errors import ConfigError
from prefixkv.serving.fleet import Fleet
from prefixkv.serving.launch import Child
from prefixkv.serving.process import READY
from prefixkv.serving.wire import WorkerInfo
from tests.models.patience import PATIENCE_S

INFO = WorkerInfo(
    role="decode", name="d", url="", status_url="", endpoint="", model="m", identity="m 0",
    page_size=16, num_pages=1, context=16, vocab_size=2, life="1", pid=1,
)  # fmt: skip


def test_a_worker_that_the_fleet_does_not_take_is_an_error_and_ends() -> None:
    line = READY + msgspec.json.encode(INFO).decode()
    program = f"import time; print({line!r}, flush=True); time.sleep(1e6)"

    def refuse(info: WorkerInfo) -> None:
        assert info == INFO
        raise ConfigError("another model")

    async def main() -> None:
        gone: list[WorkerInfo] = []
        within = [sys.executable, "-c", program]
        child = Child("decode", os.environ, refuse, gone.append, within)
        with pytest.raises(ConfigError, match="another model"):
            await child.ready
        process = child._process
        await child.end(0)
        assert process is not None
        assert process.returncode is not None
        assert gone == [INFO]

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_fleet_that_is_closed_takes_no_worker() -> None:
    """One may become ready while all are being ended."""

    async def main() -> None:
        fleet = Fleet("key")
        fleet.add(INFO)
        assert [*fleet.workers] == ["d"]
        await fleet.close()
        fleet.add(INFO)
        assert not fleet.workers
        assert not fleet.members

    asyncio.run(main())
