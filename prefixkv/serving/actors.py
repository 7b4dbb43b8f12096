"""A worker as a Ray actor. The actor's process hosts one `Worker`, on an event loop in a thread of
its own. Ray restarts the process when it ends; every start is another life."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Final

import msgspec

from prefixkv import PrefillConfig
from prefixkv.serving.config import PrefillWorkerConfig, WorkerConfig
from prefixkv.serving.interrupts import keep_what_is_loaded, log_to_stderr
from prefixkv.serving.wire import WorkerInfo
from prefixkv.serving.worker import DecodeWorker, PrefillWorker, make_worker
from prefixkv.spi import HeldLife, ProcessLife

logger = logging.getLogger("prefixkv.ray")

_WATCH_S: Final = 30.0


class Life(msgspec.Struct, frozen=True):
    """One life of a worker: Ray's id of its node, and its process there, which is None if the
    kernel does not identify it."""

    info: WorkerInfo
    node: str
    process: ProcessLife | None

    @property
    def key(self) -> tuple[str, str]:
        return self.info.name, self.info.life


class WorkerActor:
    """Its methods run in Ray's threads. Raises what `Worker.start` raises; if Ray has restarted the
    actor, the process ends instead, so that Ray tries again.

    Args:
        config: the worker binds to the address of the actor's node.
        environ: variables that the node's environment does not have.
    """

    def __init__(self, config: WorkerConfig, environ: Mapping[str, str]) -> None:
        import ray  # only where it runs

        # What the node has is kept: it may name the collector of its own machine.
        for name, text in environ.items():
            os.environ.setdefault(name, text)
        log_to_stderr()
        # Held for as long as the process lives: it is what `is_dead` looks for. Without it the end
        # of this life cannot be proved, only declared by an operator.
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
            # An exception here would make Ray give the actor up; an exit makes it try again. A
            # first start is different: its error belongs to the operator.
            if context.was_current_actor_reconstructed:
                logger.exception("a worker does not start")
                os._exit(1)
            raise
        process = None if self._held is None else self._held.life
        self._life = Life(info, context.get_node_id(), process)

    def _serve(self, config: WorkerConfig, ready: Future[WorkerInfo]) -> None:
        if not asyncio.run(self._run(config, ready)):
            os._exit(1)  # its engine has failed: Ray restarts the actor
        self._ended.set()

    async def _run(self, config: WorkerConfig, ready: Future[WorkerInfo]) -> bool:
        """Report to `ready`, and serve. Returns False if the engine has failed."""
        self._loop = asyncio.get_running_loop()
        try:
            self._worker: PrefillWorker | DecodeWorker = make_worker(config)
            await self._worker.start()
        except BaseException as error:
            ready.set_exception(error)
            return True
        keep_what_is_loaded()
        ready.set_result(self._worker.info)
        return await self._worker.run()

    def life(self) -> Life:
        return self._life

    def watch(self) -> bool:
        """Return whether the worker was drained and has ended, after `_WATCH_S` at most."""
        return self._ended.wait(_WATCH_S)

    def drain(self) -> None:
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._worker.drain)


def placed(config: WorkerConfig, host: str) -> WorkerConfig:
    """Return a configuration in which every address that is bound by default is `host`."""
    listen = replace(config.worker.listen, host=host, status_host=host)
    config = replace(config, worker=replace(config.worker, listen=listen))
    # An address that was set on purpose is kept.
    if isinstance(config, PrefillWorkerConfig) and config.node.bind == PrefillConfig().bind:
        bind = f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"
        config = replace(config, node=replace(config.node, bind=bind))
    return config
