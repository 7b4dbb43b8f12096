"""Two real vLLM servers that are each producer and consumer, where a load that fails is an error:
`kv_both` and `kv_load_failure_policy: fail`, with LoRA adapters.

As in `test_vllm`, tokens are compared with those that a server computes from nothing, in float32.
"""

import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm_servers import MODEL, token_ids
from tests.integration.vllm.test_vllm import BLOCK, OUT, Pair, prompt_of, started
from tests.support.ports import free_port

ADAPTERS = ("adapter-1", "adapter-2")


class Both(Pair):
    role, failure = "both", "fail"
    connectors = ({"control": {"connect_timeout_s": 2.0}},) * 2

    def __init__(self, folder: Path) -> None:
        modules = [f"{name}={folder / 'model' / name}" for name in ADAPTERS]
        lora = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", *modules]
        self.of_both = {"chunk": 64, "more": lora}
        super().__init__(folder)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with started(lambda: Both(tmp_path_factory.mktemp("vllm"))) as made:
        yield made


def test_an_adapter_has_blocks_of_its_own(both: Both) -> None:
    """One prompt under the model and two LoRA adapters: nobody hits another's KV, on either side,
    and each finds its own again."""
    prompt = prompt_of(305, 10 * BLOCK + 3)
    said = []
    for name in (MODEL, *ADAPTERS):
        expected = token_ids(both.alone(prompt, model=name).result())
        for blocks in (11, 1):  # the second time decode lacks the last, partial one
            before = both.bytes_sent()
            assert token_ids(both.ask(prompt, model=name).result()) == expected
            both.settled()
            both.has_sent(blocks, before)
        said.append(expected)
    assert said[0] != said[1] != said[2] != said[0]
    assert both.decode.counter("bytes_sent") == 0


def test_a_load_that_fails_is_an_error(both: Both) -> None:
    """Nobody listens there. vLLM ends the request, the server goes on, and sends as well."""
    load: dict[str, Any] = both.params()[0]
    prompt, expected = prompt_of(310, 300), []
    expected = token_ids(both.alone(prompt).result())
    with pytest.raises(urllib.error.HTTPError) as caught:
        both.decode.complete(prompt, OUT, load | {"prefill": f"tcp://127.0.0.1:{free_port()}"})
    with caught.value as answer:
        assert answer.code == 500
    both.settled()
    asked = both.decode.complete(prompt, 1, {"do_remote_decode": True})
    answer = both.prefill.complete(prompt, OUT, asked["kv_transfer_params"])
    assert token_ids(answer) == expected
    both.settled()
    assert both.decode.counter("bytes_sent") > 0
