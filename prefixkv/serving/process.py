"""A worker process: its signals, the line that says it is ready, and its end with its parent."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from typing import Final

import msgspec

from prefixkv.errors import CallerError, CapacityError
from prefixkv.serving import interrupts
from prefixkv.serving.config import WorkerConfig
from prefixkv.serving.worker import make_worker

READY: Final = "ready "
"""Begins a worker's line on stdout once it serves; its `WorkerInfo` as JSON follows."""

REFUSED: Final = "refused "
"""Begins the line on stdout of a worker that cannot start with its settings; why, as JSON."""

_PR_SET_PDEATHSIG: Final = 1
_END_S: Final = 10.0


def run_worker(config: WorkerConfig) -> int:
    """Run until SIGTERM or SIGINT has drained the worker; a second signal ends it at once. Returns
    the exit status. Raises ConfigError if it cannot start."""
    if config.worker.parent:
        die_with(config.worker.parent)
    interrupts.log_to_stderr()
    try:
        return asyncio.run(_run_worker(config))
    except (CallerError, CapacityError) as error:
        if not config.worker.parent:
            raise
        # One line for all workers: the process that started them prints it.
        print(REFUSED + msgspec.json.encode(str(error)).decode(), flush=True)
        return 2


async def _run_worker(config: WorkerConfig) -> int:
    worker = make_worker(config)
    serving, signals = False, 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        # 1. While the model loads there is nothing to drain, and loading cannot be interrupted.
        # 2. The first signal drains; the second ends the drain, with `_END_S` to close.
        # 3. A third one, or a close that hangs, ends the process without more ado.
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
        interrupts.keep_what_is_loaded()
        print(READY + msgspec.json.encode(worker.info).decode(), flush=True)
        return 0 if await worker.run() else 1
    finally:
        await worker.close()


def die_with(parent: int) -> None:
    """Have Linux kill this process when `parent` is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Asked after prctl: a parent that died before it sends no signal, but is no parent any more.
    if os.getppid() != parent:
        os._exit(1)
