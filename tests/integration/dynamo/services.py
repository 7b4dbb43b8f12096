"""Dynamo's services as processes, and what is asked of them over HTTP."""

import subprocess
from pathlib import Path
from typing import Any

from benchmarks.servers import NotStartedError as NotStartedError
from benchmarks.servers import Server
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


class Service(Server):
    """`python -m dynamo.KIND`, once it answers. Raises NotStartedError."""

    def __init__(self, python: str, kind: str, folder: Path) -> None:
        port = free_port()
        command = [python, "-m", f"dynamo.{kind}", "--port", str(port), "--threads", "2"]
        super().__init__(command, folder / f"{kind}.log", port, {"DYN_LOG": "info"})
        try:
            self.wait(PATIENCE_S)
        except NotStartedError:
            self.close()
            raise


class Indexer(Service):
    def __init__(self, python: str, folder: Path) -> None:
        super().__init__(python, "indexer", folder)

    def register(self, number: int, where: dict[str, str], block_size: int) -> None:
        place = {"endpoint": where["endpoint"], "replay_endpoint": where["replay"]}
        self.post("/register", {"instance_id": number, **place, **_model(block_size)})

    def found(self, prompt: dict[str, Any]) -> dict[str, int]:
        """Tokens of the prompt that each worker holds, as far as the indexer knows."""
        scores = self.post("/query", _asked(prompt))["scores"]
        return {worker: ranks["0"] for worker, ranks in scores.items() if ranks["0"]}


class Selector(Service):
    def __init__(self, python: str, folder: Path) -> None:
        super().__init__(python, "select_service", folder)

    def register(self, number: int, where: dict[str, str], block_size: int) -> None:
        place = {
            "endpoint": f"http://127.0.0.1:{number}", "kv_events_endpoint": where["endpoint"],
            "replay_endpoint": where["replay"],
        }  # fmt: skip
        self.post("/workers", {"worker_id": number, **place, **_model(block_size)})

    def found(self, prompt: dict[str, Any]) -> dict[str, int]:
        answer = self.post("/overlap_scores", _asked(prompt))
        size = answer["block_size"]
        held = {str(one["worker_id"]): one["device_blocks"] * size for one in answer["workers"]}
        return {worker: num_tokens for worker, num_tokens in held.items() if num_tokens}

    def select(self, prompt: dict[str, Any]) -> Any:
        """Which worker it would choose."""
        return self.post("/select", _asked(prompt))


def _model(block_size: int) -> dict[str, Any]:
    return {"model_name": "model", "block_size": block_size}


def _asked(prompt: dict[str, Any]) -> dict[str, Any]:
    names = {"lora_name": prompt["lora"], "cache_salt": prompt["salt"]}
    given = {name: value for name, value in names.items() if value}
    return {"token_ids": prompt["tokens"], "model_name": "model", **given}
