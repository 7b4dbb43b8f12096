"""A process that serves: signals, the line that says that it is ready, and its end with its
parent's."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from typing import Final

import msgspec

from prefixkv.serving.config import WorkerConfig
from prefixkv.serving.worker import make_worker

READY: Final = "ready "
"""A worker's line on stdout when it serves; its `WorkerInfo` as JSON follows."""

_PR_SET_PDEATHSIG: Final = 1
_END_S: Final = 10.0


def run_worker(config: WorkerConfig) -> int:
    """Be a worker until SIGTERM or SIGINT has drained it; a second one ends it at once. Returns the
    exit status. Raises ConfigError where it cannot start."""
    if config.worker.parent:
        die_with(config.worker.parent)
    log_to_stderr()
    return asyncio.run(_run_worker(config))


async def _run_worker(config: WorkerConfig) -> int:
    worker = make_worker(config)
    serving = False
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if not serving or signals > 2:
            os._exit(1)
        worker.drain()
        if signals == 2:
            asyncio.get_running_loop().call_later(_END_S, os._exit, 1)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    await worker.start()
    serving = True
    try:
        print(READY + msgspec.json.encode(worker.info).decode(), flush=True)
        return 0 if await worker.run() else 1
    finally:
        await worker.close()


def die_with(parent: int) -> None:
    """Linux kills this process when `parent`, which started it, is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def log_to_stderr() -> None:
    """Warnings of all, and what prefixkv says of peers."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
