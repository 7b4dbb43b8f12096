"""A command and its event loop: signals, what it says, and what it never collects."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Coroutine, Iterator
from typing import Any


class Signals:
    """SIGTERM and SIGINT: the first one sets `stop`, a second one `at_once`."""

    def __init__(self) -> None:
        self.stop, self.at_once = asyncio.Event(), asyncio.Event()

    def heed(self) -> None:
        """On the event loop of the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.note)

    def note(self) -> None:
        (self.at_once if self.stop.is_set() else self.stop).set()

    async def end(self, drain: Coroutine[Any, Any, object]) -> bool:
        """Run `drain`; return False if a second signal has cancelled it."""
        draining = asyncio.create_task(drain)
        cut = asyncio.create_task(self.at_once.wait())
        try:
            await asyncio.wait((draining, cut), return_when=asyncio.FIRST_COMPLETED)
        finally:
            cut.cancel()
        if draining.done():
            draining.result()
            return True
        draining.cancel()
        await asyncio.wait((draining,))
        return False


def say(line: str, to: Any = None) -> None:
    """Print a line on stdout, or `to`. Where it cannot be written (a full disk, a reader that has
    left) it is lost, and nothing ends by that."""
    with contextlib.suppress(OSError):
        print(line, file=to, flush=True)


def log_to_stderr() -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import without garbage collections: they take a fifth of the time that a model's libraries
    need, and find nothing. What is there in the end is left out of later ones, too."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_what_is_loaded() -> None:
    """Leave all that is loaded out of later garbage collections: each would look at every object of
    the model's libraries, and all requests would wait meanwhile."""
    gc.collect()
    gc.freeze()
