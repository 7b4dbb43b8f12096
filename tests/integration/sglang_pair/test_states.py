"""A prefill and a decode server of SGLang under the transfer backend, of models that keep windows
in a pool of their own, or a state for each request: every token is the model's own.

`PREFIXKV_ENGINE_PYTHON` is the interpreter of `python -m benchmarks env sglang`. What SGLang lacks
on a CPU for such models is in `cpu_layers.py`.
"""

import json
import os
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import (
    GenerationConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.sglang_serve import VOCABULARY, Pair, make_model

PYTHON = os.environ.get("PREFIXKV_ENGINE_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="PREFIXKV_ENGINE_PYTHON is not set"),
]
WINDOW, LAYERS, OUTPUT = 40, 4, 12
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "initializer_range": 0.2, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


class Served(NamedTuple):
    """The servers, and the model as transformers has it."""

    pair: Pair
    model: Any

    def right(self, ids: list[int]) -> list[int]:
        """What the model itself says."""
        told = self.model.generate(
            torch.tensor([ids]),
            generation_config=GenerationConfig(
                max_new_tokens=OUTPUT, do_sample=False, eos_token_id=None, pad_token_id=0
            ),
        )
        return told[0, len(ids) :].tolist()  # type: ignore[no-any-return]


def windows(folder: Path) -> Any:
    """Three layers of four see 40 tokens. SGLang serves no Qwen 3 with windows: it gets the same
    layers as a dense Laguna."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **SMALL, head_dim=32, sliding_window=WINDOW, use_sliding_window=True, layer_types=kinds
        )
    )
    model.save_pretrained(folder)
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    config = {
        **SMALL, "architectures": ["LagunaForCausalLM"], "model_type": "laguna", "head_dim": 32,
        "sliding_window": WINDOW, "layer_types": kinds, "mlp_layer_types": ["dense"] * LAYERS,
        "gating": False, "num_experts": 4, "torch_dtype": "float32",
        "rope_parameters": {"sliding_attention": rope, "full_attention": rope},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return model


def states(folder: Path) -> Any:
    """Three layers of four are short convolutions, with a state for each request."""
    kinds = ["conv", "full_attention", "conv", "conv"]
    model = Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=kinds, block_auto_adjust_ff_dim=False))
    model.save_pretrained(folder)
    return model


@pytest.fixture(
    scope="module",
    params=[
        (windows, ["--page-size", "16"]),
        # What SGLang needs for states and a cache without its kernels.
        (states, ["--page-size", "1", "--max-mamba-cache-size", "64"]),
    ],
    ids=["windows", "states"],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    make, options = request.param
    folder = tmp_path_factory.mktemp(make.__name__)
    make_model(folder / "model")  # for its tokenizer
    torch.manual_seed(0)
    model = make(folder / "model").eval()
    # SGLang finds a plug-in by the metadata of a package.
    named = folder / "plugin" / "cpu_layers-1.dist-info"
    named.mkdir(parents=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-layers\nVersion: 1\n")
    (named / "entry_points.txt").write_text("[sglang.srt.plugins]\ncpu_layers = cpu_layers:load\n")
    shutil.copy(Path(__file__).with_name("cpu_layers.py"), named.parent)
    paths = [str(named.parent), os.environ.get("PYTHONPATH", "")]
    with Pair(
        folder / "model",
        ["--disaggregation-transfer-backend", "prefixkv", "--dtype", "float32", *options],
        folder, decode_tokens=1024, prefill_tokens=1024, python=PYTHON,
        on_prefill=["--chunked-prefill-size", "64"],
        around={"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    ) as pair:  # fmt: skip
        yield Served(pair, model)


def prompts(lengths: list[int], seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def test_every_token_is_the_model_s_own(served: Served) -> None:
    """Shorter and longer than a page and a window, in several chunks, and a second turn of each
    behind what decode has cached. Together more than decode's pool holds."""
    room = 0
    for ids in prompts([5, 16, 39, 40, 41, 64, 100, 333, 160], 5):
        for _ in range(2):
            room += 1
            said = served.pair.generate(ids, room)
            assert said[:OUTPUT] == served.right(ids), (room, len(ids))
            ids = [*ids, *said, 7, 8, 9]


def test_many_at_once_and_some_that_end_early(served: Served) -> None:
    """And then nothing is held: SGLang flushes its caches only where no request is left."""
    pair, asked = served.pair, prompts([120, 45, 200, 33, 90, 61, 150, 70], 6)
    right = [served.right(ids) for ids in asked]
    bodies = [pair.body(ids, 1000 + i, OUTPUT) for i, ids in enumerate(asked)]

    def ask(side: str, number: int) -> Any:
        try:
            return pair.servers[side].post("/generate", bodies[number])
        except OSError as error:  # aborted before it began
            return {"error": str(error)}

    with ThreadPoolExecutor(16) as threads:
        asking = {
            side: [threads.submit(ask, side, i) for i in range(len(asked))] for side in pair.servers
        }
        for number in (2, 5):
            rid = {"rid": bodies[number]["rid"]}
            for side in pair.servers:
                pair.servers[side].post("/abort_request", rid)
        said = [future.result() for future in asking["decode"]]
        for future in asking["prefill"]:
            future.result()
    for number, (answer, expected) in enumerate(zip(said, right, strict=True)):
        ids = answer.get("output_ids", [])
        assert ids == expected or (number in (2, 5) and ids == expected[: len(ids)]), number
    assert served.pair.generate(asked[0], 2000)[:OUTPUT] == right[0]
    for side in pair.servers:
        pair.servers[side].post("/flush_cache", {})
