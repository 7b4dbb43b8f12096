"""docs/ops: files for Prometheus and Grafana are well-formed, and say where to read on.
That a running server has what they name: tests/integration/serving/test_operators.py."""

import contextlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.support.patience import until
from tests.support.promtool import OPS, promtool
from tests.support.served import Served, get

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


def test_the_unit_is_well_formed(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    program = tmp_path / "prefixkv"
    program.touch(mode=0o755)
    text = (
        (OPS / "prefixkv@.service").read_text().replace("/opt/prefixkv/bin/prefixkv", str(program))
    )
    unit = tmp_path / "prefixkv@prefill.service"
    unit.write_text(text.replace("User=prefixkv\n", ""))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", "--man=no", unit],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert str(unit.name) not in checked.stderr, checked.stderr
    assert checked.returncode == 0, checked.stderr


ADDRESSES = {"prefill-0": "127.0.0.2", "decode-0": "127.0.0.3", "decode-1": "127.0.0.4"}


@pytest.mark.slow
def test_the_commands_of_the_manifests_serve(tmp_path: Path) -> None:
    """Without containers: pods are loopback addresses. Keys, ports and API keys are as there."""
    documents = list(yaml.safe_load_all((OPS / "kubernetes.yaml").read_text()))
    containers = {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]["containers"][0]
        for one in documents
        if one["kind"] != "Service"
    }
    replicas = {one["metadata"]["name"]: one["spec"].get("replicas", 1) for one in documents}
    keys = {"clients": "a key", "workers": "another key"}

    def start(pod: str, kind: str, address: str) -> Served:
        container = containers[kind]
        texts = {"$(POD_NAME)": pod, "$(POD_IP)": address, "/keys": str(tmp_path / "keys")}
        texts |= {f"{name}.{name[:-2]}": ip for name, ip in ADDRESSES.items()} | {"eth0": "lo"}
        arguments = []
        for argument in container["args"]:
            for name, text in texts.items():
                argument = argument.replace(name, text)
            arguments.append(argument)
        environ = {
            one["name"]: keys[one["valueFrom"]["secretKeyRef"]["key"]]
            for one in container["env"]
            if "secretKeyRef" in one["valueFrom"]
        }
        return Served(*arguments, "--threads=1" if kind != "front" else "--port=8000", **environ)

    pods = [
        (f"{kind}-{at}", kind) for kind in ("prefill", "decode") for at in range(replicas[kind])
    ]
    assert [pod for pod, _ in pods] == list(ADDRESSES)
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(
            Served("keys", "decode-0", "decode-1", "--folder", str(tmp_path / "keys"))
        )
        made.line("In each file")
        workers = [stack.enter_context(start(pod, kind, ADDRESSES[pod])) for pod, kind in pods]
        front = stack.enter_context(start("front", "front", "127.0.0.5"))
        for worker in workers:
            worker.line("ready ")

        def is_ready() -> bool:
            with contextlib.suppress(OSError):
                return get("http://127.0.0.5:8001/health")[0] == 200
            return False

        until(is_ready, state=front.shown)
        client = openai.OpenAI(base_url="http://127.0.0.5:8000/v1", api_key=keys["clients"])
        prompt = list(range(200))
        answers = [
            client.completions.create(model="small", prompt=prompt, max_tokens=4, temperature=0)
            for _ in range(2)
        ]
        assert answers[0].choices[0].text == answers[1].choices[0].text
