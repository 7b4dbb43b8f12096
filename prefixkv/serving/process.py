"""A worker process: its signals, the line that says it is ready, and its end with its parent."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
from functools import partial
from typing import Final

import msgspec

from prefixkv.errors import CallerError, CapacityError
from prefixkv.serving import interrupts
from prefixkv.serving.config import WorkerConfig
from prefixkv.serving.worker import make_worker

READY: Final = "ready "
"""Prefix of a worker's line on stdout once it serves; its `WorkerInfo` as JSON follows."""

REFUSED: Final = "refused "
"""Prefix of the line on stdout by which a worker process, started by another, says that it cannot
start with its settings; the reason as JSON follows."""

_PR_SET_PDEATHSIG: Final = 1
_END_S: Final = 10.0


def run_worker(config: WorkerConfig) -> int:
    """Run until SIGTERM or SIGINT has drained the worker; a second signal ends it at once. Returns
    the exit status. Raises ConfigError if it cannot start."""
    if config.worker.parent:
        die_with(config.worker.parent)
    log_to_stderr()
    try:
        return interrupts.run(partial(_run_worker, config))
    except (CallerError, CapacityError) as error:
        if not config.worker.parent:
            raise
        # One line for all workers: the process that started them prints it.
        print(REFUSED + msgspec.json.encode(str(error)).decode(), flush=True)
        return 2


async def _run_worker(config: WorkerConfig) -> int:
    worker = make_worker(config)
    serving = False
    signals = 0

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
        keep_what_is_loaded()
        print(READY + msgspec.json.encode(worker.info).decode(), flush=True)
        return 0 if await worker.run() else 1
    finally:
        await worker.close()


def keep_what_is_loaded() -> None:
    """Leave all that is loaded out of later garbage collections: each would look at every object of
    the model's libraries, and all requests would wait meanwhile."""
    gc.collect()
    gc.freeze()


def die_with(parent: int) -> None:
    """Have Linux kill this process when `parent` is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Asked after prctl: a parent that died before it sends no signal, but is no parent any more.
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def log_to_stderr() -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
