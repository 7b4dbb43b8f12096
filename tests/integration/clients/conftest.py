"""The clients are programs of another interpreter, which alone has them; the server is this one's.

`PREFIXKV_ENGINE_PYTHON` is the interpreter of `python -m benchmarks env clients`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.served import Serve

collect_ignore = ["with_langchain.py", "with_litellm.py", "with_locust.py", "with_openai.py"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `serve` writes for clients that count tokens."""
    return tmp_path_factory.mktemp("clients") / "tokenizer"


@pytest.fixture(scope="module")
def serve(tokenizer: Path) -> Iterator[Serve]:
    with Serve("--chunk-tokens", "64", "--tokenizer-folder", str(tokenizer)) as serve:
        yield serve
