"""Another version of vLLM, which lacks a name or has other signatures; and what of this one is
refused."""

import json
import re
import subprocess
from typing import Any

import pytest

from benchmarks.vllm_servers import REPOSITORY
from prefixkv.engines.vllm.options import OPTION_NAMES
from tests.integration.vllm.test_vllm import PYTHON


def told(module: str) -> subprocess.CompletedProcess[str]:
    """What a module of this folder says in vLLM's environment."""
    assert PYTHON, "PREFIXKV_ENGINE_PYTHON is the interpreter of `benchmarks env vllm`"
    return subprocess.run(
        [PYTHON, "-m", f"tests.integration.vllm.{module}"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "VLLM_LOGGING_LEVEL": "ERROR"},
        timeout=900,
    )


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    done = told("drift")
    assert done.returncode == 0
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


def test_vllm_as_it_is_has_everything(rows: list[Any]) -> None:
    works = rows[0]
    assert works["advertise"].endswith(":14579")
    assert works["governed"]
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
    assert said.pop("meta") == moved
    assert "enable_sleep_mode is True" in said.pop("cuda")
    assert said == {}


def test_groups_that_vllm_makes_are_taken_or_refused_by_name(rows: list[Any]) -> None:
    said = rows[-1]["groups"]
    assert said.pop("Gemma 3 27B") == [9, 9, 9, 9, 8, 8]
    assert said.pop("GPT-OSS 120B") == [18]
    assert said.pop("Granite 4") == [4] * 9
    assert said.pop("Qwen3-Next") == [12] * 3
    assert said.pop("uncached state") == [2, 2]
    for name, words in (
        ("more windows", "13 layers, more than the 12 that keep every token"),
        ("more full", "2 KV cache groups that keep every token"),
        ("chunk", "a KV cache group of ChunkedLocalAttentionSpec"),
        ("heads", "block_size is 32, that of the layers that keep every token is 16"),
    ):
        assert words in said.pop(name)
    assert said == {}


def test_the_options_that_a_refusal_names_are_vllm_s(rows: list[Any]) -> None:
    named = {flag for one in OPTION_NAMES.values() for flag in re.findall(r"--[a-z-]+", one)}
    assert "--block-size" in named
    assert named <= {*rows[-1]["flags"]}
