"""`prefixkv serve --ray`: workers as actors of a Ray cluster, with the same fleet and front.

Ray places the actors, restarts them and finds them by name. This module decides when a former life
of a worker is certainly dead, so that others may reuse what they hold for it. Ray's own report that
an actor failed, restarted or died is no proof: Ray says so of processes that it cannot reach, or is
about to kill. The proof is the kernel's, asked by `is_dead` in a task on the node where the process
was, if that node's raylet is alive. If the node is lost there is no proof, and an operator has to
decide (`/lost` and `/fence` of the status port).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
import ray
import zmq
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from prefixkv import CurveConfig, PrefillConfig
from prefixkv.errors import ConfigError
from prefixkv.serving import interrupts
from prefixkv.serving.config import KINDS, DecodeWorkerConfig, PrefillWorkerConfig, WorkerConfig
from prefixkv.serving.fleet import Fleet
from prefixkv.serving.launch import Kept, ServeLaunch, WorkerFailedError
from prefixkv.serving.tracing import variables
from prefixkv.serving.wire import FenceRequest, WorkerInfo
from prefixkv.serving.worker import make_worker
from prefixkv.settings import load
from prefixkv.spi import HeldLife, ProcessLife, is_dead

logger = logging.getLogger("prefixkv.ray")

_AGAIN_S: Final = 0.5  # pause before Ray is asked again
_REACH_S: Final = 10.0


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
    """One `Worker` on the event loop of the actor's process, at the address of its node. Ray
    restarts the process when it ends; every start is another life."""

    def __init__(self, config: WorkerConfig, environ: Mapping[str, str]) -> None:
        # What the node's environment has is kept: it may name the collector of its own machine.
        for name, text in environ.items():
            os.environ.setdefault(name, text)
        interrupts.log_to_stderr()
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
        interrupts.keep_what_is_loaded()
        self._running = asyncio.create_task(self._worker.run())
        process = None if self._held is None else self._held.life
        return Life(self._worker.info, context.get_node_id(), process)

    async def watch(self) -> None:
        """Return once the worker was drained and has ended."""
        if not await asyncio.shield(self._running):
            os._exit(1)  # its engine has failed: Ray restarts the actor

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


async def ended_on_node(life: Life) -> bool:
    """Raises RayError if the task could not run there."""
    if life.process is None:
        return False
    # Not soft: on any other node the kernel would know nothing of the process.
    here = NodeAffinitySchedulingStrategy(life.node, soft=False)
    task = ray.remote(is_dead).options(num_cpus=0, max_retries=0, scheduling_strategy=here)
    return bool(await task.remote(life.process))


class Actor(Kept):
    """One worker as an actor, from its start to `end`. `_proofs`: of its lives that seem to be
    over, until each is fenced."""

    def __init__(self, role: str, name: str, handle: Any, fleet: Fleet) -> None:
        self._handle = handle
        self._proofs: dict[FenceRequest, asyncio.Task[None]] = {}
        super().__init__(role, name, fleet)

    async def _live_on(self) -> None:
        while not self._ending:
            with contextlib.suppress(RayActorError):
                if await self._live(await self._find()):
                    return
            if not self._ending:
                await asyncio.sleep(_AGAIN_S)

    async def _find(self) -> Life:
        """Raises WorkerFailedError if it cannot start, RayActorError if it may still start."""
        try:
            found: Life = await self._handle.life.options(max_task_retries=-1).remote()
            return found
        except (ActorDiedError, RayTaskError) as error:
            why = str(error).strip().splitlines()[-1]
            raise WorkerFailedError(f"{self._name} does not start: {why}") from error

    async def _live(self, life: Life) -> bool:
        """Follow one life, with its worker in the fleet, to its end. True if it was drained."""
        if life.key in self._proofs:
            self._proofs.pop(life.key).cancel()
        if life.key in self._fleet.fenced:
            ray.kill(self._handle, no_restart=False)  # a fenced life must not serve
            return False
        self._serves(life.info)
        try:
            await self._handle.watch.remote()
            return True
        except RayActorError as error:
            if not self._ending:
                logger.warning("%s is lost: %s", self._name, str(error).strip().splitlines()[0])
            return False
        finally:
            # No more requests first; then the proof, but at our own end, where nothing is reused.
            self._has_gone(life.info)
            if not self._ending:
                self._proofs[life.key] = asyncio.create_task(self._prove(life))

    async def _prove(self, life: Life) -> None:
        """Ask the life's node until its end is proved or said by an operator, or the node is
        lost."""
        # A node that Ray has given up never returns.
        while (life.node, True) in {
            (node["NodeID"], node["Alive"]) for node in await asyncio.to_thread(ray.nodes)
        }:
            if life.key in self._fleet.fenced:
                return
            # No answer proves nothing: ask again, unless Ray has given the node up.
            try:
                if await ended_on_node(life):
                    logger.warning("%s life %s has ended", life.info.name, life.info.life)
                    self._fleet.fence(life.key)
                    return
            except RayError as error:  # the node is lost, or busy with its own end
                logger.info("whether %s has ended is not known: %s", life.info.name, error)
            await asyncio.sleep(_AGAIN_S)
        logger.warning(
            "%s life %s was on node %s, which is lost: what is held for it stays held until "
            "/fence says that it is dead", life.info.name, life.info.life, life.node,
        )  # fmt: skip

    async def end(self, grace_s: float) -> None:
        """Drain the worker, and kill the actor after `grace_s`. Ray does not restart it."""
        self._ending = True
        if grace_s and self._has_served:
            with contextlib.suppress(RayError):
                await self._handle.drain.remote()
                await asyncio.wait((self._task,), timeout=grace_s)
        # For good: Ray starts no other life, and `_ending` keeps the task from looking for one.
        with contextlib.suppress(RayError):
            ray.kill(self._handle)
        await super().end(0.0)
        # The proofs run tasks in the cluster, so they end before it is left.
        for proof in self._proofs.values():
            proof.cancel()
        await asyncio.gather(*self._proofs.values(), return_exceptions=True)


class RayLaunch(ServeLaunch):
    """The workers run in a Ray cluster. Those without keys in their settings get keys of this
    start: one pair that all prefill workers share, and one for each decode worker."""

    _group: Any = None

    async def _begin(self, fleet: Fleet, name: str) -> None:
        """Connect, reserve a placement group for all workers, and start them. Raises
        ConfigError."""
        config, namespace = self.config, f"prefixkv/{name}"
        # Checked first, since `ray.init` tries for minutes.
        await _check_reachable(config.ray)
        try:
            await asyncio.to_thread(
                ray.init, config.ray, namespace=namespace, logging_level=logging.ERROR,
            )  # fmt: skip
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"there is no cluster at {config.ray}: {error}") from None
        self.signals.heed()  # again: `ray.init` has installed handlers of its own
        roles = [(role, environ) for role, many in self.environs.items() for environ in many]
        gpus = {"GPU": config.ray_gpus} if config.ray_gpus else {}
        bundles = [{"CPU": float(config.ray_cpus), **gpus}] * len(roles)
        self._group = placement_group(bundles, strategy=config.ray_placement)
        configs = _with_keys([load(KINDS[role], None, environ) for role, environ in roles])
        for index, ((role, _), config) in enumerate(zip(roles, configs, strict=True)):
            kind = ray.remote(WorkerActor).options(
                name=config.node.name, num_cpus=self.config.ray_cpus,
                num_gpus=self.config.ray_gpus, max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            )  # fmt: skip
            try:
                handle = kind.remote(config, variables())
            except ValueError as error:
                why = f"{config.node.name} is in {namespace} already: {error}"
                raise ConfigError(why) from None
            self._workers.append(Actor(role, config.node.name, handle, fleet))

    async def _close(self) -> None:
        if self._group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)
        await asyncio.to_thread(ray.shutdown)


async def _check_reachable(address: str) -> None:
    """Raise ConfigError if nothing answers. Ray would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto": Ray knows where
    try:
        connect = partial(socket.create_connection, (host.strip("[]"), int(port)), _REACH_S)
        (await asyncio.to_thread(connect)).close()
    except OSError as error:
        raise ConfigError(f"there is no cluster at {address}: {error}") from None


def _with_keys(configs: Sequence[Any]) -> list[Any]:
    """Give keys to those without keys in their settings. Decode workers are CURVE's clients:
    prefill accepts their public keys alone, each under its worker's name."""
    decode = [config.node for config in configs if isinstance(config, DecodeWorkerConfig)]
    server, clients = _new_pair(), {node.name: _new_pair() for node in decode}
    allowed = {public: name for name, (public, _) in clients.items()}
    made = []
    for config in configs:
        node, control = config.node, config.node.control
        if control.curve is None and not control.network_is_isolated:
            if node.name in clients:
                curve = CurveConfig(*clients[node.name], server_key=server[0])
            else:
                curve = CurveConfig(*server, allowed_clients=allowed)
            config = replace(config, node=replace(node, control=replace(control, curve=curve)))
        made.append(config)
    return made


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()
