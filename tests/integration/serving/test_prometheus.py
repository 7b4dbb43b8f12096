"""A real Prometheus before a real `prefixkv serve`: it takes the targets of `/sd`, and answers all
queries of the dashboard and of the alerts."""

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from tests.support.patience import PATIENCE_S, until
from tests.support.ports import free_port
from tests.support.processes import Command
from tests.support.promtool import OPS
from tests.support.served import Serve, client_of

NOT_HERE = ("prefixkv_proxy_", "prefixkv_worker_refused")  # no proxy, and no worker refuses


class Prometheus(Command):
    """Prometheus on a free port, with the configuration of docs/ops."""

    def __init__(self, folder: Path, status: str) -> None:
        program = shutil.which("prometheus")
        if program is None:
            pytest.skip("Prometheus is not installed: apt-get install prometheus")
        config = yaml.safe_load((OPS / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(OPS / "prometheus-alerts.yml")]
        (job,) = config["scrape_configs"]
        job["http_sd_configs"] = [{"url": f"{status}/sd", "refresh_interval": "1s"}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/api/v1"
        super().__init__(
            program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        )  # fmt: skip

    def ask(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of its API. AssertionError where it says that it has none."""
        url = f"{self.url}/{path}?{urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return said["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("query", query=expr)["result"]
        return found

    def targets(self) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = self.ask("targets")["activeTargets"]
        except OSError:  # it does not listen yet
            return []
        return found


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    log = tmp_path_factory.mktemp("log") / "requests.jsonl"
    with Serve("--request-log", str(log)) as serve:
        yield serve


@pytest.fixture(scope="module")
def prometheus(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has seen some requests come: rates are above 0."""
    with Prometheus(tmp_path_factory.mktemp("prometheus"), serve.status) as prometheus:
        until(
            lambda: (
                {one["health"] for one in prometheus.targets()} == {"up"}
                and len(prometheus.targets()) == 3
            ),
            state=lambda: f"{prometheus.targets()}\n{prometheus.shown()}",
        )
        with client_of(serve) as client:

            def ask() -> None:
                client.completions.create(model="small", prompt="Tell me of cats.", max_tokens=4)

            seen = 'sum(rate(prefixkv_front_requests_total{job="prefixkv",outcome="finished"}[1m]))'
            until(lambda: float(prometheus.query(f"{seen} or vector(0)")[0]["value"][1]) > 0,
                  step=ask, pause_s=0.2)  # fmt: skip
            with pytest.raises(Exception, match="no model"):
                client.completions.create(model="other", prompt="a")
            refused = 'prefixkv_front_refused_total{job="prefixkv"}'
            until(lambda: len(prometheus.query(f"rate({refused}[1m])")) > 0)
        yield prometheus


def test_the_targets_of_sd_are_all_processes_with_their_labels(
    serve: Serve, prometheus: Prometheus
) -> None:
    found = {one["labels"]["worker"]: one for one in prometheus.targets()}
    assert {name: one["labels"]["role"] for name, one in found.items()} == {
        "front": "front", "prefill-0": "prefill", "decode-0": "decode",
    }  # fmt: skip
    assert found["front"]["scrapeUrl"] == f"{serve.status}/metrics"
    for name, info in serve.workers().items():
        assert found[name]["scrapeUrl"] == f"{info['status_url']}/metrics"


def test_every_panel_has_something_to_show(prometheus: Prometheus) -> None:
    for panel in json.loads((OPS / "grafana-dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"]
            for name, text in (("$__rate_interval", "1m"), ("$__range", "1h"), ("$worker", ".*")):
                expr = expr.replace(name, text)
            rows, where = prometheus.query(expr), f"{panel['title']}: {expr}"
            if not rows and not any(name in expr for name in NOT_HERE):
                until(lambda expr=expr: prometheus.query(expr), state=lambda where=where: where,
                      pause_s=0.2)  # fmt: skip


def test_prometheus_evaluates_every_alert_and_none_fires(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        groups = prometheus.ask("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    until(lambda: {rule["health"] for rule in rules()} == {"ok"}, state=rules)
    assert len(rules()) > 10
    assert {rule["name"] for rule in rules() if rule["state"] == "firing"} == set()
