"""A test that has ended well leaves nothing: each of its desks settles."""

from collections.abc import Iterator

import pytest

from tests.unit.decode.desk import Desk


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    Desk.made.clear()
    yield
    for desk in Desk.made:
        desk.settle()
