"""The contract suite runs on each of these: the fake, shared memory, NIXL over CMA and over TCP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.devices import TCP
from tests.support.transport_driver import Driver, FakeDriver, NixlDriver, ShmDriver


@pytest.fixture(params=["fake", "shm", "nixl", "nixl-tcp"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    if request.param == "nixl-tcp":
        monkeypatch.setenv("UCX_TLS", TCP)  # read when an agent is created
    made: Driver
    if request.param == "fake":
        made = FakeDriver()
    elif request.param == "shm":
        made = ShmDriver()
    else:
        made = NixlDriver()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(params=["nixl", "nixl-tcp"])
def nixl_driver(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NixlDriver]:
    if request.param == "nixl-tcp":
        monkeypatch.setenv("UCX_TLS", TCP)
    made = NixlDriver()
    try:
        yield made
    finally:
        made.close()
