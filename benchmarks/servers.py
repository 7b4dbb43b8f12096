"""Servers of HTTP as processes: for the benchmarks and the integration tests of vLLM and SGLang."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefixkv.errors import ConfigError
from prefixkv.threads import Closing

START_S = 600.0
"""Three imports of vLLM, one after the other, on a busy machine."""
ANSWER_S = 600.0


class NotStartedError(ConfigError):
    """The server did not come up: its environment's fault, not ours."""


class Server(Closing):
    """A process group of its own: an API server has an engine and workers as processes."""

    def __init__(
        self, command: Sequence[str], log: Path, port: int, environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.port, self.log = port, log
        if shutil.which("setpriv"):  # no servers are left where this process is killed
            command = ["setpriv", "--pdeathsig", "KILL", *command]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **environment},
                cwd=folder, start_new_session=True,
            )  # fmt: skip

    def wait(self, patience_s: float = START_S) -> None:
        """Until it answers. Raises NotStartedError, with the end of its log."""
        end_s = time.monotonic() + patience_s
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=10).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end_s:
                    raise NotStartedError(self.told()[-4000:]) from None
                time.sleep(0.5)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def told(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self) -> list[int]:
        """All of its process group that live."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(fields[2]) == self.process.pid and fields[0] != "Z":
                    found.append(int(entry.name))
        return found

    def signal(self, what: signal.Signals) -> None:
        """To all its processes at once."""
        os.killpg(self.process.pid, what)

    def close(self) -> None:
        """SIGKILL for all of them."""
        if self.process.poll() is None or self.processes():
            self.signal(signal.SIGKILL)
        self.process.wait()

    kill = close

    def post(self, path: str, body: Any, timeout_s: float = ANSWER_S) -> Any:
        """The answer, as JSON, or None for nothing; any success but JSON is its text. Raises
        urllib.error.HTTPError."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read().decode()
        return json.loads(text) if text[:1] in ("{", "[") else text or None
