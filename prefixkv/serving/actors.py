"""A worker as a Ray actor: one `Worker` on the event loop of the actor's process. Ray restarts the
process when it ends; every start is another life."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from prefixkv import PrefillConfig
from prefixkv.serving.config import PrefillWorkerConfig, WorkerConfig
from prefixkv.serving.interrupts import keep_what_is_loaded, log_to_stderr
from prefixkv.serving.wire import FenceRequest, WorkerInfo
from prefixkv.serving.worker import make_worker
from prefixkv.spi import HeldLife, ProcessLife

logger = logging.getLogger("prefixkv.ray")


class Life(msgspec.Struct, frozen=True):
    """One life of a worker: Ray's id of its node, and its process there, which is None if the
    kernel does not identify it."""

    info: WorkerInfo
    node: str
    process: ProcessLife | None

    @property
    def key(self) -> FenceRequest:
        return FenceRequest(self.info.name, self.info.life)


class WorkerActor:
    """Its methods run on one event loop.

    Args:
        config: the worker binds to the address of the actor's node.
        environ: variables that the node's environment does not have.
    """

    def __init__(self, config: WorkerConfig, environ: Mapping[str, str]) -> None:
        # What the node has is kept: it may name the collector of its own machine.
        for name, text in environ.items():
            os.environ.setdefault(name, text)
        log_to_stderr()
        # Held for as long as the process lives: it is what `is_dead` looks for. Without it the end
        # of this life cannot be proved, only declared by an operator.
        self._held: HeldLife | None = None
        with contextlib.suppress(OSError):
            self._held = HeldLife()
        self._config = config
        self._life: asyncio.Task[Life] | None = None

    async def life(self) -> Life:
        """Serve, from the first call on. Raises what `Worker.start` raises; if Ray has restarted
        the actor, the process ends instead, so that Ray tries again."""
        if self._life is None:
            self._life = asyncio.create_task(self._start())
        return await asyncio.shield(self._life)

    async def _start(self) -> Life:
        import ray  # only where it runs

        context = ray.get_runtime_context()
        try:
            self._worker = make_worker(placed(self._config, ray.util.get_node_ip_address()))
            await self._worker.start()
        except Exception:
            # A first start is different: its error belongs to the operator.
            if context.was_current_actor_reconstructed:
                logger.exception("a worker does not start")
                os._exit(1)
            raise
        keep_what_is_loaded()
        self._running = asyncio.create_task(self._run())
        process = None if self._held is None else self._held.life
        return Life(self._worker.info, context.get_node_id(), process)

    async def _run(self) -> None:
        if not await self._worker.run():
            os._exit(1)  # its engine has failed: Ray restarts the actor

    async def watch(self) -> None:
        """Return once the worker was drained and has ended."""
        await asyncio.shield(self._running)

    async def drain(self) -> None:
        self._worker.drain()


def placed(config: WorkerConfig, host: str) -> WorkerConfig:
    """Return a configuration in which every address that is bound by default is `host`."""
    listen = replace(config.worker.listen, host=host, status_host=host)
    config = replace(config, worker=replace(config.worker, listen=listen))
    # An address that was set on purpose is kept.
    if isinstance(config, PrefillWorkerConfig) and config.node.bind == PrefillConfig().bind:
        bind = f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"
        config = replace(config, node=replace(config.node, bind=bind))
    return config
