"""One moment of NaN in two real vLLM servers that count them: the request ends with an error, and
every answer after it is right. On prefill and on decode, which has host memory too.

As in `test_vllm`, tokens are compared with those that a server computes from nothing, in float32.
"""

import urllib.error
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from benchmarks.vllm_servers import Server, token_ids
from tests.integration.vllm.test_vllm import OUT, Pair, prompt_of, started

COUNTING = {"VLLM_COMPUTE_NANS_IN_LOGITS": "1", "VLLM_SERVER_DEV_MODE": "1"}
TOKEN = 7
"""`prompt_of` has none."""
LONG, SHORT = 300, 40  # tokens: of five chunks, and of one


class Counting(Pair):
    connectors = {"host_memory": "4x"}, {}
    of_both: ClassVar[dict[str, Any]] = {
        "chunk": 64, "environment": COUNTING,
        "more": ["--worker-extension-cls", "tests.integration.vllm.spoiler.Spoiler"],
    }  # fmt: skip

    @contextmanager
    def spoilt(self, server: Server) -> Iterator[None]:
        for method in ("spoil", "heal"):
            server.post("/collective_rpc", {"method": method, "args": [TOKEN]})
            if method == "spoil":
                yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counting]:
    with started(lambda: Counting(tmp_path_factory.mktemp("vllm"))) as made:
        yield made


def prompt_with(seed: int, num_tokens: int, at: int) -> list[int]:
    prompt = prompt_of(seed, num_tokens)
    prompt[at] = TOKEN
    return prompt


def fails(answer: Future[Any]) -> str:
    with pytest.raises(urllib.error.HTTPError) as caught:
        answer.result()
    with caught.value as error:
        assert error.code == 500
        return error.read().decode()


def check_later(pair: Counting, prompt: list[int]) -> None:
    """The prompt and its next turn, by both servers, by decode alone, and by prefill alone."""
    for more in ([], prompt_of(900, 70)):
        expected = token_ids(pair.alone(prompt + more).result())
        assert token_ids(pair.ask(prompt + more).result()) == expected
        for server in pair.servers:
            assert token_ids(pair.start(server, prompt + more, OUT).result()) == expected
    pair.settled()


@pytest.mark.parametrize(("num_tokens", "at"), [(LONG, 3), (LONG, 298), (SHORT, 5)])
def test_nan_on_prefill_fails_its_half_alone(pair: Counting, num_tokens: int, at: int) -> None:
    """Decode hears why, and computes the prompt."""
    prompt = prompt_with(num_tokens + at, num_tokens, at)
    load, send = pair.params()
    with pair.spoilt(pair.prefill):
        failing = pair.start(pair.prefill, prompt, 1, send)
        answer = pair.start(pair.decode, prompt, OUT, load).result()
        assert "Internal server error" in fails(failing)
    assert "NotFiniteError" in answer["kv_transfer_params"]["prefixkv"]["error"]
    assert token_ids(answer) == token_ids(pair.alone(prompt).result())
    check_later(pair, prompt)


@pytest.mark.parametrize(("num_tokens", "at"), [(LONG, 0), (LONG, 299)])
def test_nan_on_decode_is_an_error(pair: Counting, num_tokens: int, at: int) -> None:
    """Where it computes the prompt, and where prefill has sent it: its last token is computed."""
    prompt = prompt_with(600 + num_tokens + at, num_tokens, at)
    other = prompt_of(700, LONG)
    expected = token_ids(pair.alone(other).result())
    with pair.spoilt(pair.decode):
        beside = pair.start(pair.decode, other, OUT)
        fails(pair.start(pair.decode, prompt, OUT))
        assert token_ids(beside.result()) == expected
        if at == num_tokens - 1:
            fails(pair.ask(prompt))
    pair.settled()
    check_later(pair, prompt)
