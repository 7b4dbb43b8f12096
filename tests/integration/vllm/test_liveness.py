"""Every order of arrival at two vLLM servers with small caches, with vLLM's real scheduler and
without a model (`liveness/`): each request ends without a timer, and nothing is left behind.

What fails prints a case, which `liveness/explore.py --case` plays again. The same module explores
for as long as it is told to.
"""

import json
from typing import Any

import pytest

from tests.integration.vllm.test_drift import told


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What the short profile says: less than a minute of one core."""
    done = told("liveness.explore")
    print(done.stdout)  # pytest shows it where a test fails
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def test_every_request_ends_and_leaves_nothing_behind(results: list[dict[str, Any]]) -> None:
    explored = results[0]
    assert explored["failures"] == 0
    assert explored["cases"] > 600
    assert explored["repeatable"]
    for both in ("loaded, and might be computed", "computed, and might be loaded"):
        assert explored[both] > 10
    # Of host memory: loads, some beside a room, that end well, fail, or lose their client.
    assert explored["host loads"] > 40
    assert explored["host writes"] > 400
    for one in ("host loads beside a room", "host copies failed", "left in a host load"):
        assert explored[one] > 3


def test_each_mutant_is_found(results: list[dict[str, Any]]) -> None:
    """The order of 0.1 among them, in both forms in which it stood still."""
    mutants = {result["mutant"]: result for result in results[1:]}
    assert len(mutants) == 16 + 8 + 4 + 4
    assert [name for name, result in mutants.items() if not result["found"]] == []
    old = mutants["old_order"]
    assert old["cases"] == 2
    assert "a deadlock" in old["failure"]
