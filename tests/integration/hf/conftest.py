"""One small model for each file, and one thread: models so small are quicker on it, and leave the
other processors to others."""

from collections.abc import Iterator

import pytest
import torch

from prefixkv.engines.hf import PagedModel, make_model
from tests.support.hf_world import TINY, Reference


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return make_model("llama", seed=3, **TINY)


@pytest.fixture(scope="module")
def reference(model: PagedModel) -> Reference:
    return Reference(model)
