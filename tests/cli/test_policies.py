"""Eviction policies with settings, on the command line."""

from __future__ import annotations

import json

import pytest

from prefixkv.cli.policies import policy_of
from prefixkv.cli.replay import replay
from prefixkv.errors import ConfigError


def test_a_name_alone_has_the_default_settings() -> None:
    assert policy_of("lru").name == "lru"
    assert policy_of("gated").fresh_s == 180.0


def test_settings_reach_the_object() -> None:
    policy = policy_of("adaptive:trust=5:half_life_s=600.5:ghosts=0")
    assert (policy.trust, policy.half_life_s, policy.ghosts) == (5, 600.5, 0)
    assert policy_of("priority:ttl_s=3").ttl_s == 3


@pytest.mark.parametrize(
    "text", ["newest", "lru:trust=5", "adaptive:tust=5", "adaptive:trust=x", "adaptive:trust",
             "adaptive:trust=0", "adaptive:period=1.5", ""],
)  # fmt: skip
def test_what_is_wrong_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        policy_of(text)


def test_the_replay_tells_settings_apart(tmp_path) -> None:
    """Two sessions by turns, in a pool for one: by time-outs of nothing the newest stays."""
    path, out = tmp_path / "t.jsonl", tmp_path / "out.json"
    lines = []
    for turn in range(30):
        ids = [100 * (turn % 3), 100 * (turn % 3) + 1, 1000 + turn]
        entry = {"timestamp": 2000 * turn, "input_length": 1536, "output_length": 1}
        lines.append(json.dumps(entry | {"hash_ids": ids}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    names = "gated:fresh_s=0:known_s=0,gated"
    replay([path], policy=names, capacity="5", json_file=out)
    rows = json.loads(out.read_text(encoding="utf-8"))
    found = {row["policy"]: row["hit_tokens"] for row in rows if row["capacity_blocks"] == 5}
    assert set(found) == set(names.split(","))
    assert found["gated"] != found["gated:fresh_s=0:known_s=0"]
