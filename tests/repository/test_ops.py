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


BUILT_IN = {"__rate_interval", "__range"}  # variables that every dashboard has
WORDS = {
    "type": {"row", "stat", "timeseries"},
    "fieldConfig.defaults.custom.lineInterpolation": {
        "linear",
        "smooth",
        "stepBefore",
        "stepAfter",
    },
    "fieldConfig.defaults.custom.showPoints": {"auto", "never", "always"},
    "fieldConfig.defaults.custom.stacking.mode": {"none", "normal", "percent"},
    "fieldConfig.defaults.mappings.type": {"value", "range", "regex", "special"},
    "fieldConfig.defaults.thresholds.mode": {"absolute", "percentage"},
    "options.colorMode": {"none", "value", "background", "background_solid"},
    "options.graphMode": {"none", "area"},
    "options.legend.calcs": {"lastNotNull", "last", "max", "min", "mean", "sum"},
    "options.legend.displayMode": {"list", "table", "hidden"},
    "options.legend.placement": {"bottom", "right"},
    "options.reduceOptions.calcs": {"lastNotNull", "last", "max", "min", "mean", "sum"},
    "options.textMode": {"auto", "value", "value_and_name", "name", "none"},
    "options.tooltip.mode": {"single", "multi", "none"},
    "options.tooltip.sort": {"none", "asc", "desc"},
}
"""What Grafana's model of a dashboard (the classic one) has for these keys; it shows nothing, or
its default, for another word."""


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every value of a panel, with its keys. Lists are looked through."""
    if isinstance(value, dict):
        return [leaf for key, one in value.items() for leaf in leaves(one, f"{path}.{key}")]
    if isinstance(value, list):
        return [leaf for one in value for leaf in leaves(one, path)]
    return [(path.removeprefix("."), value)]


def test_the_dashboard_says_no_word_that_grafana_does_not_know() -> None:
    met = set()
    for panel in panels():
        for path, value in leaves(panel):
            if path in WORDS:
                met.add(path)
                assert value in WORDS[path], (panel["title"], path)
        steps = panel.get("fieldConfig", {}).get("defaults", {}).get("thresholds", {}).get("steps")
        if steps:  # the first is the colour below all others, which rise
            values = [step["value"] for step in steps]
            assert values[0] is None, panel["title"]
            assert values[1:] == sorted(values[1:]), panel["title"]
    assert met == WORDS.keys()


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


def test_rows_are_as_wide_as_the_dashboard_and_what_is_below_them_has_no_gap() -> None:
    at = [panel["gridPos"] for panel in panels()]
    for panel in panels():
        if panel["type"] == "row":
            assert (panel["gridPos"]["x"], panel["gridPos"]["w"], panel["gridPos"]["h"]) == (
                0,
                24,
                1,
            )
            assert (panel["collapsed"], panel["panels"]) == (False, [])
    for one in at:
        above = {
            x for other in at if other["y"] + other["h"] == one["y"]
            for x in range(other["x"], other["x"] + other["w"])
        }  # fmt: skip
        assert one["y"] == 0 or set(range(one["x"], one["x"] + one["w"])) <= above, one


def test_a_panels_unit_is_that_of_its_metrics() -> None:
    for panel, target in targets():
        expr, unit = target["expr"], panel["fieldConfig"]["defaults"]["unit"]
        is_rate = "rate(" in expr
        if " / " in expr:
            fitting = {"percentunit"}
        elif "_bytes" in expr:
            fitting = {"Bps" if is_rate else "bytes"}
        elif "_seconds" in expr:
            fitting = {"s"}
        else:
            fitting = {"reqps", "ops", "short"} if is_rate else {"short"}
        assert unit in fitting, (panel["title"], expr)
        if unit == "reqps":
            assert re.search(r"_(requests|refused|cut|recomputed)_total", expr), expr


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
