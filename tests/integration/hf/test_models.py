"""What models are taken, and which are refused, by what name."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from prefixkv.engines.hf import Generate, PagedModel, load_model, make_model
from prefixkv.engines.hf.attention import FlatPool
from prefixkv.engines.hf.models import identity_of, unpaged_copy, weights_digest
from prefixkv.errors import ConfigError, RequestError
from prefixkv.memory.kv_pool import KVPool
from tests.support.hf_world import TINY, World

_MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("kind", "sizes", "why"),
    [
        ("gemma2", {}, "gemma2 is not served: attn_logit_softcapping is 50.0"),
        ("gemma3_text", {"sliding_window": 512}, "its sliding window has 512 tokens"),
        ("mistral", {"sliding_window": 1024}, "context 4096; with context=1024 it would be"),
        ("deepseek_v3", {"head_dim": 64}, "kv_lora_rank is 512"),
        ("llama4_text", {}, "attention_chunk_size is 8192"),
        ("bloom", {}, "does not go through transformers' attention interface"),
        ("opt", {"max_position_embeddings": 0}, "context is 0, opt was made for 0 tokens"),
        ("no_such", {}, "there is no model 'no_such'"),
        # Kinds that transformers itself stops at, each with an error of its own.
        ("minimax", {}, "minimax is not served: MiniMax uses cache of its own"),
        ("codegen", {}, "codegen is not served: "),
        ("camembert", {}, "camembert is not served: "),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "its rope is dynamic",
        ),
    ],
)
def test_what_would_be_wrong_is_refused_by_name(kind: str, sizes: dict, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_model(kind, **{**TINY, **sizes})
    assert why in str(error.value)


def test_heads_of_several_sizes_are_refused_by_name() -> None:
    sizes = {name: size for name, size in TINY.items() if name != "device"}
    kinds = ["sliding_attention", "full_attention"]
    config = AutoConfig.for_model(
        "gemma4_text",
        **sizes,
        layer_types=kinds,
        head_dim=16,
        global_head_dim=32,
        vocab_size_per_layer_input=256,
    )
    with pytest.raises(ConfigError, match="gemma4_text is not served: heads of several sizes"):
        make_model(config)


@pytest.mark.parametrize(
    ("kind", "context", "sizes"),
    [
        ("gemma3_text", 512, {"sliding_window": 512}),
        ("gemma", None, {}),
        ("qwen3_moe", None, _MOE),
        ("gpt2", None, {"num_key_value_heads": None}),
    ],
)
def test_what_a_trial_finds_right_is_taken(kind: str, context: int | None, sizes: dict) -> None:
    model = make_model(kind, context=context, **{**TINY, **sizes})
    assert model.num_layers == 2


def test_the_trial_finds_what_no_config_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of which a part is left out, as a model with a window of its own would have."""
    from prefixkv.engines.hf import attention

    right = attention.GroupPlan.attend

    def wrong(self: attention.GroupPlan, *args: torch.Tensor) -> torch.Tensor:
        return right(self, *args) * 1.1

    monkeypatch.setattr(attention.GroupPlan, "attend", wrong)
    with pytest.raises(ConfigError, match="on pages its logits differ by"):
        make_model("llama", **TINY)


def test_a_seed_says_all_of_a_model_and_leaves_torchs_own_alone() -> None:
    state = torch.random.get_rng_state()
    one, same, other = (make_model("llama", seed=seed, trial=False, **TINY) for seed in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    names = [model.identity for model in (one, same, other)]
    assert names[0] == names[1] != names[2]
    weights = [dict(model.model.named_parameters()) for model in (one, same, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


def test_files_are_one_model_wherever_they_lie_and_however_they_are_split(tmp_path: Path) -> None:
    made = make_model("llama", seed=4, trial=False, **TINY)
    whole, moved, split = tmp_path / "one", tmp_path / "deep" / "er" / "v2-final", tmp_path / "3"
    unpaged_copy(made).save_pretrained(whole)
    shutil.copytree(whole, moved)
    unpaged_copy(made).save_pretrained(split, max_shard_size="50KB")
    assert len(list(split.glob("*.safetensors"))) > 2
    # Where the parts of a model that has several were loaded from is in lists and dictionaries.
    config = json.loads((moved / "config.json").read_text())
    config["parts"] = [{"_name_or_path": "/mnt/elsewhere", "_x": {"_name_or_path": 3}}]
    (moved / "config.json").write_text(json.dumps(config))
    config["parts"] = [{"_x": {}}]
    (whole / "config.json").write_text(json.dumps(config))
    one, two = (load_model(path, trial=False) for path in (whole, moved))
    assert one.identity == two.identity
    assert (one.name, two.name) == ("one", "v2-final")
    assert load_model(split, trial=False).identity == made.identity
    assert one.identity.model != made.identity.model  # its config says more
    assert one.identity.weights_version == made.identity.weights_version


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_number_of_every_tensor_is_in_the_identity(dtype: str) -> None:
    model = make_model("llama", seed=4, dtype=dtype, trial=False, **TINY)
    state = model.model.state_dict()
    seen = {model.identity.weights_version}
    rng = np.random.default_rng(0)
    for num, (name, tensor) in enumerate(state.items(), start=1):
        for place in (0, tensor.numel() - 1, int(rng.integers(tensor.numel()))):
            tensor.reshape(-1)[place] += 1
            seen.add(PagedModel(model.model, trial=False).identity.weights_version)
        assert len(seen) == 1 + 3 * num, name


def test_names_and_shapes_are_in_it_and_the_seed_is_not() -> None:
    one = make_model("llama", seed=1, trial=False, **TINY)
    other = make_model("llama", seed=2, trial=False, **TINY)
    other.model.load_state_dict(one.model.state_dict())
    assert identity_of(other.model) == one.identity != other.identity
    layer = other.model.model.layers[0].self_attn
    layer.k_proj, layer.v_proj = layer.v_proj, layer.k_proj  # the same numbers, under other names
    assert weights_digest(other.model) != one.identity.weights_version
    half = make_model("llama", seed=1, dtype="bfloat16", trial=False, **TINY)
    assert half.identity.weights_version != one.identity.weights_version


def test_workers_of_different_weights_refuse_each_other() -> None:
    one, other = (make_model("llama", seed=seed, trial=False, **TINY) for seed in (1, 2))
    with World(one) as world, World(other) as elsewhere:
        ask = Generate("r", np.arange(5, dtype=np.int32), elsewhere.prefill.endpoint)
        outputs: list = []
        world.decode.submit(ask, outputs.append)
        for job in world.decode.take_prefill_jobs():
            elsewhere.prefill.submit(job)
        while not outputs:
            elsewhere.prefill.step()
            world.decode.step()
            world.decode.wait(0.01)
        assert outputs[0].finish == "error"
        assert "weights_version differs" in str(outputs[0].error)


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return make_model("llama", context=100, **TINY)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tokens": [256]}, "token 256 is not in the vocabulary of 256"),
        ({"tokens": range(90), "max_new_tokens": 11}, "are 101, the model takes 100"),
        ({"rid": "a/b"}, 'a string without "/" is needed'),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"tokens": []}, "has no tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_what_cannot_be_answered_is_refused_and_leaves_nothing(
    model: PagedModel, options: dict, why: str
) -> None:
    with World(model) as world:
        given = {"rid": "r", "tokens": [1, 2], "prefill": world.prefill.endpoint, **options}
        with pytest.raises(RequestError, match=why.replace("(", r"\(")):
            world.decode.submit(Generate(**given), print)
        assert world.decode.take_prefill_jobs() == []
        world.at_rest()


def test_prefill_refuses_a_job_and_decodes_client_hears_why(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with World(model) as world:
        answer = world.ask("r", [1, 2, 3])
        (job,) = world.decode.take_prefill_jobs()
        with monkeypatch.context() as shorter:
            shorter.setattr(world.prefill, "model", SimpleNamespace(context=2))
            with pytest.raises(RequestError, match="3 tokens, the model takes 2"):
                world.prefill.submit(job)
        world.run()
        assert answer.ends[0].finish == "error"
        assert "3 tokens, the model takes 2" in str(answer.ends[0].error)
        world.at_rest()


def test_a_pool_that_pages_are_not_rows_of_is_refused() -> None:
    k = torch.zeros(4, 2, 16, 8).transpose(1, 2)
    with pytest.raises(ConfigError, match=r"as KVPool\.create makes them"):
        FlatPool(KVPool.from_tensors([k], [torch.zeros(4, 16, 2, 8)], page_size=16))
