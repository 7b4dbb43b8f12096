"""Transports over shared memory, and a peer that says of its memory what the test wants."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.shm_liar import Liar, a_liar
from tests.support.transport_driver import ShmDriver


@pytest.fixture
def driver() -> Iterator[ShmDriver]:
    with closing(ShmDriver()) as made:
        yield made


@pytest.fixture
def liar() -> Iterator[Liar]:
    with a_liar() as made:
        yield made
