"""The soak finds what grows, and does not take what is merely there for growth."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak
from benchmarks.__main__ import run


@pytest.mark.slow
def test_a_short_soak_comes_to_rest_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    options = ["--rooms", "120", "--every", "40", "--restart-every", "50", "--json", str(path)]
    status = run(["soak", *options])
    written = json.loads(path.read_text())
    recipe, samples = written["recipe"], written["rows"]
    assert status == (0 if recipe["verdict"]["flat"] else 1)
    assert [sample["rooms"] for sample in samples] == [40, 80, 120]
    assert sum(recipe["plans"].values()) == 120
    assert recipe["outcomes_here"]["decode: well"] > 0
    assert any(name.startswith("transport ") for name in samples[0]["containers"])
    assert samples[0]["objects"]["prefixkv.runtime.decode_node.DecodeNode"] == 1


def sample(
    rooms: int, rss: int = 10**8, size: int = 3, threads: int = 8, objects: int = 5
) -> dict[str, Any]:
    return {
        "rooms": rooms, "rss_bytes": rss, "descriptors": 50, "threads": threads,
        "containers": {"decode._rooms": size}, "objects": {"prefixkv.X": objects},
    }  # fmt: skip


def test_what_grows_only_while_it_warms_up_is_flat() -> None:
    first = sample(0, rss=10**7, size=0)
    assert soak.verdict([first, *(sample(rooms) for rooms in range(10_000, 100_000, 10_000))])[
        "flat"
    ]


@pytest.mark.parametrize("what", ["rss", "size", "threads", "objects"])
def test_what_goes_on_growing_is_not(what: str) -> None:
    start = {"rss": 10**8, "size": 3, "threads": 8, "objects": 5}[what]
    step = 21 * 10_000 if what == "rss" else 10
    samples = [sample(n * 10_000, **{what: start + n * step}) for n in range(10)]
    assert not soak.verdict(samples)["flat"]
