"""The contract suite runs on each of these: the fake, NIXL in shared memory, NIXL over TCP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.models.transport_driver import Driver, FakeDriver, NixlDriver


@pytest.fixture(params=["fake", "nixl", "nixl-tcp"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    if request.param == "nixl-tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")  # read when an agent is created
    made = FakeDriver() if request.param == "fake" else NixlDriver()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(params=["nixl", "nixl-tcp"])
def nixl_driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[NixlDriver]:
    if request.param == "nixl-tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    made = NixlDriver()
    try:
        yield made
    finally:
        made.close()
