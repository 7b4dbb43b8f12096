"""Users for Locust. The usage of all is written into the file that the variable USAGE names."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import gevent
from locust import HttpUser, events, task
from locust.exception import StopUser

USERS, CHATS = 3, 4
total = {"requests": 0, "prompt": 0, "answer": 0}
left: list["Chats"] = []


class Chats(HttpUser):  # type: ignore[misc, unused-ignore]
    turns = 0

    @task
    def chat(self) -> None:
        streams = self.turns % 2 == 1
        body = {
            "model": "small", "messages": [{"role": "user", "content": f"Chat {self.turns}"}],
            "max_tokens": 8, "stream": streams, "stream_options": {"include_usage": True},
        }  # fmt: skip
        with self.client.post("/chat/completions", json=body, catch_response=True) as answer:
            try:
                found = answer.text.split("data: ")[-2] if streams else answer.text
                note(json.loads(found)["usage"])
            except Exception as error:
                answer.failure(f"{error!r}: {answer.text}")
        self.turns += 1
        if self.turns == CHATS:
            left.append(self)
            if len(left) == USERS:
                gevent.spawn(end, self.environment.runner)
            raise StopUser


def end(runner: Any) -> None:
    """End the run, once the file of its numbers has all of them: it is written each second."""
    while not any(row[2] == str(USERS * CHATS) for row in rows()):
        gevent.sleep(0.1)
    runner.quit()


def rows() -> list[list[str]]:
    with open(os.environ["STATS"], newline="") as lines:
        return [row for row in csv.reader(lines) if len(row) > 2]


def note(usage: dict[str, Any]) -> None:
    total["requests"] += 1
    total["prompt"] += usage["prompt_tokens"]
    total["answer"] += usage["completion_tokens"]


@events.quit.add_listener
def write(exit_code: int, **_: Any) -> None:
    Path(os.environ["USAGE"]).write_text(json.dumps(total))
