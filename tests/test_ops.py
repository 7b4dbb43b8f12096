"""docs/ops: files for Prometheus and Grafana are well-formed, and say where to read on.
That a running server has what they name: tests/engines/serving/test_operators.py."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.models.promtool import OPS, promtool

OPERATE = (OPS.parent / "operate.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^#+ (.+)$", OPERATE, re.MULTILINE)


def anchor(heading: str) -> str:
    """The fragment of a heading's address, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((OPS / "prometheus-alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((OPS / "grafana-dashboard.json").read_text())["panels"]
    return found


def test_every_alert_says_what_it_is_and_what_to_do() -> None:
    anchors = {anchor(heading) for heading in HEADINGS}
    assert len({rule["alert"] for rule in rules()}) == len(rules()) > 10
    for rule in rules():
        said = rule["annotations"]
        assert said.keys() == {"summary", "description", "runbook"}, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        page, _, fragment = said["runbook"].partition("#")
        assert page == "docs/operate.md"
        assert fragment in anchors, rule["alert"]


def test_at_least_three_alerts_are_played_through() -> None:
    played = yaml.safe_load((OPS / "prometheus-alerts-test.yml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in played
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert len(fired) >= 3
    assert fired <= {rule["alert"] for rule in rules()}


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "prometheus-alerts.yml"),
        ("test", "rules", "prometheus-alerts-test.yml"),
        ("check", "config", "prometheus.yml"),
    ],
    ids=" ".join,
)
def test_promtool_finds_nothing_wrong(arguments: tuple[str, ...]) -> None:
    assert "SUCCESS" in promtool(*arguments)


def test_panels_lie_beside_each_other_and_say_what_they_show() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith(".") or panel["description"].endswith('".')
        assert panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        for quoted in re.findall(r'operate\.md, "([^"]+)"', panel["description"]):
            assert quoted in HEADINGS, panel["title"]
    assert len({panel["id"] for panel in panels()}) == len(panels()) > 20
