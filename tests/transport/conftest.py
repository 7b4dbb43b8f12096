"""The contract suite runs on each of these: the fake, NIXL in shared memory, over TCP, and with
more threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.models.devices import TCP
from tests.models.transport_driver import Driver, FakeDriver, NixlDriver


@pytest.fixture(params=["fake", "nixl", "nixl-tcp", "nixl-3-threads"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    if request.param == "nixl-tcp":
        monkeypatch.setenv("UCX_TLS", TCP)  # read when an agent is created
    made = (
        FakeDriver()
        if request.param == "fake"
        else NixlDriver(3 if "threads" in request.param else 1)
    )
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
