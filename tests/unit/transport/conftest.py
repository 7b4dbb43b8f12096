"""Protects the transports' contract: test_contract and test_routes run on the fake, shared memory,
NIXL over CMA and over TCP; what one alone shows stands in its folder. Which bytes a write moves:
test_unequal_pairs."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.devices import TCP
from tests.support.transport_driver import Driver, FakeDriver, NixlDriver, ShmDriver


def _driven(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    if request.param == "nixl-tcp":
        monkeypatch.setenv("UCX_TLS", TCP)  # read when an agent is created
    with closing({"fake": FakeDriver, "shm": ShmDriver}.get(request.param, NixlDriver)()) as made:
        yield made


driver = pytest.fixture(_driven, params=["fake", "shm", "nixl", "nixl-tcp"], name="driver")
nixl_driver = pytest.fixture(_driven, params=["nixl", "nixl-tcp"], name="nixl_driver")
tcp_driver = pytest.fixture(_driven, params=["nixl-tcp"], name="tcp_driver")
"""TCP only: there a post needs the target's help, so it stays under way as long as the target
stands still."""
