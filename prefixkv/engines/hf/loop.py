"""An engine on a thread of its own, for a process that serves: other threads hand it calls, and
never wait for it."""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

from prefixkv.spi import ClosedError, Inbox

logger = logging.getLogger("prefixkv.engine")

_IDLE_MS: Final = 50  # the longest that an idle engine does not look, at deadlines say


class Engine(Protocol):
    """What `PrefillEngine` and `DecodeEngine` have in common."""

    def step(self) -> bool: ...
    def fileno(self) -> int: ...
    @property
    def idle_s(self) -> float: ...
    def drain(self, timeout_s: float = 0.0) -> bool: ...
    def close(self) -> None: ...


E = TypeVar("E", bound=Engine)


class EngineLoop(Generic[E]):
    """Steps an engine until it is drained or stopped, then closes it. Any thread may call.

    Args:
        engine: belongs to the loop's thread from `start` on.
        after_step: called on that thread after each step; carries prefill jobs, say.
        name: of the thread.

    `error` is what the engine, a call or `after_step` has raised: the loop ends with it. A call
    that may fail has to catch what it expects.
    """

    def __init__(
        self, engine: E, after_step: Callable[[], object] = lambda: None, name: str = "engine"
    ) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._after_step = after_step
        self._inbox: Inbox[Callable[[E], object]] = Inbox()
        self._lock = threading.Lock()  # between `post` and the end
        self._ended = self._draining = self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, call: Callable[[E], object]) -> None:
        """Have `call(engine)` made on the engine's thread, before its next step. Raises ClosedError
        once the loop has ended; one that was posted just before may then not be made."""
        with self._lock:
            if self._ended:
                raise ClosedError("the engine has ended") from self.error
            self._inbox.put(call)

    def drain(self) -> None:
        """Let it take no more, and end when all that lives has ended. Returns at once. Calls posted
        before are made before. Again, or after the end: no-op."""
        with self._lock:
            if not self._ended and not self._draining:
                self._draining = True
                self._inbox.put(lambda engine: engine.drain())

    def stop(self) -> None:
        """End it after the step under way. Requests that live fail on the other side."""
        self._stopping = True
        with self._lock:
            if not self._ended:
                self._inbox.rouse()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end. True if it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """It was started, and has not ended."""
        return self._thread.is_alive()

    @property
    def draining(self) -> bool:
        """`drain` was called."""
        return self._draining

    # --- the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            logger.exception("the engine's loop has ended")
            self.error = error
        finally:
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
            if self._draining and not len(self._inbox) and self.engine.drain():
                return
            if not busy:
                poller.poll(min(1000 * self.engine.idle_s, _IDLE_MS))
