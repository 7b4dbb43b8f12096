"""A command and its event loop: `run` is `asyncio.run` that Ctrl-C never tears in the middle."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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


def log_to_stderr() -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def keep_what_is_loaded() -> None:
    """Leave all that is loaded out of later garbage collections: each would look at every object of
    the model's libraries, and all requests would wait meanwhile."""
    gc.collect()
    gc.freeze()


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Call `main` and run its coroutine as `asyncio.run` does.

    asyncio heeds Ctrl-C only while the coroutine runs; before and after, KeyboardInterrupt comes in
    the middle of making or closing the loop, whose destructor then prints an error of its own. Here
    it comes as a cancellation of the coroutine, also where it was early, or at the end. A second
    one comes at once, wherever that is.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return asyncio.run(main())
    times = 0
    task: asyncio.Task[T] | None = None

    def on_interrupt(*_: object) -> None:
        nonlocal times
        times += 1
        if times > 1:
            raise KeyboardInterrupt
        if task is not None:
            # By way of the loop, which else goes on waiting for its sockets.
            task.get_loop().call_soon_threadsafe(task.cancel)

    async def heeding() -> T:
        nonlocal task
        # Named before it is asked whether one came: between the two none is lost.
        task = asyncio.current_task()
        if times:
            raise asyncio.CancelledError
        try:
            return await main()
        finally:
            # The handlers that `main` gave the loop: asyncio closes the pipe by which it hears of
            # signals first, and forgets the handlers last.
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(signal.SIGINT, on_interrupt)
            task = None  # the loop may be closed before the next one comes

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        found = asyncio.run(heeding())
    except asyncio.CancelledError:
        if not times:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if times:
        raise KeyboardInterrupt
    return found
