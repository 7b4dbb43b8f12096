"""`prefixkv serve --ray`: workers as actors of a Ray cluster, the same fleet and the same front.

Ray places the actors, starts them anew and finds them by name. What is decided here is when a
former life of a worker is dead for certain, so that others may use again what they hold for it.
That an actor fails, restarts or is dead in Ray's books proves nothing: Ray says so of processes
that it only cannot reach, or is about to kill. It is proved by the raylet of the node where the
process was, if that raylet lives: it runs `has_ended` there, which asks the kernel. Where the node
is lost nothing is proved, and an operator has to say so (`/lost` and `/fence` of the status port).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import ray
import zmq
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from prefixkv.config import CurveConfig
from prefixkv.errors import ConfigError
from prefixkv.serving.actors import Life, WorkerActor, has_ended
from prefixkv.serving.config import KINDS, PrefillWorkerConfig, WorkerConfig
from prefixkv.serving.fleet import Fleet
from prefixkv.serving.http import ApiError, decode_body, json_response, read_body
from prefixkv.serving.launch import Launch, WorkerFailedError
from prefixkv.serving.wire import Fence
from prefixkv.settings import load

logger = logging.getLogger("prefixkv.ray")

_AGAIN_S: Final = 0.5  # before Ray is asked again
_REACH_S: Final = 10.0
_CALLS: Final = 16  # of an actor's methods at once: watches of a front that was cut off add up


@dataclass(eq=False)
class _Former:
    """A life that is over, for all that Ray says. `is_lost`: so is its node."""

    life: Life
    is_lost: bool = False
    proving: asyncio.Task[None] | None = None


class FormerLives:
    """Lives of workers that are over, until each is fenced. Used on one event loop.

    Args:
        fleet: is told of each that is dead for certain.
        limits: of requests to `routes`.
    """

    def __init__(self, fleet: Fleet, limits: Any) -> None:
        self._fleet, self._limits = fleet, limits
        self._former: dict[tuple[str, str], _Former] = {}
        self._fenced: set[tuple[str, str]] = set()
        self.routes: list[BaseRoute] = [
            Route("/lost", self._show),
            Route("/fence", self._fence, methods=["POST"]),
        ]

    def take(self, life: Life) -> None:
        """It seems to be over. It is fenced once that is proved."""
        former = self._former[_key(life)] = _Former(life)
        former.proving = asyncio.create_task(self._prove(former))

    def is_back(self, life: Life) -> bool:
        """It is heard: whatever seemed so, it is not over. False if it was fenced all the same."""
        former = self._former.pop(_key(life), None)
        if former is not None and former.proving is not None:
            former.proving.cancel()
        return _key(life) not in self._fenced

    async def close(self) -> None:
        """Ask no more."""
        tasks = [former.proving for former in self._former.values() if former.proving is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _prove(self, former: _Former) -> None:
        life = former.life
        while not former.is_lost and self._former.get(_key(life)) is former:
            try:
                if await ended_on_node(life):
                    logger.warning("%s life %s has ended", life.info.name, life.info.life)
                    await self._end(life)
                    return
            except RayError as error:  # the node is lost, or busy with its own end
                logger.info("whether %s has ended is not known: %s", life.info.name, error)
            former.is_lost = not await is_node_alive(life.node)
            await asyncio.sleep(_AGAIN_S)
        if not former.is_lost:
            return  # an operator has fenced it
        logger.warning(
            "%s life %s was on node %s, which is lost: what is held for it stays held until "
            "/fence says that it is dead", life.info.name, life.info.life, life.node,
        )  # fmt: skip

    async def _end(self, life: Life) -> None:
        self._former.pop(_key(life), None)
        self._fenced.add(_key(life))
        await self._fleet.fence(life.info.name, life.info.life)

    # --- for an operator --------------------------------------------------------------------------

    async def _show(self, _: Request) -> Response:
        lost = await self._fleet.lost()
        return json_response([_told(one, lost) for one in self._former.values()])

    async def _fence(self, request: Request) -> Response:
        asked = decode_body(await read_body(request, self._limits), Fence)
        key = asked.name, asked.life
        serving = self._fleet.workers.get(asked.name)
        if serving is not None and serving.life == asked.life:
            raise ApiError(409, f"{asked.name} life {asked.life} serves", code="worker_lives")
        if key in self._fenced:
            return Response(status_code=202)
        former = self._former.get(key)
        if former is None:
            why = f"no life {asked.life} of {asked.name} is lost"
            raise ApiError(404, why, code="no_such_life")
        logger.warning("%s life %s is fenced: an operator said so", asked.name, asked.life)
        await self._end(former.life)
        return Response(status_code=202)


def _key(life: Life) -> tuple[str, str]:
    return life.info.name, life.info.life


def _told(former: _Former, lost: dict[str, list[Any]]) -> dict[str, Any]:
    info = former.life.info
    held = {
        worker: one.held
        for worker, peers in lost.items()
        for one in peers
        if (one.name, one.life) == (info.name, info.life)
    }
    state = "node lost" if former.is_lost else "ending"
    return {
        "name": info.name, "life": info.life, "pid": info.pid, "url": info.url,
        "node": former.life.node, "state": state, "held": held,
    }  # fmt: skip


async def ended_on_node(life: Life) -> bool:
    """Whether the raylet of its node, alive, proves that the process of this life has ended. Raises
    RayError where the task could not run there."""
    if life.process is None:
        return False
    here = NodeAffinitySchedulingStrategy(life.node, soft=False)
    task = ray.remote(has_ended).options(num_cpus=0, max_retries=0, scheduling_strategy=here)
    return bool(await task.remote(life.process))


async def is_node_alive(node: str) -> bool:
    """Whether Ray has not given this node up. One that it has given up never comes back."""
    nodes = await asyncio.to_thread(ray.nodes)
    return any(one["NodeID"] == node and one["Alive"] for one in nodes)


class Actor:
    """One worker as an actor, from its start to `end`. As `launch.Child`.

    Args:
        handle: Ray's.
        name: of the worker.
        fleet, former: hear of its lives.
    """

    def __init__(self, handle: Any, name: str, fleet: Fleet, former: FormerLives) -> None:
        self._handle, self._name = handle, name
        self._fleet, self._former = fleet, former
        self._ending = False
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        try:
            while not self._ending:
                with contextlib.suppress(RayError):
                    life = await self._find()
                    if await self._live(life):
                        return
                if not self._ending:
                    await asyncio.sleep(_AGAIN_S)
        except Exception as error:
            if not self.ready.done():
                self.ready.set_exception(error)
            elif not self._ending:
                logger.exception("%s is given up", self._name)

    async def _find(self) -> Life:
        """Its present life; waits for Ray to start it. Raises WorkerFailedError where Ray does not,
        RayError where it may yet."""
        try:
            found: Life = await self._handle.life.options(max_task_retries=-1).remote()
            return found
        except ActorDiedError as error:
            why = str(error).strip().splitlines()[-1]
            raise WorkerFailedError(f"{self._name} does not start: {why}") from error

    async def _live(self, life: Life) -> bool:
        """One life of it, to its end. True if it was drained."""
        if not self._former.is_back(life):
            ray.kill(self._handle, no_restart=False)  # nothing that was fenced is worked with
            return False
        self._fleet.add(life.info)
        if not self.ready.done():
            self.ready.set_result(life.info)
        try:
            while not await self._handle.watch.remote():
                pass
            return True
        except RayActorError as error:
            if not self._ending:
                logger.warning("%s is lost: %s", self._name, str(error).strip().splitlines()[0])
            return False
        finally:
            self._fleet.remove(life.info.name, life.info.life)
            if not self._ending:
                self._former.take(life)

    async def end(self, grace_s: float) -> None:
        """Drain it, and kill it after `grace_s`. Ray does not start it again."""
        self._ending = True
        if grace_s and self.ready.done() and self.ready.exception() is None:
            with contextlib.suppress(RayError):
                await self._handle.drain.remote()
                await asyncio.wait((self._task,), timeout=grace_s)
        with contextlib.suppress(RayError):
            ray.kill(self._handle)
        self._task.cancel()
        await asyncio.wait((self._task,))


class RayLaunch(Launch):
    """`prefixkv serve --ray`. As `Launch`, but for where workers are."""

    _former: FormerLives
    _group: Any = None

    def _routes(self, fleet: Fleet) -> list[BaseRoute]:
        self._former = FormerLives(fleet, self.config.listen.limits)
        return self._former.routes

    async def _open(self, name: str) -> None:
        config = self.config
        self._namespace = f"prefixkv/{name}"
        await _check_reachable(config.ray)
        self._keys = _Keys(f"decode-{i}" for i in range(config.decode))
        try:
            await asyncio.to_thread(
                ray.init, config.ray, namespace=self._namespace, logging_level=logging.ERROR,
            )  # fmt: skip
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"there is no cluster at {config.ray}: {error}") from None
        self.heed_signals()  # Ray has put handlers of its own in their place
        bundle = {"CPU": float(config.ray_cpus)}
        if config.ray_gpus:
            bundle["GPU"] = config.ray_gpus
        self._bundles = iter(range(config.prefill + config.decode))
        self._group = placement_group(
            [bundle] * (config.prefill + config.decode), strategy=config.ray_placement
        )

    def _child(self, role: str, number: int, fleet: Fleet) -> Actor:
        loaded: Any = load(KINDS[role], None, self._environ(role, number))
        config = self._keys.give(loaded)
        name = config.node.name
        place = PlacementGroupSchedulingStrategy(self._group, next(self._bundles))
        kind = ray.remote(WorkerActor).options(
            name=name, num_cpus=self.config.ray_cpus, num_gpus=self.config.ray_gpus,
            max_restarts=-1, max_concurrency=_CALLS, scheduling_strategy=place,
        )  # fmt: skip
        try:
            handle = kind.remote(config)
        except ValueError as error:
            raise ConfigError(f"{name} is in {self._namespace} already: {error}") from None
        return Actor(handle, name, fleet, self._former)

    def _threads(self) -> int:
        return self.config.ray_cpus

    def _environ(self, role: str, number: int) -> dict[str, str]:
        return {**super()._environ(role, number), "PREFIXKV_PARENT": "0"}

    async def _close(self) -> None:
        await self._former.close()
        if self._group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)
        await asyncio.to_thread(ray.shutdown)


async def _check_reachable(address: str) -> None:
    """Raises ConfigError where nothing answers there. Ray would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto": Ray knows where
    try:
        async with asyncio.timeout(_REACH_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError as error:  # a TimeoutError too
        why = str(error) or f"no answer within {_REACH_S:g} s"
        raise ConfigError(f"there is no cluster at {address}: {why}") from None
    writer.close()


class _Keys:
    """CURVE keys for the workers of one start: a pair that all prefill workers share, one for each
    decode worker. Settings that have keys, or want none, are left alone.

    Args:
        names: of the decode workers.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._server = _new_pair()
        self._clients = {name: _new_pair() for name in names}

    def give(self, config: WorkerConfig) -> WorkerConfig:
        """The configuration with keys."""
        control = config.node.control
        if control.curve is not None or control.allow_remote_without_keys:
            return config
        if isinstance(config, PrefillWorkerConfig):
            allowed = {public: name for name, (public, _) in self._clients.items()}
            curve = CurveConfig(*self._server, allowed_clients=allowed)
        else:
            curve = CurveConfig(*self._clients[config.node.name], server_key=self._server[0])
        node: Any = replace(config.node, control=replace(control, curve=curve))
        return replace(config, node=node)


def _new_pair() -> tuple[str, str]:
    """A public key, and the secret one."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()
