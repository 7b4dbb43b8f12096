"""Two real vLLM servers with a model whose layers keep a window, Gemma 3 and GPT-OSS, or a state,
Granite 4 with its Mamba 2; tiny and with random weights. vLLM gives such layers KV cache groups of
their own. It frees blocks as the window moves on, and of a state those that are behind the newest.

Every token and its log-probability are compared with those of the prefill server alone, from
nothing. Tokens of such small models may be right where the KV is not; log-probabilities are not.

GPT-OSS is to the connector what Gemma 3 is with one group less.
"""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.vllm_servers import REPOSITORY, token_ids
from tests.integration.vllm.test_vllm import PYTHON, Pair, prompt_of, started, until

WINDOW: Final = 96  # tokens


@dataclass(frozen=True)
class Family:
    """What vLLM makes of a model: two layers in each group, one group that keeps every token, and
    `num_groups` others. `block` and `window` are in tokens; of a state is sent what a window of 2
    would be. Decode's `blocks` are fewer than the prompts of a test take, and a step computes a
    `chunk` there, tokens."""

    num_groups: int
    block: int = 32
    window: int = WINDOW
    blocks: int = 128
    chunk: int = 256

    @property
    def block_bytes(self) -> int:
        """Of one group: two layers, K and V of 2 heads of 32, float32. A state lies in as many."""
        return 2 * 2 * 2 * 32 * 4 * self.block


FAMILIES: Final = {
    "gemma3_text": Family(2),
    "gpt_oss": Family(1),
    # vLLM makes blocks as large as a state is, and on CPUs it dies of a step that is longer.
    "granitemoehybrid": Family(2, block=64, window=2, blocks=40, chunk=64),
}


class WindowPair(Pair):
    """The two servers. Decode has few blocks: what is loaded goes on where others were evicted."""

    def __init__(self, folder: Path, family: str) -> None:
        self.name, self.family = family, FAMILIES[family]
        self.of_decode = {
            "max_len": 1024, "blocks": self.family.blocks, "chunk": self.family.chunk
        }  # fmt: skip
        super().__init__(folder)

    def make_model(self, folder: Path) -> Path:
        maker = [PYTHON, "-m", "tests.integration.vllm.window_model"]
        command = [*maker, self.name, str(folder), str(WINDOW)]
        subprocess.run(command, check=True, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
        return folder

    def check(self, prompt: list[int], num_tokens: int = 8) -> Any:
        """Ask both servers, compare with one, and return decode's answer."""
        answer = self.ask(prompt, num_tokens, logprobs=1).result()
        self.compare(answer, prompt, num_tokens)
        return answer

    def compare(self, answer: Any, prompt: list[int], num_tokens: int = 8) -> None:
        salt = f"alone {next(self._rooms)}"
        alone = self.prefill.complete(prompt, num_tokens, cache_salt=salt, logprobs=1)
        assert token_ids(answer) == token_ids(alone)
        assert logprobs(answer) == pytest.approx(logprobs(alone), abs=2e-5)


def logprobs(answer: Any) -> list[float]:
    return list(answer["choices"][0]["logprobs"]["token_logprobs"])


def loaded(answer: Any) -> tuple[int, int]:
    """Tokens that were loaded, and that decode had."""
    said = answer["kv_transfer_params"]["prefixkv"]
    return said["loaded_tokens"], said["cached_tokens"]


CHOSEN: Final = [
    "gemma3_text",
    pytest.param("gpt_oss", marks=pytest.mark.slow),
    pytest.param("granitemoehybrid", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=CHOSEN)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WindowPair]:
    with started(lambda: WindowPair(tmp_path_factory.mktemp("windows"), request.param)) as made:
        yield made


@pytest.mark.parametrize("num_tokens", [2, 96, 97, 127, 129, 300])
def test_any_length_is_that_of_one_server(pair: WindowPair, num_tokens: int) -> None:
    """The prompt's end and the window's beginning lie on either side of a block's boundary. All but
    the last token is loaded, which vLLM computes: of 127 that one sees a block that no later token
    does, and of 129 it is the first of a block for a state."""
    assert loaded(pair.check(prompt_of(num_tokens, num_tokens))) == (num_tokens - 1, 0)


def test_only_windows_come_again(pair: WindowPair) -> None:
    """Over turns, and where others begin in the same way, decode's prefix counts the layers that
    keep every token. Of the others the last blocks come with each prompt, and no more."""
    family, block = pair.family, pair.family.block
    prompt = first = prompt_of(700, 300)
    has = 0
    for turn in range(3):
        before = pair.bytes_sent()
        answer = pair.check(prompt)
        end = len(prompt) - 1
        assert loaded(answer) == (end - has, has)
        num_blocks = -(-end // block)
        full, window = num_blocks - has // block, num_blocks - (end + 1 - family.window) // block
        wanted = (full + family.num_groups * window) * family.block_bytes
        until(lambda wanted=wanted, before=before: pair.bytes_sent() - before >= wanted)
        assert pair.bytes_sent() - before == wanted
        # What decode has computed counts too: its last token is in no block yet.
        has = (len(prompt) + 7) // block * block
        prompt = prompt + token_ids(answer) + prompt_of(710 + turn, 90)
        has = min(has, (len(prompt) - 2) // block * block)
    # Nothing has the window at this boundary any more, but for the blocks that come with it.
    branch = first[:192] + prompt_of(720, 70)
    assert loaded(pair.check(branch)) == (len(branch) - 1 - 192, 192)
    assert loaded(pair.check(first))[1] == (300 - 2) // block * block
    pair.settled()


def test_prompts_beside_each_other(pair: WindowPair) -> None:
    """More than decode has blocks for: they wait for each other, and some are preempted. One prompt
    in several choices loads once."""
    prompts = [prompt_of(800 + i, 230 + 40 * i) for i in range(6)]
    asked = [pair.ask(prompt, 24, logprobs=1) for prompt in prompts]
    for prompt, answer in zip(prompts, asked, strict=True):
        pair.compare(answer.result(), prompt, 24)
    load, send = pair.params()
    pair.start(pair.prefill, prompts[0], 1, send)
    best = {"temperature": 1, "top_k": 1}  # vLLM takes no greedy request of several choices
    answer = pair.decode.complete(prompts[0], 8, load, n=2, **best)
    alone = pair.alone(prompts[0]).result()
    assert [list(one["token_ids"]) for one in answer["choices"]] == [token_ids(alone)] * 2
    pair.settled()


def test_prefill_draws_the_room(pair: WindowPair) -> None:
    """It has computed the prompt, and what it generates changes nothing of it: with states it ends
    with the first token, whatever it is asked for."""
    prompt = prompt_of(850, 257)
    asked = pair.prefill.complete(prompt, 40, {"do_remote_decode": True})
    answer = pair.decode.complete(prompt, 8, asked["kv_transfer_params"], logprobs=1)
    assert loaded(answer) == (256, 0)
    pair.compare(answer, prompt)
    assert len(token_ids(asked)) == (1 if pair.family.window == 2 else 40)
    pair.settled()
