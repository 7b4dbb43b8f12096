"""What an operator of `prefixkv serve` looks at, from real processes: metrics of each, the
targets for Prometheus, a line of each request from each process, and dashboard and alerts that name
what there is."""

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import openai
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.patience import PATIENCE_S, until
from tests.support.processes import lines_of
from tests.support.promtool import OPS, promtool
from tests.support.served import Serve, Served, client_of, get, greedy

WORKERS = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
ADDED = {"job", "instance"}
"""Labels that Prometheus adds itself."""

Labels = dict[str, set[str]]


def text_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        found: str = answer.read().decode()
        return found


def post(url: str, body: Any, **headers: str) -> tuple[int, Any]:
    """Status and JSON of the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def labels_of(text: str) -> dict[str, Labels]:
    """Values of each label by the names of an exposition's samples."""
    found: dict[str, Labels] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                values.setdefault(label, set()).add(value)
    return found


def lines_by_id(path: Path, request_id: str, num: int) -> list[dict[str, Any]]:
    """All lines of one request, once there are `num`."""

    def found() -> list[dict[str, Any]]:
        return [line for line in lines_of(path) if line["id"] == request_id]

    until(lambda: len(found()) >= num, state=lambda: path.read_text()[-4000:])
    assert len(found()) == num
    return found()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def serve(log: Path) -> Iterator[Serve]:
    with Serve("--decode", "2", "--chunk-tokens", "64", "--request-log", str(log)) as serve:
        yield serve


@pytest.fixture(scope="module")
def client(serve: Serve) -> Iterator[openai.OpenAI]:
    with client_of(serve) as client:
        yield client


@pytest.fixture(scope="module")
def proxy() -> Iterator[Served]:
    """One whose servers are not there: what it counts is."""
    servers = ("--prefill", "http://127.0.0.1:1=tcp://127.0.0.1:2", "--decode",
               "http://127.0.0.1:1=d")  # fmt: skip
    with Served("proxy", "--port", "0", "--status-port", "0", *servers) as proxy:
        words = proxy.line("http://").split()
        proxy.url, proxy.status = words[0], words[-1].rstrip(")")  # type: ignore[attr-defined]
        yield proxy


@pytest.fixture(scope="module")
def exposed(serve: Serve, client: openai.OpenAI, proxy: Served) -> dict[str, Labels]:
    """Labels and values by metric of a server, and a proxy, that have met one of each thing."""
    for _ in range(2):
        client.completions.create(
            model="small", prompt="Tell me of cats and boats, at length.", max_tokens=8
        )
    assert post(f"{serve.url}/completions", b"{}")[0] == 400
    assert post(f"{serve.url}/completions", {"model": "other", "prompt": "a"})[0] == 404
    worker = serve.workers()["decode-0"]
    assert post(f"{worker['url']}/generate", b"{}")[0] == 401
    assert post(f"{proxy.url}/completions", {"prompt": "a"})[0] in (502, 503)  # type: ignore[attr-defined]
    assert post(f"{proxy.url}/completions", b"{}")[0] == 400  # type: ignore[attr-defined]
    found = labels_of(text_of(f"{proxy.status}/metrics"))  # type: ignore[attr-defined]
    # As Prometheus has it: each process with the labels of its target.
    for target in get(f"{serve.status}/sd")[1]:
        (address,) = target["targets"]
        for name, labels in labels_of(text_of(f"http://{address}/metrics")).items():
            known = found.setdefault(name, {})
            for label, values in labels.items():
                known.setdefault(label, set()).update(values)
            for label, value in target["labels"].items():
                known.setdefault(label, set()).add(value)
    return found


# --- metrics --------------------------------------------------------------------------------------


def test_each_process_has_its_own_metrics(serve: Serve, exposed: dict[str, Labels]) -> None:
    assert exposed["prefixkv_pages"]["worker"] == WORKERS.keys()
    assert not any(
        "node" in labels for labels in labels_of(text_of(f"{serve.status}/metrics")).values()
    )
    for worker in ("", *WORKERS):
        status = serve.workers()[worker]["status_url"] if worker else serve.status
        promtool("check", "metrics", given=text_of(f"{status}/metrics"))


def test_a_worker_that_is_killed_stays_a_target_and_is_back_at_another_port(guarded: Serve) -> None:
    before = guarded.workers()["decode-0"]
    old = before["status_url"].removeprefix("http://")

    def target() -> str:
        targets = get(f"{guarded.status}/sd")[1]
        (found,) = (one["targets"][0] for one in targets if one["labels"]["worker"] == "decode-0")
        return str(found)

    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: guarded.workers().get("decode-0", before)["pid"] != before["pid"], step=target)
    after = guarded.workers()["decode-0"]
    assert target() == after["status_url"].removeprefix("http://") != old


# --- the request log ------------------------------------------------------------------------------


def test_a_request_has_lines_of_one_id_from_front_decode_and_prefill(
    client: openai.OpenAI, log: Path
) -> None:
    chat = [{"role": "user", "content": "Tell me of salt and of stones."}]
    made = greedy(client, chat, 6, extra_headers={"x-request-id": "of-the-client"})
    lines = {line["side"]: line for line in lines_by_id(log, made.id.removeprefix("chatcmpl-"), 3)}
    front, decode, prefill = (lines[side] for side in ("front", "decode", "prefill"))
    assert front["outcome"] == decode["outcome"] == "finished"
    assert prefill["outcome"] == "sent"
    assert (front["decode"], front["prefill"]) == (decode["node"], prefill["node"])
    assert front["request_id"] == "of-the-client"
    assert (front["status"], front["reason"], front["attempts"]) == (200, None, 1)
    usage = made.usage
    assert usage is not None
    assert front["prompt_tokens"] == decode["prompt_tokens"] == usage.prompt_tokens
    assert front["output_tokens"] == decode["output_tokens"] == 6
    assert front["decode_hit_tokens"] == decode["hit_tokens"]
    assert front["prefill_hit_tokens"] == prefill["hit_tokens"]
    assert prefill["sent_bytes"] > 0
    assert (decode["room"], decode["generation"]) == (prefill["room"], prefill["generation"])
    for line, names in (
        (front, ("asked_s", "first_token_s", "ended_s")),
        (decode, ("admitted_s", "transferred_s", "first_token_s", "ended_s")),
        (prefill, ("promised_s", "started_s", "computed_s", "ended_s")),
    ):
        times = [line[name] for name in names]
        assert times == sorted(times), line
    # Each arrives after the one that sends it, and the front ends last. Decode and prefill reckon
    # back from their end by a clock that is never set; the wall clock may be, by some milliseconds.
    set_s = 0.05
    assert front["arrived_at"] <= decode["arrived_at"] + set_s
    assert decode["arrived_at"] <= prefill["arrived_at"] + set_s


def test_all_prompts_of_a_request_have_its_id(client: openai.OpenAI, log: Path) -> None:
    made = client.completions.create(
        model="small", prompt=["Rain.", "Salt and stones."], n=2, max_tokens=2, temperature=0,
        extra_headers={"x-request-id": "two/prompts#3"},
    )  # fmt: skip
    lines = lines_by_id(log, made.id.removeprefix("cmpl-"), 1 + 4 + 4)
    assert [line["side"] for line in lines].count("prefill") == 4
    (front,) = (line for line in lines if line["side"] == "front")
    assert (front["prompts"], front["samples"], front["attempts"]) == (2, 2, 2)
    assert front["request_id"] == "two/prompts#3"
    assert front["id"].startswith("two%2Fprompts#3-")
    decode = [line for line in lines if line["side"] == "decode"]
    assert sum(line["prompt_tokens"] for line in decode) == 2 * front["prompt_tokens"]
    assert len({line["rid"] for line in decode}) == 4


# --- dashboard and alerts -------------------------------------------------------------------------

OPEN = {"status", "reason", "namespace", "peer", "prefill", "worker"}
"""Labels whose values a test cannot bring about one by one."""
FREE = {"up": {"worker": set(), "role": set()}}
"""Metrics of Prometheus itself."""
SELECTOR = re.compile(r"\b(prefixkv_\w+|up)\b(?:\{(.*?)\})?")


def queries() -> list[tuple[str, str, str]]:
    """(where, expression, texts that name labels) of each panel and rule."""
    panels = json.loads((OPS / "grafana-dashboard.json").read_text())["panels"]
    found = [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in panels
        for target in panel.get("targets", ())
    ]
    for group in yaml.safe_load((OPS / "prometheus-alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            found.append((rule["alert"], rule["expr"], " ".join(rule["annotations"].values())))
    return found


def wrong(expr: str, texts: str, exposed: dict[str, Labels]) -> list[str]:
    """What an expression names, or a text shows, that is not there."""
    found, there = [], {*ADDED}
    for name, matchers in SELECTOR.findall(expr):
        labels = exposed.get(name)
        if labels is None:
            found.append(f"no metric {name}")
            continue
        there |= labels.keys()
        for label, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"(.*?)"', matchers):
            if label not in labels.keys() | ADDED:
                found.append(f"{name} has no label {label}")
            elif operator == "=" and label not in OPEN | ADDED and value not in labels[label]:
                found.append(f"{name} has no {label}={value!r}")
    groups = re.findall(r"\b(?:by|on) ?\((.*?)\)", expr)
    named = {label.strip() for group in groups for label in group.split(",")}
    shown = named if "by (" in expr else there
    found += [f"by {label}, which is no label" for label in named - there]
    texts_show = re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)", texts)
    return found + [f"{{{{{name}}}}} is no label" for name in texts_show if name not in shown]


@pytest.mark.parametrize(("where", "expr", "texts"), queries(), ids=lambda text: text[:40])
def test_what_dashboard_and_alerts_name_is_there(
    where: str, expr: str, texts: str, exposed: dict[str, Labels]
) -> None:
    assert SELECTOR.search(expr), where
    assert not wrong(expr, texts, {**FREE, **exposed}), where
