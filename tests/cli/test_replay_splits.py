"""What a model's layers keep, from its config, and replays of how its memory is divided."""

from __future__ import annotations

import json

import pytest

from benchmarks import checkpoints as of_scheduler
from benchmarks.splits import CONFIGS, shape_of
from benchmarks.trace_rows import TRACES
from prefixkv.cache.eviction.policy import make_policy
from prefixkv.cli.main import run_command
from prefixkv.cli.replay import read_trace, replay_policy
from prefixkv.cli.replay.model import ModelShape, Window, model_shape
from prefixkv.cli.replay.splits import SHARES, replay_resume, replay_splits, split_sentence
from prefixkv.errors import ConfigError
from tests.cli.test_replay import write_trace

KIB, MIB = 1024, 1024 * 1024
PLAIN = {
    "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512,
    "num_key_value_heads": 2,
}  # fmt: skip
MAMBA = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "mamba_num_heads": 16,
    "mamba_head_dim": 32, "ssm_state_size": 64, "n_groups": 2, "conv_kernel": 4,
}  # fmt: skip
MAMBA_BYTES = (16 * 32 + 2 * 2 * 64) * 3 * 2 + 16 * 32 * 64 * 4
KIMI = {
    "model_type": "kimi_linear", "num_hidden_layers": 27, "num_attention_heads": 32,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "linear_attn_config": {
        "kda_layers": [at for at in range(1, 28) if at % 4], "num_heads": 32, "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}  # fmt: skip


def shape(tmp_path, config) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return model_shape(tmp_path)


@pytest.mark.parametrize(
    ("model", "token", "checkpoint"),
    # Worked out by hand for HYBRID's table of what a checkpoint costs.
    [
        ("Gemma 3 27B", 80 * KIB, 416 * MIB),
        ("GPT-OSS 120B", 36 * KIB, int(4.5 * MIB)),
        ("Qwen3-Next 80B", 24 * KIB, 36 * (2 * MIB + 48 * KIB)),
    ],
)
def test_models_that_are_used_take_what_is_known_of_them(model, token, checkpoint):
    found = shape_of(model)
    assert (found.full_token_bytes, found.checkpoint_bytes(16)) == (token, checkpoint)


def test_kimi_keeps_latents_of_all_and_a_state_of_its_delta_attention(tmp_path):
    found = shape(tmp_path, KIMI)
    assert (found.full_layers, found.state_layers) == (6, 21)
    assert found.full_token_bytes == 6 * (512 + 64) * 2
    assert found.state_bytes == 21 * (2 * MIB + 3 * 4096 * 3 * 2)


@pytest.mark.parametrize(
    "kinds",
    [
        {"layer_types": ["mamba", "attention", "mamba", "moe"]},
        {"layers_block_type": ["mamba2", "attention", "mamba2"]},
        {"hybrid_override_pattern": "M*-ME"},
        {"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1},
    ],
)
def test_a_config_names_its_kinds_of_layers_in_one_of_several_ways(tmp_path, kinds):
    found = shape(tmp_path, {"model_type": "m", **MAMBA, **kinds})
    assert (found.full_layers, found.state_layers) == (1, 2)
    assert (found.full_token_bytes, found.state_bytes) == (2 * 2 * 64 * 2, 2 * MAMBA_BYTES)


def test_windows_and_chunks_are_groups_of_their_own(tmp_path):
    kinds = ["sliding_attention", "chunked_attention", "full_attention", "sliding_attention"]
    config = {**PLAIN, "layer_types": kinds, "sliding_window": 100, "attention_chunk_size": 64}
    found = shape(tmp_path, {"text_config": {**config, "dtype": "float32"}})
    each = 2 * 2 * 64 * 4
    assert found.windows == (Window(2, 100, 2 * each), Window(1, 64, each))
    # 99 tokens lie in 7 pages of 16, 63 in 4; while a request runs one more of each is in use.
    assert found.checkpoint_bytes(16) == 7 * 16 * 2 * each + 4 * 16 * each
    assert found.running_bytes(16) == 8 * 16 * 2 * each + 5 * 16 * each


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["hyena"]}, "layers of kind hyena are not known"),
        ({"dtype": "int3"}, "dtype 'int3' is none of"),
        ({"num_hidden_layers": None}, "it has no number num_hidden_layers"),
        ({"layer_types": ["linear_attention"]}, "no number linear_num_key_heads"),
        ({"layer_types": ["sliding_attention"], "sliding_window": True}, "number sliding_window"),
    ],
)
def test_what_a_config_does_not_say_is_named(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        shape(tmp_path, {**PLAIN, **changes})


def test_what_is_no_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not read"):
        model_shape(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds no object"):
        model_shape(tmp_path)


# --- divisions ------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path):
    return read_trace(write_trace(tmp_path / "t.jsonl", 250))


@pytest.mark.parametrize(("capacity", "slots"), [(40, 4), (120, 10), (400, 60)])
@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_a_replay_goes_on_where_prefills_real_scheduler_does(
    trace, capacity, slots, policy, monkeypatch
):
    monkeypatch.setitem(TRACES, trace.name, trace)
    by_scheduler = of_scheduler._measure((trace.name, capacity, policy, slots))
    dense, resume = replay_resume(trace, lambda: make_policy(policy), capacity, slots, 0.5)
    assert 0 < resume <= dense
    # The scheduler has a request's pages in its tree chunk by chunk.
    assert abs(dense - by_scheduler["dense"]) < 0.02
    assert abs(resume - by_scheduler["resume"]) < 0.02


def test_at_the_same_bytes_each_side_has_the_blocks_that_fit(trace):
    block = trace.block_tokens
    model = ModelShape("m", 1, 10, (Window(3, 128, 30),))
    memory = 100 * block * 40
    results = replay_splits(trace, model, memory, "lru", lambda: make_policy("lru"), 0.5, running=4)
    one, decode, *prefill = results
    assert one.capacity_blocks == 100
    plain = replay_policy(trace, "lru", 100, 0.5, running=4)
    assert one.dense_ratio == one.resume_ratio == plain.block_hit_ratio
    running = 4 * (8 + 1) * 16 * 30
    assert decode.capacity_blocks == (memory - running) // (block * 10)
    assert decode.dense_ratio > one.dense_ratio
    assert [one.share for one in prefill] == list(SHARES)
    for split in prefill:
        taken = split.checkpoints * 8 * 16 * 30 + split.capacity_blocks * block * 10
        assert memory - running - block * 10 < taken <= memory - running
        assert split.resume_ratio <= split.dense_ratio
    best = max(prefill, key=lambda split: split.resume_ratio)
    said = split_sentence(results)
    assert f"decode finds {decode.dense_ratio:.1%}" in said
    assert f"Give checkpoints {best.share:.0%} of prefill's memory, {best.checkpoints:,}" in said


def test_where_there_is_no_room_it_says_so(trace):
    # A checkpoint takes more than all blocks.
    model = ModelShape("m", 1, 10, (), 1, 10**6)
    results = replay_splits(trace, model, 1_200_000, "lru", lambda: make_policy("lru"), running=1)
    assert [one.side for one in results] == ["one pool", "decode"]
    assert "For a checkpoint there is no room" in split_sentence(results)
    assert "with one for all" not in split_sentence(results)


# --- the command ----------------------------------------------------------------------------------


def run(*args):
    return run_command(["replay", *map(str, args)])


def test_the_command_says_how_to_divide_the_memory(tmp_path, capsys):
    trace = write_trace(tmp_path / "t.jsonl", 120)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Gemma 3 27B"]))
    out = tmp_path / "out.json"
    asked = (trace, "--model", tmp_path, "--memory", "30GiB", "--warm", 0.5, "--json", out)
    assert run(*asked, "--policy", "lru,optimum", "--running", 2) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "10 layers keep everything, 80.0 KiB a token; 52 keep the last 1,024 tokens" in said
    assert "gemma3_text, 30.0 GiB, lru: decode finds" in said
    rows = json.loads(out.read_text())
    assert {row["policy"] for row in rows} == {"lru"}, "the optimum has no checkpoints"
    assert run(*asked) == 0
    assert {row["policy"] for row in json.loads(out.read_text())} == {"lru", "adaptive"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "1GiB"], "--memory is given without --model"),
        (["--model", "c.json"], "--memory '' is no size in bytes"),
        (["--model", "c.json", "--memory", "4x"], "--memory '4x' is no size in bytes"),
        (["--model", "c.json", "--memory", "1GiB"], "so there is nothing to divide"),
        (["--model", "w.json", "--memory", "1GiB", "--running", "99"], "99 running requests"),
        (["--model", "n.json", "--memory", "1GiB"], "nothing is cached"),
        (["--model", "w.json", "--memory", "1GiB", "--plot", "p.svg"], "no --plot then"),
    ],
)
def test_what_cannot_be_divided_is_refused(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "t.jsonl", 3)
    (tmp_path / "c.json").write_text(json.dumps(PLAIN))
    (tmp_path / "w.json").write_text(json.dumps(CONFIGS["Gemma 3 27B"]))
    (tmp_path / "n.json").write_text(json.dumps({**PLAIN, "sliding_window": 64}))
    assert run("t.jsonl", *options) == 2
    assert message in " ".join(capsys.readouterr().err.split())
