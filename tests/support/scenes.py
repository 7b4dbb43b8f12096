"""Tests that are coroutines."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from tests.support.patience import PATIENCE_S


async def until(true: Callable[[], object]) -> None:
    """Look until it is true, for `PATIENCE_S` at most."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            await asyncio.sleep(0.005)


def played_by(run: Callable[..., Any], num_given: int = 1) -> Callable[..., Any]:
    """A decorator that makes a test of a scene: a coroutine whose first `num_given` arguments `run`
    gives it, and whose others are fixtures and parameters. What the decorator is called with goes
    to `run`, behind the scene."""

    def played(*args: Any, **options: Any) -> Callable[[Any], Any]:
        def make(scene: Any) -> Any:
            def test(**fixtures: Any) -> None:
                run(lambda *given: scene(*given, **fixtures), *args, **options)

            shown = [*inspect.signature(scene).parameters.values()][num_given:]
            test.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
            test.__name__, test.__doc__ = scene.__name__, scene.__doc__
            test.__module__ = scene.__module__
            return test

        return make

    return played


def _run(scene: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


in_loop = played_by(_run, 0)()
"""Runs a test that is a coroutine, for `PATIENCE_S` at most."""
