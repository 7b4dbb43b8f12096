"""Another version of vLLM: each name of `compat.TABLE` is taken out of the real one. What nothing
works without is refused in our own words; what one feature needs stands down alone, and says so.
"""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest

from benchmarks.vllm_servers import REPOSITORY
from prefixkv.engines.vllm import compat
from prefixkv.engines.vllm.options import OPTION_NAMES
from tests.engines.vllm.test_vllm import PYTHON


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    assert PYTHON, "PREFIXKV_ENGINE_PYTHON is the interpreter of `benchmarks env vllm`"
    done = subprocess.run(
        [PYTHON, "-m", "tests.engines.vllm.drift"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "VLLM_LOGGING_LEVEL": "ERROR"},
        timeout=900,
    )
    assert done.returncode == 0
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def test_vllm_as_it_is_has_everything(rows: list[dict[str, Any]]) -> None:
    works = rows[0]["works"]
    assert works["advertise"]
    assert works["governed"]
    assert works["rests"]
    assert works["stats"]
    assert rows[0]["lines"] == []


def test_every_name_of_the_table_is_taken_out(rows: list[dict[str, Any]]) -> None:
    names = sum(len(row.names) for row in compat.TABLE)
    owners = len({(row.module, row.owner) for row in compat.TABLE if row.owner})
    assert len(rows) == 1 + names + owners + 1


def test_what_nothing_works_without_is_refused_by_name(rows: list[dict[str, Any]]) -> None:
    for row in rows[1:-1]:
        if not row["lost"]:
            said = row.get("refused", str(row))
            assert f"vLLM {row['version']} has no " in said
            assert (row["name"] or row["owner"]) in said
            assert row["module"] in said
            assert row["why"] in said or not row["name"]


def test_what_a_feature_needs_stands_down_alone(rows: list[dict[str, Any]]) -> None:
    """And says so once. Where a name serves two features, both do."""
    off = {"POLICY": "governed", "RESTING": "rests", "METRICS": "stats", "ADDRESS": "advertise"}
    needing: dict[tuple[str, str, str], set[str]] = {}
    for row in rows[1:-1]:
        if row["lost"]:
            needing.setdefault(_key(row), set()).add(row["part"])
    seen = set()
    for row in rows[1:-1]:
        if not row["lost"] or not row["name"]:
            continue
        parts, works = needing[_key(row)], row.get("works")
        assert works, row
        assert len(row["lines"]) == len(parts)
        line = "".join(line for line in row["lines"] if row["lost"] in line)
        assert f"vLLM {row['version']} has no " in line
        assert row["name"] in line
        assert row["why"] in line
        for part, feature in off.items():
            if part == "POLICY" and part not in parts:
                continue  # the server wants none
            assert bool(works[feature]) is (part not in parts), row
        seen.add(row["part"])
    assert seen == {
        "POLICY", "ENDING", "RESTING", "WEIGHTS", "USAGE", "METRICS", "ADDRESS", "HOST_WRITES",
        "HOST_EVENTS", "NANS",
    }  # fmt: skip


def test_sleep_mode_is_refused_where_kv_would_move(rows: list[dict[str, Any]]) -> None:
    said = rows[-1]["sleep"]
    assert said.pop("supported") is False
    moved = "the KV memory cannot be released: prefixkv's connector has registered it"
    for role in ("SCHEDULER", "WORKER"):
        assert said.pop(f"cuda False {role}") == moved
        assert said.pop(f"cpu True {role}") == moved
        assert "enable_sleep_mode is True" in said.pop(f"cuda True {role}")
    assert said == {}


def test_groups_that_vllm_makes_are_taken_or_refused_by_name(rows: list[dict[str, Any]]) -> None:
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


def test_the_options_that_a_refusal_names_are_vllm_s(rows: list[dict[str, Any]]) -> None:
    named = {flag for one in OPTION_NAMES.values() for flag in re.findall(r"--[a-z-]+", one)}
    assert "--block-size" in named
    assert named <= {*rows[-1]["flags"]}


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    # What is taken out of a class is taken out of those that it is made of.
    owner = "EngineCoreProc" if row["owner"] == "EngineCore" else row["owner"]
    return row["module"], owner, row["name"]
