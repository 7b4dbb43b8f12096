"""Servers that tests share: one for those that end none of it, one whose workers they may kill.

A start is three processes that import torch. So a run has one of each, and each of its processes
under xdist: what a test asks there has to be its own, such as the beginning of a prompt whose hits
it counts.
"""

from collections.abc import Iterator

import openai
import pytest
import torch

from tests.support.patience import until
from tests.support.served import Expected, Serve, client_of, get

KEY = "secret"


@pytest.fixture(scope="session")
def expected() -> Expected:
    torch.set_num_threads(1)  # quicker for a model so small, beside the processes that are asked
    return Expected()


@pytest.fixture(scope="session")
def serve() -> Iterator[Serve]:
    with Serve("--chunk-tokens", "64") as serve:
        yield serve


@pytest.fixture(scope="module")
def client(serve: Serve) -> Iterator[openai.OpenAI]:
    with client_of(serve) as client:
        yield client


@pytest.fixture(scope="session")
def _guarded() -> Iterator[Serve]:
    with Serve("--chunk-tokens", "64", "--api-key", KEY) as serve:
        yield serve


@pytest.fixture
def guarded(_guarded: Serve) -> Serve:
    """A server that asks clients for `KEY`, and whose workers a test may kill: all are there when
    it begins."""
    until(lambda: get(f"{_guarded.status}/health")[0] == 200)
    return _guarded
