"""`prefixkv serve --ray`: workers as actors of a Ray cluster, with the same fleet and front.

Ray places the actors, restarts them and finds them by name. This module decides when a former life
of a worker is certainly dead, so that others may reuse what they hold for it. Ray's own report that
an actor failed, restarted or died is no proof: Ray says so of processes that it cannot reach, or is
about to kill. The proof is the kernel's, asked by `has_ended` in a task on the node where the
process was, if that node's raylet is alive. If the node is lost there is no proof, and an operator
has to decide (`/lost` and `/fence` of the status port).
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

from prefixkv import CurveConfig
from prefixkv.errors import ConfigError
from prefixkv.serving.actors import Life, WorkerActor, has_ended
from prefixkv.serving.config import KINDS, PrefillWorkerConfig, WorkerConfig
from prefixkv.serving.fleet import Fleet
from prefixkv.serving.http import ApiError, decode_body, json_response, read_body
from prefixkv.serving.launch import Kept, Launch, WorkerFailedError
from prefixkv.serving.tracing import variables
from prefixkv.serving.wire import FenceRequest
from prefixkv.settings import load

logger = logging.getLogger("prefixkv.ray")

_AGAIN_S: Final = 0.5  # pause before Ray is asked again
_REACH_S: Final = 10.0
_CALLS: Final = 16  # concurrent calls of an actor: watches of a front that was cut off add up


@dataclass(eq=False)
class _Former:
    """A life that Ray reports as over. `is_lost`: with its node, so the end cannot be proved."""

    life: Life
    is_lost: bool = False
    proving: asyncio.Task[None] | None = None


class FormerLives:
    """Lives of workers that seem to be over, until each is fenced. Used on one event loop."""

    def __init__(self, fleet: Fleet, limits: Any) -> None:
        self._fleet, self._limits = fleet, limits
        # Both by (name, life). A life moves from `_former` to `_fenced` once, and never back.
        self._former: dict[tuple[str, str], _Former] = {}
        self._fenced: set[tuple[str, str]] = set()
        self.routes: list[BaseRoute] = [
            Route("/lost", self._show),
            Route("/fence", self._fence, methods=["POST"]),
        ]

    def suspect(self, life: Life) -> None:
        """Begin to prove that a life has ended; the fleet fences it once that is proved."""
        former = self._former[_key(life)] = _Former(life)
        former.proving = asyncio.create_task(self._prove(former))

    def answered(self, life: Life) -> bool:
        """Cancel the proof. Returns False if the life was fenced, so that it must not serve."""
        former = self._former.pop(_key(life), None)
        if former is not None and former.proving is not None:
            former.proving.cancel()
        return _key(life) not in self._fenced

    async def close(self) -> None:
        tasks = [former.proving for former in self._former.values() if former.proving is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _prove(self, former: _Former) -> None:
        """Ask the life's node until its end is proved, or the node is lost."""
        life = former.life
        while not former.is_lost and self._former.get(_key(life)) is former:
            try:
                if await ended_on_node(life):
                    logger.warning("%s life %s has ended", life.info.name, life.info.life)
                    await self._end(life)
                    return
            # No answer proves nothing: ask again, unless Ray has given the node up.
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
        # Both before the await: an answer of that life from now on finds it fenced.
        self._former.pop(_key(life), None)
        self._fenced.add(_key(life))
        await self._fleet.fence(life.info.name, life.info.life)

    # --- for an operator --------------------------------------------------------------------------

    async def _show(self, _: Request) -> Response:
        """Answer GET /lost: the lives that are not proved dead, and what workers hold for each."""
        lost = await self._fleet.lost()
        return json_response([_as_json(one, lost) for one in self._former.values()])

    async def _fence(self, request: Request) -> Response:
        asked = decode_body(await read_body(request, self._limits), FenceRequest)
        # 1. It serves at this moment: fencing it would let others reuse pages that it writes.
        # 2. It is fenced already: nothing to do.
        # 3. It is unknown: refused, since a mistyped life must not pass for a fenced one.
        # 4. It is lost: believe the operator.
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


def _as_json(former: _Former, lost: dict[str, list[Any]]) -> dict[str, Any]:
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
    """Raises RayError if the task could not run there."""
    if life.process is None:
        return False
    # Not soft: on any other node the kernel would know nothing of the process.
    here = NodeAffinitySchedulingStrategy(life.node, soft=False)
    task = ray.remote(has_ended).options(num_cpus=0, max_retries=0, scheduling_strategy=here)
    return bool(await task.remote(life.process))


async def is_node_alive(node: str) -> bool:
    """A node that Ray has given up never returns."""
    nodes = await asyncio.to_thread(ray.nodes)
    return any(one["NodeID"] == node and one["Alive"] for one in nodes)


class Actor(Kept):
    """One worker as an actor, from its start to `end`. See `launch.Child`."""

    def __init__(self, handle: Any, name: str, fleet: Fleet, former: FormerLives) -> None:
        self._handle, self._fleet, self._former = handle, fleet, former
        super().__init__(name, logger)

    async def _live_on(self) -> None:
        while not self._ending:
            with contextlib.suppress(RayError):
                life = await self._find()
                if await self._live(life):
                    return
            if not self._ending:
                await asyncio.sleep(_AGAIN_S)

    async def _find(self) -> Life:
        """Raises WorkerFailedError if Ray has given up, RayError if it may still start."""
        try:
            found: Life = await self._handle.life.options(max_task_retries=-1).remote()
            return found
        except ActorDiedError as error:
            why = str(error).strip().splitlines()[-1]
            raise WorkerFailedError(f"{self._name} does not start: {why}") from error

    async def _live(self, life: Life) -> bool:
        """Follow one life, with its worker in the fleet, to its end. True if it was drained."""
        if not self._former.answered(life):
            ray.kill(self._handle, no_restart=False)  # a fenced life must not serve
            return False
        self.clock.served()
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
            # No more requests first. Then the proof, except at our own end, where nothing is
            # reused.
            self.clock.begin()
            self._fleet.remove(life.info.name, life.info.life)
            if not self._ending:
                self._former.suspect(life)

    async def end(self, grace_s: float) -> None:
        """Drain the worker, and kill the actor after `grace_s`. Ray does not restart it."""
        self._ending = True
        if grace_s and self.ready.done() and self.ready.exception() is None:
            with contextlib.suppress(RayError):
                await self._handle.drain.remote()
                await asyncio.wait((self._task,), timeout=grace_s)
        # For good: Ray starts no other life, and `_ending` keeps the task from looking for one.
        with contextlib.suppress(RayError):
            ray.kill(self._handle)
        self._task.cancel()
        await asyncio.wait((self._task,))


class RayLaunch(Launch):
    """A `Launch` whose workers run in a Ray cluster."""

    _former: FormerLives
    _group: Any = None

    def _routes(self, fleet: Fleet) -> list[BaseRoute]:
        self._former = FormerLives(fleet, self.config.listen.limits)
        return self._former.routes

    async def _open(self, name: str) -> None:
        """Connect, and reserve a placement group for all workers. Raises ConfigError."""
        config = self.config
        self._namespace = f"prefixkv/{name}"
        # Checked first, since `ray.init` tries for minutes.
        await _check_reachable(config.ray)
        self._keys = _Keys(self._name("decode", number) for number in range(config.decode))
        try:
            await asyncio.to_thread(
                ray.init, config.ray, namespace=self._namespace, logging_level=logging.ERROR,
            )  # fmt: skip
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"there is no cluster at {config.ray}: {error}") from None
        self.heed_signals()  # again: `ray.init` has installed handlers of its own
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
            handle = kind.remote(config, variables())
        except ValueError as error:
            raise ConfigError(f"{name} is in {self._namespace} already: {error}") from None
        return Actor(handle, name, fleet, self._former)

    def _name(self, role: str, number: int) -> str:
        return self._environ(role, number)["PREFIXKV_NAME"]

    def _threads(self) -> int:
        return self.config.ray_cpus

    def _environ(self, role: str, number: int) -> dict[str, str]:
        # No parent to die with: the process is the raylet's child, on another machine perhaps.
        return {**super()._environ(role, number), "PREFIXKV_PARENT": "0"}

    async def _close(self) -> None:
        # The proofs run tasks in the cluster, so they end before it is left.
        await self._former.close()
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
        async with asyncio.timeout(_REACH_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError as error:  # TimeoutError is one
        why = str(error) or f"no answer within {_REACH_S:g} s"
        raise ConfigError(f"there is no cluster at {address}: {why}") from None
    writer.close()


class _Keys:
    """CURVE keys of one start: one pair that all prefill workers share, and one per decode worker.
    Settings that have keys, or allow peers without them, are left as they are."""

    def __init__(self, names: Iterable[str]) -> None:
        self._server = _new_pair()
        self._clients = {name: _new_pair() for name in names}

    def give(self, config: WorkerConfig) -> WorkerConfig:
        control = config.node.control
        if control.curve is not None or control.network_is_isolated:
            return config
        # Decode workers are CURVE's clients: prefill accepts their public keys alone, each under
        # its worker's name.
        if isinstance(config, PrefillWorkerConfig):
            allowed = {public: name for name, (public, _) in self._clients.items()}
            curve = CurveConfig(*self._server, allowed_clients=allowed)
        else:
            curve = CurveConfig(*self._clients[config.node.name], server_key=self._server[0])
        node: Any = replace(config.node, control=replace(control, curve=curve))
        return replace(config, node=node)


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()
