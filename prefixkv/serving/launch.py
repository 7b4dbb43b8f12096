"""`prefixkv serve`: workers as child processes, a fleet of them, and a front, on this machine. A
worker that dies is restarted. No worker outlives this process, however it ends."""

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
from typing import Any, Final

import msgspec
from starlette.routing import BaseRoute

from prefixkv import PrefixKVError
from prefixkv.engines.hf.folder import check_folder
from prefixkv.engines.hf.generation import SamplingDefaults, load_sampling_defaults
from prefixkv.engines.hf.small import save_tokenizer
from prefixkv.errors import ConfigError
from prefixkv.serving import interrupts
from prefixkv.serving.config import KINDS, ServeConfig
from prefixkv.serving.fleet import Fleet, Start
from prefixkv.serving.front import Front
from prefixkv.serving.plan import numbered
from prefixkv.serving.process import READY, REFUSED, keep_what_is_loaded, log_to_stderr
from prefixkv.serving.text import load_texts
from prefixkv.serving.variables import without_settings
from prefixkv.serving.wire import WorkerInfo
from prefixkv.settings import as_environ

logger = logging.getLogger("prefixkv.serve")

_LINE_BYTES: Final = 1 << 20
# Pause before a worker that has died is restarted; it doubles for each start that fails.
_FIRST_PAUSE_S: Final = 0.5  # seconds
_LONGEST_PAUSE_S: Final = 30.0
_FIRST_START_S: Final = 15.0  # expected, where none was measured
_END_S: Final = 15.0  # for a worker to end, once its requests have ended


class WorkerFailedError(PrefixKVError):
    """A worker does not start; its own output on stderr says why."""


class StartClock:
    """When a worker is expected to serve: as long after its start has begun as it took the last
    time. Seconds of time.monotonic()."""

    def __init__(self) -> None:
        self._took_s = _FIRST_START_S
        self._begun_s = time.monotonic()
        # Since when it does not serve; None while it does, or where it is not started any more.
        self._gone_s: float | None = self._begun_s

    def begin(self, in_s: float = 0.0) -> None:
        """The worker is started `in_s` seconds from now."""
        self._begun_s = time.monotonic() + in_s
        self._gone_s = time.monotonic() if self._gone_s is None else self._gone_s

    def served(self) -> None:
        self._took_s, self._gone_s = time.monotonic() - self._begun_s, None

    def give_up(self) -> None:
        self._gone_s = None

    def start(self, timeout_s: float) -> Start | None:
        """Return the start that is under way, late after `timeout_s`."""
        if self._gone_s is None:
            return None
        now_s = time.monotonic()
        left_s = max(0.0, self._begun_s + self._took_s - now_s)
        return Start(left_s, now_s - self._gone_s > timeout_s)


class Kept:
    """One worker, which is brought back until it is ended. Used on one event loop. `ready` is done
    at the first start: with the worker's info, or with the error that ends the launch; a later
    error goes to `log`, with `name`."""

    def __init__(self, name: str, log: logging.Logger) -> None:
        self._name, self._log, self._ending = name, log, False
        self.clock = StartClock()
        self.ready: asyncio.Future[WorkerInfo] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        try:
            await self._live_on()
        except Exception as error:
            if not self.ready.done():
                self.ready.set_exception(error)
            elif not self._ending:
                self._log.exception("%s is given up", self._name)
        finally:
            self.clock.give_up()

    async def _live_on(self) -> None:
        raise NotImplementedError


class Child(Kept):
    """A worker as a child process.

    Args:
        environ: its whole environment, with its settings.
        on_ready, on_gone: called each time it begins to serve, and has ended.
        within: a command that runs the rest of its command line, e.g. "ip netns exec NAME".
    """

    def __init__(
        self, role: str, environ: Mapping[str, str], on_ready: Callable[[WorkerInfo], object],
        on_gone: Callable[[WorkerInfo], object], within: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.role, self._environ, self._within = role, dict(environ), within
        self._on_ready, self._on_gone = on_ready, on_gone
        self._process: Process | None = None
        self._began = False
        super().__init__(f"a {role} worker", logger)

    async def _live_on(self) -> None:
        """A first start that fails is not repeated."""
        pause_s = _FIRST_PAUSE_S
        while not self._ending:
            info = await self._live()
            if not self.ready.done():
                self.ready.set_exception(WorkerFailedError(f"{self._name} did not start"))
            if not self._began:
                return
            if self._ending:
                return
            # A life that served resets the pause; one that never did doubles it.
            pause_s = _FIRST_PAUSE_S if info is not None else min(2 * pause_s, _LONGEST_PAUSE_S)
            self.clock.begin(pause_s)
            await asyncio.sleep(pause_s)

    async def _live(self) -> WorkerInfo | None:
        """Run one life of the worker. Returns None if it never served."""
        # A session of its own: Ctrl-C in a terminal reaches this process alone, which then drains.
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._within, sys.executable, "-m", "prefixkv.cli.main", "worker", self.role,
                env=self._environ, stdin=DEVNULL, stdout=PIPE, start_new_session=True,
                limit=_LINE_BYTES,
            )  # fmt: skip
        except OSError as error:
            if not self._began:
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
                    self._began = True
                    self.clock.served()
                    self._on_ready(info)
                    if not self.ready.done():
                        self.ready.set_result(info)
                elif info is None and text.startswith(REFUSED):
                    why, refused = msgspec.json.decode(text[len(REFUSED) :], type=str), True
                    # At the first start the reason ends the launch, which prints it.
                    if not self.ready.done():
                        self.ready.set_exception(ConfigError(why))
                    else:
                        logger.warning("%s does not start: %s", self._name, why)
                else:
                    sys.stderr.write(text)
            status = await process.wait()
        finally:
            # Cancelled, or the output could not be read: the process must not stay without an
            # owner.
            if process.returncode is None:
                _signal(process, signal.SIGKILL)
                await process.wait()
            if info is not None:
                self.clock.begin()  # first: requests that find it gone wait for the next
                self._on_gone(info)
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


class Launch:
    """The workers, their fleet and the front. Used on one event loop. `tables`: settings of the
    workers alone, by role and name (`plan`). `say` gets each line that is meant for a person."""

    def __init__(
        self, config: ServeConfig, tables: Mapping[str, Mapping[str, Any]] | None = None,
        say: Callable[[str], object] = print,
    ) -> None:  # fmt: skip
        self.config, self._tables, self._say = config, tables or {}, say
        # Workers and front share a key of this run, so that no other user of the machine reaches
        # them.
        self._key = secrets.token_urlsafe(24)
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()
        self._children: list[Any] = []
        self._clocks: dict[str, list[StartClock]] = {"prefill": [], "decode": []}

    def stop(self) -> None:
        """Drain and end everything. A second call ends it at once."""
        if self._stop.is_set():
            self._at_once.set()
        self._stop.set()

    def heed_signals(self) -> None:
        """Let SIGTERM and SIGINT call `stop`. On the event loop of the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)

    async def run(self) -> int:
        """Serve until `stop`. Returns the exit status. Raises ConfigError, WorkerFailedError."""
        config = self.config
        models, listen = config.models, config.listen
        if models.model:
            check_folder(models.model)
        if config.tokenizer_folder:
            await asyncio.to_thread(save_tokenizer, config.tokenizer_folder)
        texts = await asyncio.to_thread(load_texts, models.model)
        # The small model is there to show hits: drawn tokens that are no words hit less.
        defaults = SamplingDefaults(temperature=0.0)
        if models.model:
            defaults = load_sampling_defaults(models.model)
        name = config.served_name or (
            Path(models.model).resolve().name if models.model else "small"
        )
        fleet = Fleet(self._key)
        fleet.next_start = self._next_start
        try:
            front = Front(
                fleet, texts, name, listen, config.answer_tokens, status_routes=self._routes(fleet),
                defaults=defaults,
            )  # fmt: skip
        except BaseException:
            await fleet.close()
            raise
        # The status port opens before the workers load, for probes; clients' port only after all
        # are ready, so that no request meets a fleet that cannot answer.
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await front.status.start()
            await self._open(name)
            for role, num in (("prefill", config.prefill), ("decode", config.decode)):
                for i in range(num):
                    self._children.append(child := self._child(role, i, fleet))
                    self._clocks[role].append(child.clock)
            ready = asyncio.gather(*(child.ready for child in self._children))
            await asyncio.wait(
                (ready, stopping), return_when=asyncio.FIRST_COMPLETED,
                timeout=config.start_timeout_s,
            )  # fmt: skip
            # Three ways out of the wait: stopped, too late, or every worker ready (or one failed).
            if stopping.done():
                ready.cancel()
                return 0
            if not ready.done():
                ready.cancel()
                raise WorkerFailedError(f"no workers after {config.start_timeout_s:g} s")
            ready.result()
            keep_what_is_loaded()
            await front.server.start()
            self._say(f"{name}: {front.server.url}/v1 (health and metrics: {front.status.url})")
            await stopping
            self._say("draining; a second signal ends at once")
            return 0
        finally:
            # Orderly end: front first, then workers. A second signal during it kills all workers at
            # once.
            stopping.cancel()
            ending = asyncio.create_task(self._end(front))
            at_once = asyncio.create_task(self._at_once.wait())
            await asyncio.wait((ending, at_once), return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                ending.cancel()
                await asyncio.wait((ending,))
                await asyncio.gather(*(child.end(0) for child in self._children))
            at_once.cancel()
            await self._close()

    async def _end(self, front: Front) -> None:
        await front.stop(self.config.listen.drain_timeout_s if self._stop.is_set() else 0)
        await asyncio.gather(*(child.end(_END_S) for child in self._children))

    def _next_start(self, role: str) -> Start | None:
        """Return the start of the first worker of a role that will serve."""
        clocks = self._clocks[role]
        starts = (clock.start(self.config.start_timeout_s) for clock in clocks)
        # One that is not late goes before one that is.
        return min(
            (start for start in starts if start is not None),
            key=lambda start: (start.is_late, start.left_s), default=None,
        )  # fmt: skip

    # --- what another kind of launch does otherwise -----------------------------------------------

    def _routes(self, fleet: Fleet) -> list[BaseRoute]:
        return []

    async def _open(self, name: str) -> None:
        """Called before the first worker starts. `name` is what clients call the model."""

    def _child(self, role: str, number: int, fleet: Fleet) -> Any:
        """Start a worker. The result has `ready`, `clock` and `end` like a `Child`."""
        return Child(role, self._environ(role, number), fleet.add, _forget(fleet))

    async def _close(self) -> None:
        """Called after the last worker has ended."""

    def _environ(self, role: str, number: int) -> dict[str, str]:
        """Return this process's environment without settings, and all settings of the worker."""
        config, models = self.config, self.config.models
        num = config.prefill if role == "prefill" else config.decode
        # What serve has for all its workers; their own settings go before it.
        settings: dict[str, Any] = {
            "model": models.model, "seed": models.seed, "dtype": models.dtype,
            "device": models.device, "context": models.context,
            "threads": models.threads or self._threads(), "page_size": config.page_size,
            "num_pages": config.prefill_pages if role == "prefill" else config.decode_pages,
            "window_pages": (
                config.prefill_window_pages if role == "prefill" else config.decode_window_pages
            ),
            "port": 0, "status_port": 0,
            # One file for all: each line names its worker.
            "request_log": os.path.abspath(log) if (log := config.listen.request_log) else "",
        }  # fmt: skip
        if role == "prefill":
            settings["chunk_tokens"] = config.chunk_tokens
            settings["checkpoints"] = config.checkpoints
        else:
            # Without either a decode worker computes nothing, and has no such settings.
            if config.compute_below or config.carry_on:
                settings["compute_below"] = config.compute_below
            if config.carry_on:
                settings["failure_policy"] = "local"
        settings |= numbered(self._tables.get(role, {}), role, number, num)
        # These no one else sets (`plan`).
        settings |= {
            "host": "127.0.0.1", "status_host": "127.0.0.1", "api_key": self._key,
            "parent": os.getpid(),
        }  # fmt: skip
        return without_settings(os.environ) | as_environ(KINDS[role], settings)

    def _threads(self) -> int:
        return max(1, (os.cpu_count() or 1) // (self.config.prefill + self.config.decode))


def _forget(fleet: Fleet) -> Callable[[WorkerInfo], object]:
    return lambda info: fleet.remove(info.name, info.life)


def run_serve(
    config: ServeConfig, tables: Mapping[str, Mapping[str, Any]] | None = None,
    kind: type[Launch] = Launch,
) -> int:  # fmt: skip
    """Serve until a signal; return the exit status. Raises ConfigError, WorkerFailedError."""
    log_to_stderr()
    # This process computes nothing with torch, but transformers takes it along where it finds it:
    # 180 MiB, and as long as all else at the start.
    is_without_torch = kind is Launch and "torch" not in sys.modules
    if is_without_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

    async def main() -> int:
        launch = kind(config, tables, lambda line: print(line, flush=True))
        launch.heed_signals()
        return await launch.run()

    try:
        return interrupts.run(main)
    finally:
        if is_without_torch:
            del sys.modules["torch"]
