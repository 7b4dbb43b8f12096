"""docs/ops: files for Prometheus and Grafana are well-formed, and say where to read on.
That a running server has what they name: tests/integration/serving/test_operators.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.promtool import OPS, promtool

OPERATE = (OPS.parent / "operate.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^#+ (.+)$", OPERATE, re.MULTILINE)


def anchor(heading: str) -> str:
    """The fragment of a heading's address, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((OPS / "prometheus-alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((OPS / "grafana-dashboard.json").read_text())
    return found


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = dashboard()["panels"]
    return found


def targets() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each query, with its panel."""
    return [(panel, target) for panel in panels() for target in panel.get("targets", ())]


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


BUILT_IN = {"__rate_interval", "__range"}  # variables that every dashboard has


def test_every_variable_that_is_used_is_there() -> None:
    variables = {one["name"]: one for one in dashboard()["templating"]["list"]}
    (source,) = (name for name, one in variables.items() if one["type"] == "datasource")
    from_here = {"type": "prometheus", "uid": f"${{{source}}}"}
    assert variables[source]["query"] == "prometheus"
    used = set()
    for panel, target in targets():
        assert panel["datasource"] == target["datasource"] == from_here, panel["title"]
        used |= set(re.findall(r"\$(\w+)", target["expr"]))
        assert "${" not in target["expr"]
    assert used - BUILT_IN == {
        name for name, one in variables.items() if one["type"] != "datasource"
    }  # fmt: skip
    for name in used - BUILT_IN:
        one = variables[name]
        assert one["datasource"] == from_here
        assert re.fullmatch(r"label_values\(prefixkv_\w+, \w+\)", one["query"]["query"])
        # Several may be chosen, or all: only a pattern takes them.
        assert one["multi"]
        assert one["includeAll"]
        for panel, target in targets():
            found = re.findall(rf"\w+(\W+)\${name}", target["expr"])
            assert set(found) <= {'=~"'}, panel["title"]


def test_promtool_reads_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = []
    for number, (_, target) in enumerate(targets()):
        expr = target["expr"]
        for name, text in (("__rate_interval", "5m"), ("__range", "1h"), ("worker", "a|b")):
            expr = expr.replace(f"${name}", text)
        rules.append({"record": f"panel:{number}", "expr": expr})
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"SUCCESS: {len(rules)} rules found" in promtool("check", "rules", str(file))
