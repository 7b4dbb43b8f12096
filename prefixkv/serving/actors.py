"""A worker as an actor of Ray's, and what is asked of the node that it was on once it is gone.

The actor's process hosts one `Worker`, on an event loop in a thread of its own. Ray starts it anew
where it ends; every start is another life. The module imports nothing of Ray's before it runs
there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Final

import msgspec

from prefixkv import PrefillConfig
from prefixkv.serving.config import PrefillWorkerConfig, WorkerConfig
from prefixkv.serving.process import log_to_stderr
from prefixkv.serving.wire import WorkerInfo
from prefixkv.serving.worker import DecodeWorker, PrefillWorker, make_worker
from prefixkv.spi import HeldLife, ProcessLife, is_dead

logger = logging.getLogger("prefixkv.ray")

WATCH_S: Final = 30.0
"""`WorkerActor.watch` returns after this long, if nothing has happened."""


class Life(msgspec.Struct, frozen=True):
    """One life of a worker: what it says of itself, Ray's id of the node that it is on, and which
    process it is there; None where the kernel does not tell."""

    info: WorkerInfo
    node: str
    process: ProcessLife | None


class WorkerActor:
    """The actor. Its methods run in threads of Ray's.

    Args:
        config: of the worker. It binds to the address of the node where the actor is.

    Raises: what `Worker.start` raises; where Ray had started it before, the process ends instead,
        so that Ray tries again.
    """

    def __init__(self, config: WorkerConfig) -> None:
        import ray

        log_to_stderr()
        self._held = None
        with contextlib.suppress(OSError):
            self._held = HeldLife()
        self._ended = threading.Event()
        ready: Future[WorkerInfo] = Future()
        config = placed(config, ray.util.get_node_ip_address())
        threading.Thread(target=self._serve, args=(config, ready), name="worker").start()
        context = ray.get_runtime_context()
        try:
            info = ready.result()
        except Exception:
            if context.was_current_actor_reconstructed:
                logger.exception("a worker does not start")
                os._exit(1)
            raise
        process = None if self._held is None else self._held.life
        self._life = Life(info, context.get_node_id(), process)

    def _serve(self, config: WorkerConfig, ready: Future[WorkerInfo]) -> None:
        if not asyncio.run(self._run(config, ready)):
            os._exit(1)  # its engine has failed: Ray starts it anew
        self._ended.set()

    async def _run(self, config: WorkerConfig, ready: Future[WorkerInfo]) -> bool:
        self._loop = asyncio.get_running_loop()
        try:
            self._worker: PrefillWorker | DecodeWorker = make_worker(config)
            await self._worker.start()
        except BaseException as error:
            ready.set_exception(error)
            return True
        ready.set_result(self._worker.info)
        return await self._worker.run()

    def life(self) -> Life:
        """Of this process."""
        return self._life

    def watch(self) -> bool:
        """Whether it was drained and has ended; waits for that, `WATCH_S` at most."""
        return self._ended.wait(WATCH_S)

    def drain(self) -> None:
        """As `Worker.drain`."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._worker.drain)


def placed(config: WorkerConfig, host: str) -> WorkerConfig:
    """The configuration for a machine: all that it binds by default, it binds to `host`."""
    listen = replace(config.worker.listen, host=host, status_host=host)
    config = replace(config, worker=replace(config.worker, listen=listen))
    if isinstance(config, PrefillWorkerConfig) and config.node.bind == PrefillConfig().bind:
        bind = f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"
        config = replace(config, node=replace(config.node, bind=bind))
    return config


def has_ended(process: ProcessLife) -> bool:
    """Whether it is proved that this process has ended. Has to run on its node: elsewhere nothing
    is proved."""
    return is_dead(process)
