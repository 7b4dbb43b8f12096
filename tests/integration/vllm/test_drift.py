"""Another version of vLLM, which lacks a name or has other signatures; and what of this one is
refused."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest

from benchmarks.vllm_servers import REPOSITORY
from prefixkv.engines.vllm.options import OPTION_NAMES
from tests.integration.vllm.test_vllm import PYTHON


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    assert PYTHON, "PREFIXKV_ENGINE_PYTHON is the interpreter of `benchmarks env vllm`"
    done = subprocess.run(
        [PYTHON, "-m", "tests.integration.vllm.drift"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "VLLM_LOGGING_LEVEL": "ERROR"},
        timeout=900,
    )
    assert done.returncode == 0
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


def test_vllm_as_it_is_has_everything(rows: list[Any]) -> None:
    works = rows[0]
    assert works["advertise"].endswith(":14579")
    assert works["governed"] == "GovernedQueue"
    assert works["rests"]
    assert works["stats"]
    assert works["extension"]
    assert works["lines"] == []


def test_a_name_that_is_gone_is_an_import_error_in_plain_words(rows: list[Any]) -> None:
    assert len(rows[1]) == 3
    for name, said in rows[1].items():
        assert said.startswith("ImportError: vLLM 0.3")
        assert f"cannot import name '{name}'" in said
        assert said.endswith("prefixkv's connector is for vLLM from 0.32 on, and before 0.34")


def test_a_function_that_takes_other_arguments_is_refused_at_start(rows: list[Any]) -> None:
    """Of those that vLLM calls, of ours."""
    for name, said in rows[2].items():
        assert said.startswith("ConfigError: vLLM 0.3"), (name, said)
        assert f"KVConnectorBase_V1.{name}(" in said


def test_sleep_mode_is_refused_where_kv_would_move(rows: list[Any]) -> None:
    said = rows[-1]["sleep"]
    assert said.pop("supported") is False
    moved = "the KV memory cannot be released: prefixkv's connector has registered it"
    for role in ("SCHEDULER", "WORKER"):
        assert said.pop(f"cuda False {role}") == moved
        assert said.pop(f"cpu True {role}") == moved
        assert "enable_sleep_mode is True" in said.pop(f"cuda True {role}")
    assert said == {}


def test_groups_that_vllm_makes_are_taken_or_refused_by_name(rows: list[Any]) -> None:
    said = rows[-1]["groups"]
    assert said.pop("Gemma 3 27B") == [9, 9, 9, 9, 8, 8]
    assert said.pop("Gemma 3 1B") == [4, 4, 4, 4, 3, 3]
    assert said.pop("Gemma 2 27B") == [23]
    assert said.pop("GPT-OSS 120B") == [18]
    assert said.pop("twelve") == [12]
    assert said.pop("window") == [2, 2]
    assert "13 layers, more than the 12 that keep every token" in said.pop("more windows")
    assert "2 KV cache groups that keep every token" in said.pop("more full")
    assert "a KV cache group of ChunkedLocalAttentionSpec" in said.pop("chunk")
    # A transfer has one list of blocks of each group, however many they are.
    assert said.pop("Granite 4") == [4] * 9
    assert said.pop("Qwen3-Next") == [12] * 3
    assert said.pop("state") == said.pop("uncached state") == [2, 2]
    assert "13 layers, more than the 12 that keep every token" in said.pop("more states")
    assert "--mamba-cache-mode is all" in said.pop("state of every block")
    assert "blocks of 32 tokens" in said.pop("state of other blocks")
    assert "a draft model beside states is not transferred" in said.pop("state with drafts")
    assert "groups of SlidingWindowSpec and of MambaSpec" in said.pop("both")
    options = said.pop("options")
    assert options.pop("use_replayssm").startswith("--use-replayssm keeps a part of each state")
    assert options.pop("prefix_match_unit").startswith("--prefix-match-unit is 8: with states")
    for name in ("host_memory", "policy", "compute_below", "recompute_below"):
        assert "with a model whose layers keep a state" in options.pop(name)
    assert options == {}
    assert "block_size is 32, that of the layers that keep every token is 16" in said.pop("heads")
    assert said == {}


def test_the_options_that_a_refusal_names_are_vllm_s(rows: list[Any]) -> None:
    named = {flag for one in OPTION_NAMES.values() for flag in re.findall(r"--[a-z-]+", one)}
    assert "--block-size" in named
    assert named <= {*rows[-1]["flags"]}
