"""Dynamo's services as processes, and what is asked of them over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prefixkv.threads import Closing
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port


class Process(Closing):
    """One that is ended with the `with` that it lives in."""

    def __init__(self, command: list[str], log: Path, **more: Any) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stderr=file, text=True, **more)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class NotStartedError(Exception):
    """The service did not come up: its environment's fault, not ours."""


class Service(Process):
    """`python -m dynamo.KIND`, once it answers."""

    def __init__(self, python: str, kind: str, folder: Path) -> None:
        self.port = free_port()
        super().__init__(
            [python, "-m", f"dynamo.{kind}", "--port", str(self.port), "--threads", "2"],
            folder / f"{kind}.log",
            stdout=subprocess.DEVNULL,
            env={**os.environ, "DYN_LOG": "info"},
        )
        end_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.get("/health")
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end_s:
                    self.close()
                    raise NotStartedError(self.log.read_text()[-2000:]) from None
                time.sleep(0.1)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE_S
        ) as answer:
            return json.load(answer) if path != "/health" else answer.status

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from None


class Indexer(Service):
    def __init__(self, python: str, folder: Path) -> None:
        super().__init__(python, "indexer", folder)

    def register(self, number: int, where: dict[str, str], block_size: int) -> None:
        self.post(
            "/register",
            {
                "instance_id": number,
                "endpoint": where["endpoint"],
                "replay_endpoint": where["replay"],
                "model_name": "model",
                "block_size": block_size,
            },
        )

    def found(self, prompt: dict[str, Any]) -> dict[str, int]:
        """Tokens of the prompt that each worker holds, as far as the indexer knows."""
        scores = self.post("/query", _asked(prompt))["scores"]
        return {worker: ranks["0"] for worker, ranks in scores.items() if ranks["0"]}


class Selector(Service):
    def __init__(self, python: str, folder: Path) -> None:
        super().__init__(python, "select_service", folder)

    def register(self, number: int, where: dict[str, str], block_size: int) -> None:
        self.post(
            "/workers",
            {
                "worker_id": number,
                "endpoint": f"http://127.0.0.1:{number}",
                "kv_events_endpoint": where["endpoint"],
                "replay_endpoint": where["replay"],
                "model_name": "model",
                "block_size": block_size,
            },
        )

    def found(self, prompt: dict[str, Any]) -> dict[str, int]:
        answer = self.post("/overlap_scores", _asked(prompt))
        size = answer["block_size"]
        held = {str(one["worker_id"]): one["device_blocks"] * size for one in answer["workers"]}
        return {worker: num_tokens for worker, num_tokens in held.items() if num_tokens}

    def select(self, prompt: dict[str, Any]) -> Any:
        """Which worker it would choose."""
        return self.post("/select", _asked(prompt))


def _asked(prompt: dict[str, Any]) -> dict[str, Any]:
    names = {"lora_name": prompt["lora"], "cache_salt": prompt["salt"]}
    given = {name: value for name, value in names.items() if value}
    return {"token_ids": prompt["tokens"], "model_name": "model", **given}
