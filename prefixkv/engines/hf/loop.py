"""An engine on its own thread: other threads post calls to it, and never wait for it."""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

from prefixkv.errors import ClosedError
from prefixkv.spi import Inbox

logger = logging.getLogger("prefixkv.engine")

_IDLE_MS: Final = 50  # the longest that an idle engine does not look, at deadlines say


class SteppedEngine(Protocol):
    def step(self) -> bool: ...
    def fileno(self) -> int: ...
    @property
    def idle_s(self) -> float: ...
    def drain(self, timeout_s: float = 0.0) -> bool: ...
    def close(self) -> None: ...


E = TypeVar("E", bound=SteppedEngine)


class EngineLoop(Generic[E]):
    """A thread that steps an engine until it is drained or stopped, and then closes it. Any thread
    may call every method. The engine belongs to the loop's thread from `start` on, which calls
    `after_step` after each step.

    `error` is the exception that the engine, a call or `after_step` raised: the loop ends with it.
    A call that may fail has to catch the errors that it expects.
    """

    def __init__(
        self, engine: E, after_step: Callable[[], object] = lambda: None, name: str = "engine"
    ) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._after_step = after_step
        self._inbox: Inbox[Callable[[E], object]] = Inbox()
        # Guards `_ended` and `_draining` against the end of the loop: without it a call could be
        # put into the inbox after the loop has closed it.
        self._lock = threading.Lock()
        self._ended = self._draining = self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, call: Callable[[E], object]) -> None:
        """Queue `call(engine)` for before the next step. Raises ClosedError once the loop has
        ended; a call that was posted just before the end may never be made."""
        with self._lock:
            if self._ended:
                raise ClosedError("the engine has ended") from self.error
            self._inbox.put(call)

    def drain(self) -> None:
        """Take no more requests, and end when all live ones have ended. Calls that were posted
        before are made first. Returns at once. Idempotent."""
        with self._lock:
            if not self._ended and not self._draining:
                self._draining = True
                self._inbox.put(lambda engine: engine.drain())

    def stop(self) -> None:
        """End after the current step. Live requests fail on the other side."""
        # The flag before the wake-up: the other way round the loop could see the wake-up, miss the
        # flag, and poll once more.
        self._stopping = True
        with self._lock:
            if not self._ended:
                self._inbox.notify()

    def join(self, timeout_s: float | None = None) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def draining(self) -> bool:
        return self._draining

    # --- the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            logger.exception("the engine's loop has ended")
            self.error = error
        finally:
            # First `post` begins to refuse, so that no call is queued that is never made. Then the
            # engine is closed, which joins threads.
            with self._lock:
                self._ended = True
                self._inbox.close()
            self.engine.close()

    def _loop(self) -> None:
        poller: Any = select.poll()
        for fd in (self._inbox.fd, self.engine.fileno()):
            poller.register(fd, select.POLLIN)
        while not self._stopping:
            for call in self._inbox.drain():
                call(self.engine)
            busy = self.engine.step()
            self._after_step()
            # The inbox must be empty: a call that was posted before `drain` is made before the end.
            if self._draining and not len(self._inbox) and self.engine.drain():
                return
            # Either descriptor wakes the poll; the limit is for deadlines, which have none.
            if not busy:
                poller.poll(min(1000 * self.engine.idle_s, _IDLE_MS))
