"""One `prefixkv serve` for all tests that do not end it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
import torch

from tests.models.served import Expected, Serve, client_of


@pytest.fixture(scope="module")
def expected() -> Expected:
    torch.set_num_threads(1)  # quicker for a model so small, beside the processes that are asked
    return Expected()


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    with Serve("--chunk-tokens", "64") as serve:
        yield serve


@pytest.fixture(scope="module")
def client(serve: Serve) -> Iterator[openai.OpenAI]:
    with client_of(serve) as client:
        yield client
