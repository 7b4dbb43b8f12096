"""What KV travels by in the tests of nodes: UCX's two ways, or the shm transport. Child processes
see it in their environment."""

import dataclasses
import os
from typing import Any

import pytest

from tests.support.devices import DEVICE, TCP

WIRES = ("shared memory", "tcp", "shm")
VARIABLE = "PREFIXKV_TEST_BACKEND"


def choose(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all nodes that are made by `wired` configs from now on."""
    if wire == "tcp":
        monkeypatch.setenv("UCX_TLS", TCP)  # read when an agent is created
    elif wire == "shm":
        if DEVICE != "cpu":
            pytest.skip("its peers map memory of the CPU")
        monkeypatch.setenv(VARIABLE, "shm")


def is_shm() -> bool:
    return os.environ.get(VARIABLE) == "shm"


def wired(config: Any) -> Any:
    """The config of a node, with the transport that was chosen."""
    if not is_shm():
        return config
    transport = dataclasses.replace(config.transport, backend="shm")
    return dataclasses.replace(config, transport=transport)
