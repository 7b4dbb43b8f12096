"""Real clients against a real `prefixkv serve`: each finishes without an error, and the requests
and tokens that it counts are those that the front counts.

Nothing leaves the machine: what a client would ask of Hugging Face or tell its makers is turned
off, or led to a port where nothing listens.
"""

import csv
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.patience import until
from tests.support.served import Serve, at_rest

PYTHON = os.environ.get("PREFIXKV_ENGINE_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="PREFIXKV_ENGINE_PYTHON is not set")
HERE = Path(__file__).parent
LIMIT_S = 600.0  # for one run of a client
ALONE = {
    "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false",
    "OPENAI_API_KEY": "none", "NO_COLOR": "1", "PYTHONWARNINGS": "ignore",
}  # fmt: skip
# AIPerf is ten processes, which all have to begin within half a minute, and then to say something
# every few seconds.
PATIENT = {
    "AIPERF_SERVICE_REGISTRATION_TIMEOUT": "300", "AIPERF_SERVICE_START_TIMEOUT": "300",
    "AIPERF_SERVICE_PROFILE_START_TIMEOUT": "300", "AIPERF_SERVICE_COMMAND_RESPONSE_TIMEOUT": "300",
    "AIPERF_SERVICE_HEARTBEAT_MISSED_THRESHOLD": "60", "AIPERF_WORKER_STALE_TIME": "300",
    "AIPERF_ZMQ_PUSH_DRAIN_TIMEOUT": "60",
}  # fmt: skip
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True)
class Count:
    """Requests, and tokens of their prompts and answers: the front's count, or a client's."""

    requests: int
    prompt: int
    answer: int


def front(serve: Serve) -> dict[str, int]:
    """The front's counters."""
    figures = serve.figures().items()
    return {name: int(number) for name, number in figures if name.startswith("prefixkv_front_")}


@contextmanager
def counted(serve: Serve, *fine: str) -> Iterator[list[Count]]:
    """Yields a list for what the client has counted. The front has to have counted the same, and
    nothing that failed, was aborted or refused, but for counters that are fine."""
    before, told = front(serve), list[Count]()
    yield told
    (theirs,) = told

    def more() -> dict[str, int]:
        return {
            name.removeprefix("prefixkv_front_"): number - before.get(name, 0)
            for name, number in front(serve).items()
        }

    def ours() -> Count:
        now = more()
        return Count(
            now['requests_total{outcome="finished"}'],
            now['tokens_total{kind="prompt"}'], now['tokens_total{kind="answer"}'],
        )  # fmt: skip

    # A stream's client has its last event before the front has counted the request.
    until(lambda: ours().requests >= theirs.requests, state=more)
    assert ours() == theirs
    right = ('requests_total{outcome="finished"}', *fine)
    wrong = {
        name: number for name, number in more().items()
        if number and ("outcome" in name or "refused" in name) and name not in right
    }  # fmt: skip
    assert not wrong
    at_rest(serve)


def run(*command: str, home: Path, offline: bool = True, **environ: str) -> str:
    """Run a client to its end. Returns what it has printed; AssertionError if it fails."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PREFIXKV")}
    variables = {**kept, **ALONE, **(OFFLINE if offline else {}), "HOME": str(home), **environ}
    done = subprocess.run(
        command, cwd=home, env=variables, text=True, check=False, timeout=LIMIT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
    return done.stdout


def tool(name: str) -> str:
    """The command of that name in the clients' environment."""
    return str(Path(PYTHON).parent / name)


def count_of(said: str) -> Count:
    """What a script beside this file has printed last."""
    return Count(**json.loads(said.splitlines()[-1]))


# --- libraries ------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["openai", "litellm", "langchain"])
def test_library(library: str, serve: Serve, tmp_path: Path) -> None:
    """Chats and completions, whole and streamed, by calls that its users make."""
    with counted(serve) as told:
        told.append(
            count_of(run(PYTHON, str(HERE / f"with_{library}.py"), serve.url, home=tmp_path))
        )


def test_llm(serve: Serve, tmp_path: Path) -> None:
    """Its commands: a conversation that goes on, streamed and whole, and a completion, whose
    tokens it does not count."""
    model = {"model_id": "small", "model_name": "small", "api_base": serve.url}
    text = {**model, "model_id": "small-text", "completion": True}
    # YAML reads JSON.
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model, text]))
    limit = ("--key", "none", "-o", "max_tokens", "12")

    def llm(*said: str) -> str:
        return run(tool("llm"), *said, home=tmp_path, LLM_USER_PATH=str(tmp_path))

    with counted(serve) as told:
        llm("-m", "small", *limit, "Once upon a time")
        llm("-c", *limit, "--no-stream", "Go on")
        llm("-c", *limit, "And then?")
        logs = json.loads(llm("logs", "-n", "0", "--json"))
        assert [len(one["response"].split()) for one in logs] == [12] * 3
        assert len({one["conversation_id"] for one in logs}) == 1
        told.append(
            Count(
                len(logs), sum(one["input_tokens"] for one in logs),
                sum(one["output_tokens"] for one in logs),
            )
        )  # fmt: skip
    assert len(llm("-m", "small-text", "--no-stream", *limit, "Once upon a time").split()) == 12


# --- load generators ------------------------------------------------------------------------------


def test_guidellm(serve: Serve, tokenizer: Path, tmp_path: Path) -> None:
    """At its defaults: it asks for the server's health, streams chats, and has usage told along."""
    with counted(serve) as told:
        run(
            tool("guidellm"), "run", "--disable-console",
            "--backend", f"kind=openai_http,target={serve.url.removesuffix('/v1')}",
            "--profile", "kind=concurrent,streams=2",
            "--constraint", "kind=max_requests,count=6",
            "--tokenizer", f"kind=hf_auto,model={tokenizer}",
            "--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=12",
            "--output", f"kind=json,path={tmp_path / 'out.json'}",
            home=tmp_path,
        )  # fmt: skip
        (made,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
        metrics = made["metrics"]
        totals = metrics["request_totals"]
        assert totals == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
        prompt, answer = (
            metrics[f"{kind}_token_count"]["successful"]["total_sum"]
            for kind in ("prompt", "output")
        )
        told.append(Count(6, int(prompt), int(answer)))
        assert answer == 6 * 12


def aiperf(serve: Serve, tokenizer: Path, folder: Path, *options: str) -> Count:
    """Run it, and return its count of the usage, which its own count by the tokenizer has to be.

    Of a chat it counts the texts with a space between. A message has two marks more, and one begins
    the answer. (`--apply-chat-template` of version 0.13.0 counts nothing with transformers 5.)
    """
    chats = "chat" in options
    # With HF_HUB_OFFLINE=1 its version 0.13.0 takes no folder.
    run(
        tool("aiperf"), "profile", "--model", "small", "--url", serve.url.removesuffix("/v1"),
        "--tokenizer", str(tokenizer), "--ui", "none", "--streaming", "--random-seed", "1",
        "--no-server-metrics", "--no-gpu-telemetry", "--artifact-dir", str(folder / "out"),
        *options, home=folder, offline=False, **PATIENT,
    )  # fmt: skip
    lines = (folder / "out" / "profile_export.jsonl").read_text().splitlines()
    for one in (json.loads(line) for line in lines):
        figures = {name: figure["value"] for name, figure in one["metrics"].items()}
        assert not one.get("error")
        marks = 3 + 2 * one["metadata"]["turn_index"] if chats else 0
        assert figures["input_sequence_length"] + marks == figures["usage_prompt_tokens"]
        assert figures["output_sequence_length"] == figures["usage_completion_tokens"]
    total = json.loads((folder / "out" / "profile_export_aiperf.json").read_text())
    assert total["request_error_rate"]["avg"] == 0
    assert total["request_count"]["avg"] == len(lines)
    prompt, answer = (total[f"total_usage_{kind}_tokens"] for kind in ("prompt", "completion"))
    return Count(len(lines), int(prompt["avg"]), int(answer["avg"]))


def test_aiperf_in_turns(serve: Serve, tokenizer: Path, tmp_path: Path) -> None:
    with counted(serve) as told:
        told.append(
            aiperf(
                serve, tokenizer, tmp_path, "--endpoint-type", "chat",
                "--conversation-num", "3", "--conversation-turn-mean", "3",
                "--conversation-turn-stddev", "0", "--isl", "20", "--isl-stddev", "0",
                "--osl", "8", "--osl-stddev", "0", "--concurrency", "2",
                # An end is a token that its text does not show.
                "--extra-inputs", "min_tokens:8",
            )
        )  # fmt: skip
        assert (told[0].requests, told[0].answer) == (9, 9 * 8)


def test_aiperf_by_a_trace(serve: Serve, tokenizer: Path, tmp_path: Path) -> None:
    """In Mooncake's format: prompts of blocks that several requests begin with."""
    trace = tmp_path / "trace.jsonl"
    with trace.open("w") as lines:
        for turn in range(6):
            ids = [turn % 2 * 10 + at for at in range(2 + turn // 2)]
            entry = {"timestamp": 500 * turn, "input_length": 64 * len(ids), "output_length": 6}
            lines.write(json.dumps({**entry, "hash_ids": ids}) + "\n")

    def spared() -> float:
        """Tokens that decode had, and requests that joined another's flight, where that one was not
        over after a second."""
        flights = serve.figures("decode-0")['prefixkv_shared_flights_total{node="decode-0"}']
        return front(serve)['prefixkv_front_tokens_total{kind="decode_hit"}'] + flights

    before = spared()
    with counted(serve) as told:
        told.append(
            aiperf(
                serve, tokenizer, tmp_path, "--endpoint-type", "completions",
                "--input-file", str(trace), "--custom-dataset-type", "mooncake_trace",
                "--isl-block-size", "64", "--fixed-schedule", "--extra-inputs", "min_tokens:6",
            )
        )  # fmt: skip
    assert told == [Count(6, 64 * (2 + 2 + 3 + 3 + 4 + 4), 6 * 6)]
    assert spared() > before


def test_locust(serve: Serve, tmp_path: Path) -> None:
    """Three users, each of which chats four times, streamed and whole, and then leaves."""
    with counted(serve) as told:
        run(
            tool("locust"), "-f", str(HERE / "with_locust.py"), "--headless", "--users", "3",
            "--spawn-rate", "3", "--only-summary", "--csv", str(tmp_path / "out"),
            "--host", serve.url, home=tmp_path, USAGE=str(tmp_path / "usage.json"),
            STATS=str(tmp_path / "out_stats.csv"),
        )  # fmt: skip
        with (tmp_path / "out_stats.csv").open() as lines:
            (total,) = [row for row in csv.DictReader(lines) if row["Name"] == "Aggregated"]
        assert (total["Request Count"], total["Failure Count"]) == ("12", "0")
        told.append(Count(**json.loads((tmp_path / "usage.json").read_text())))
