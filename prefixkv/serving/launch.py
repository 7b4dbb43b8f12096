"""`prefixkv serve` and `prefixkv front`: a front over workers that are children of this process, or
that were started by hand. A child that dies is restarted, and none outlives this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import aiohttp
import msgspec

from prefixkv import PrefixKVError
from prefixkv.engines.hf.folder import SamplingDefaults, check_folder, load_sampling_defaults
from prefixkv.engines.hf.small import NAME, save_tokenizer
from prefixkv.errors import ConfigError
from prefixkv.serving import interrupts
from prefixkv.serving.config import KINDS, FrontConfig, FrontSettings, ServeConfig, role_environs
from prefixkv.serving.fleet import Fleet, Start
from prefixkv.serving.front import Front
from prefixkv.serving.text import load_texts
from prefixkv.serving.wire import WorkerInfo
from prefixkv.serving.worker import READY, REFUSED

logger = logging.getLogger("prefixkv.serve")

_LINE_BYTES: Final = 1 << 20
# Pause before a worker that has died is restarted; it doubles for each start that fails.
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_END_S: Final = 15.0  # for a worker to end, once its requests have ended
_LOOK_S: Final = 1.0  # between two looks at a worker that was started by hand

C = TypeVar("C", bound=FrontSettings)


class WorkerFailedError(PrefixKVError):
    """A worker does not start; its own output on stderr says why."""


class Kept(Start):
    """One worker, which is brought back until it is ended. Used on one event loop. Each of its
    lives is in `fleet`. `ready` is done at the first start, or has the error that ends the
    launch."""

    def __init__(self, role: str, name: str, fleet: Any) -> None:
        super().__init__(role)
        self._name, self._fleet = name, fleet
        self._has_served = self._ending = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        try:
            await self._live_on()
        except Exception as error:
            if not self.ready.done():
                self.ready.set_exception(error)
            elif not self._ending:
                logger.exception("%s is given up", self._name)
        finally:
            self.gone_s = None

    async def _live_on(self) -> None:
        raise NotImplementedError

    def _serves(self, info: WorkerInfo) -> None:
        """Raises ConfigError where it cannot work with the others."""
        self._fleet.add(info)
        self.gone_s, self._has_served = None, True
        if not self.ready.done():
            self.ready.set_result(None)

    def _has_gone(self, info: WorkerInfo) -> None:
        self.gone_s = time.monotonic()  # first: requests that find it gone wait for the next
        self._fleet.remove(info.name, info.life)

    async def end(self, grace_s: float) -> None:
        """End the worker, or leave one to itself that is not ours."""
        self._ending = True
        self._task.cancel()
        await asyncio.wait((self._task,))


class Followed(Kept):
    """A worker that was started by hand, at its URL. `model` is the front's."""

    def __init__(self, url: str, fleet: Fleet, model: str) -> None:
        self._url, self._model = url.strip().rstrip("/"), model
        super().__init__("", self._url, fleet)
        self.ready.set_result(None)  # clients are served at once

    async def _live_on(self) -> None:
        info: WorkerInfo | None = None
        said = ""
        while True:
            try:
                info = await self._look(info)
                said = ""
            except (aiohttp.ClientError, msgspec.MsgspecError, ConfigError) as error:
                why = str(error) or repr(error)
                if why != said:
                    logger.warning("%s is not taken: %s", self._url, why)
                said = why
                # It has ended, or it drains. A time-out tells neither.
                refused = isinstance(getattr(error, "os_error", None), ConnectionRefusedError)
                if info is not None and (refused or getattr(error, "status", 0) == 503):
                    self._has_gone(info)
                    info = None
            await asyncio.sleep(_LOOK_S)

    async def _look(self, former: WorkerInfo | None) -> WorkerInfo:
        """Return the worker's life, once it is in the fleet. Raises ConfigError until the worker,
        or those that it does not fit, are started with other settings."""
        fleet: Fleet = self._fleet
        seen = await fleet.info_of(self._url)
        other = fleet.members.get(seen.name)
        if other is not None and seen == other.info:
            return seen
        self.role = seen.role
        if bool(self._model) == seen.model.startswith(f"{NAME} model "):
            raise ConfigError(f"its model is {seen.model!r}, MODEL of the front {self._model!r}")
        if former is not None:  # it is over, and keeps no other worker out
            fleet.remove(former.name, former.life)
        other = fleet.members.get(seen.name)
        if other is not None and other.info.url != seen.url and not other.silent:
            raise ConfigError(f"{other.info.url} has its name, {seen.name!r}")
        self._serves(seen)
        return seen


class Child(Kept):
    """A worker as a child process.

    Args:
        environ: its whole environment, with its settings.
        within: a command that runs the rest of its command line, e.g. "ip netns exec NAME".
    """

    def __init__(
        self, role: str, environ: Mapping[str, str], fleet: Any, within: Sequence[str] = ()
    ) -> None:
        self._environ, self._within = dict(environ), within
        self._process: Process | None = None
        super().__init__(role, f"a {role} worker", fleet)

    async def _live_on(self) -> None:
        """A first start that fails is not repeated."""
        pause_s = _FIRST_PAUSE_S
        while not self._ending:
            info = await self._live()
            if not self.ready.done():
                self.ready.set_exception(WorkerFailedError(f"{self._name} did not start"))
            if self._ending or not self._has_served:
                return
            # A life that served resets the pause; one that never did doubles it.
            pause_s = _FIRST_PAUSE_S if info is not None else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _live(self) -> WorkerInfo | None:
        """Run one life of the worker. Returns None if it never served."""
        # A session of its own: Ctrl-C in a terminal reaches this process alone, which then drains.
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._within, sys.executable, "-m", "prefixkv.serving.worker", self.role,
                env=self._environ, stdin=DEVNULL, stdout=PIPE, start_new_session=True,
                limit=_LINE_BYTES,
            )  # fmt: skip
        except OSError as error:
            if not self._has_served:
                raise
            logger.warning("%s does not start: %s", self._name, error)
            return None  # no descriptors, or no memory: at another time
        info, refused = None, False
        assert process.stdout is not None
        try:
            # Read to the end of the pipe: a full pipe would block the worker in `print`.
            async for line in process.stdout:
                text = line.decode("utf-8", "replace")
                if info is None and text.startswith(READY):
                    info = msgspec.json.decode(text[len(READY) :], type=WorkerInfo)
                    self._serves(info)
                elif info is None and text.startswith(REFUSED):
                    why, refused = msgspec.json.decode(text[len(REFUSED) :], type=str), True
                    # At the first start the reason ends the launch, which prints it.
                    if not self.ready.done():
                        self.ready.set_exception(ConfigError(why))
                    else:
                        logger.warning("%s does not start: %s", self._name, why)
                else:
                    interrupts.say(text.rstrip("\n"), sys.stderr)
            status = await process.wait()
        finally:
            # Cancelled, or the output could not be read: the process must not stay without an
            # owner.
            if process.returncode is None:
                _signal(process, signal.SIGKILL)
                await process.wait()
            if info is not None:
                self._has_gone(info)
        if not self._ending and not refused:
            name = info.name if info is not None else self._name
            logger.warning("%s has ended with status %d", name, status)
        return info

    async def end(self, grace_s: float) -> None:
        """Drain the process, and kill it after `grace_s`. A further call ends with its own wait."""
        self._ending = True
        if self._process is not None:
            _signal(self._process, signal.SIGTERM if grace_s else signal.SIGKILL)
        done, _ = await asyncio.wait((self._task,), timeout=grace_s)
        if not done:
            if self._process is not None and self._process.returncode is None:
                _signal(self._process, signal.SIGKILL)
            else:  # there is no process: it is starting, or pauses before a restart
                self._task.cancel()
            # Wait for the killed process: its pipe must not outlive the event loop.
            await asyncio.wait((self._task,))


def _signal(process: Process, number: int) -> None:
    # Not by `Process.send_signal`: it first looks whether the child has ended, and so takes the
    # status for which asyncio waits, who then logs that it knows no such child.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


class Launch(Generic[C]):
    """A front and its workers, which require `key`. Used on one event loop."""

    def __init__(self, config: C, key: str) -> None:
        self.config, self._key = config, key
        self.signals = interrupts.Signals()
        self._workers: list[Kept] = []

    async def run(self) -> int:
        """Serve until a signal. Returns the exit status. Raises ConfigError, WorkerFailedError."""
        config, stop = self.config, self.signals.stop
        model = config.models.model
        if model:
            check_folder(model)
        if config.tokenizer_folder:
            await asyncio.to_thread(save_tokenizer, config.tokenizer_folder)
        # The small model is there to show hits: drawn tokens that are no words hit less.
        defaults = load_sampling_defaults(model) if model else SamplingDefaults(temperature=0.0)
        name = config.served_name or (Path(model).resolve().name if model else "small")
        fleet, front = Fleet(self._key, config.start_timeout_s), None
        stopping = asyncio.create_task(stop.wait())
        try:
            # The workers take longest: what the front needs is loaded meanwhile.
            await self._begin(fleet, name)
            fleet.starts = self._workers
            with interrupts.importing():
                texts = await asyncio.to_thread(load_texts, model)
            front = Front(fleet, texts, name, config.listen, config.answer_tokens, defaults)
            # For probes. Clients' port opens only once the workers are ready, so that no request
            # meets a fleet that cannot answer.
            await front.status.start()
            ready = asyncio.gather(*(worker.ready for worker in self._workers))
            await asyncio.wait(
                (ready, stopping), return_when=asyncio.FIRST_COMPLETED,
                timeout=config.start_timeout_s,
            )  # fmt: skip
            # Three ways out of the wait: stopped, too late, or every worker ready (or one failed).
            if stopping.done() or not ready.done():
                ready.cancel()
                # Else asyncio logs that nobody has asked how it ended.
                await asyncio.gather(ready, return_exceptions=True)
                if stopping.done():
                    return 0
                raise WorkerFailedError(f"no workers after {config.start_timeout_s:g} s")
            ready.result()
            interrupts.keep_what_is_loaded()
            await front.server.start()
            status = front.status.url
            interrupts.say(f"{name}: {front.server.url}/v1 (health and metrics: {status})")
            await stopping
            interrupts.say("draining; a second signal ends at once")
            return 0
        finally:
            # Orderly end: front first, then workers. A second signal during it kills all workers at
            # once.
            stopping.cancel()
            if not await self.signals.end(self._end(front or fleet)):
                await asyncio.gather(*(worker.end(0) for worker in self._workers))
            await self._close()

    async def _end(self, front: Front | Fleet) -> None:
        grace_s = self.config.listen.drain_timeout_s if self.signals.stop.is_set() else 0
        await (front.stop(grace_s) if isinstance(front, Front) else front.close())
        await asyncio.gather(*(worker.end(_END_S) for worker in self._workers))

    # --- what the kinds of launch do otherwise ----------------------------------------------------

    async def _begin(self, fleet: Fleet, name: str) -> None:
        """Start `_workers`. `name` is what clients call the model."""
        raise NotImplementedError

    async def _close(self) -> None:
        """Called after the last worker has ended."""


class ServeLaunch(Launch[ServeConfig]):
    """The workers are children of this process."""

    def __init__(self, config: ServeConfig) -> None:
        # Of this run, so that no other user of the machine reaches the workers.
        super().__init__(config, secrets.token_urlsafe(24))
        self.environs = {role: role_environs(config, role, self._key, os.environ) for role in KINDS}

    async def _begin(self, fleet: Fleet, name: str) -> None:
        for role, environs in self.environs.items():
            self._workers += [Child(role, environ, fleet) for environ in environs]


class FrontLaunch(Launch[FrontConfig]):
    """The workers were started by hand, and are left as they are."""

    def __init__(self, config: FrontConfig) -> None:
        super().__init__(config, config.workers_key)

    async def _begin(self, fleet: Fleet, name: str) -> None:
        model = self.config.models.model
        self._workers += [Followed(url, fleet, model) for url in self.config.workers.split(",")]


def run_front(launch: Callable[[], Launch[Any]], *, with_torch: bool = False) -> int:
    """Serve until a signal; return the exit status. Raises ConfigError, WorkerFailedError."""
    interrupts.log_to_stderr()
    # A front computes nothing with torch, but transformers takes it along where it finds it: 180
    # MiB, and as long as all else at the start.
    is_without_torch = not with_torch and "torch" not in sys.modules
    if is_without_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

    async def main() -> int:
        made = launch()
        made.signals.heed()
        return await made.run()

    try:
        return asyncio.run(main())
    finally:
        if is_without_torch:
            del sys.modules["torch"]
