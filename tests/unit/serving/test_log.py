"""Refusals by reason and lines of the request log, of an application over real sockets; and the
log's file: whole lines from several writers, rotation, and disks that are full."""

import asyncio
import json
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixkv.errors import ConfigError
from prefixkv.serving import log
from prefixkv.serving.log import MAX_CHARS, Outcomes, RequestFile
from tests.support.patience import PATIENCE_S, until
from tests.support.processes import lines_of
from tests.unit.serving.test_http import Site, serve


def counts(counter: Any) -> dict[tuple[str, ...], float]:
    """By the values of its labels."""
    (family,) = counter.collect()
    return {
        (*one.labels.values(),): one.value for one in family.samples if one.name.endswith("_total")
    }


def logged(
    folder: Path, scene: Callable[[Site, httpx.AsyncClient], Awaitable[None]], kind: str = "front"
) -> tuple[Outcomes, list[dict[str, Any]]]:
    """Play a scene before a site. Returns what it counted and its lines."""
    file = RequestFile(str(folder / "log"))
    outcomes = Outcomes(kind, {"node": "site", "side": "front"}, file)
    serve(scene, outcomes=outcomes)
    file.close()
    return outcomes, lines_of(folder / "log")


def test_a_line_has_what_its_handler_knows_and_how_it_ended(tmp_path: Path) -> None:
    async def scene(_: Site, client: httpx.AsyncClient) -> None:
        for headers in ({"x-request-id": "mine"}, {"outcome": "failed"}):
            await client.post("/echo", json={"a": 1}, headers=headers)
        await client.get("/nowhere")

    _, (line, failed, refused) = logged(tmp_path, scene)
    assert [failed["outcome"], refused["outcome"], refused["status"]] == ["failed", "refused", 404]
    assert 0 <= line.pop("asked_s") <= line.pop("ended_s") < PATIENCE_S
    assert line.pop("arrived_at") > 1e9
    assert line == {
        "node": "site", "side": "front", "id": "r1", "outcome": "finished", "path": "POST /echo",
        "status": 200, "reason": None, "request_id": "mine", "answer_bytes": 7,
    }  # fmt: skip


@pytest.mark.parametrize("path", ["/stream", "/wait"])
def test_a_client_that_leaves_has_an_aborted_line(tmp_path: Path, path: str) -> None:
    async def scene(site: Site, client: httpx.AsyncClient) -> None:
        async def ask() -> None:
            async with client.stream("POST", path) as answer:
                async for _ in answer.aiter_raw():
                    asking.cancel()

        asking = asyncio.create_task(ask())
        if path == "/wait":
            assert await site.ended.get() == "begun"
            asking.cancel()
        await asyncio.wait((asking,))
        assert await site.ended.get() == "cut"

    outcomes, (line,) = logged(tmp_path, scene)
    assert line["outcome"] == "aborted"
    assert counts(outcomes.collectors[0]) == {}


def test_a_worker_has_lines_of_what_it_refuses_alone(tmp_path: Path) -> None:
    async def scene(_: Site, client: httpx.AsyncClient) -> None:
        for path in ("/echo", "/refuse"):
            await client.post(path, json={})

    _, (line,) = logged(tmp_path, scene, "worker")
    assert (line["outcome"], line["reason"]) == ("refused", "teapot")


def test_lines_of_refused_requests_are_bounded_in_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_REFUSED_LINES", 5)
    monkeypatch.setattr(log, "_REFUSED_PER_S", 0.0)

    async def scene(_: Site, client: httpx.AsyncClient) -> None:
        for _ in range(12):
            await client.post("/refuse")
        await client.post("/echo", json={})

    outcomes, lines = logged(tmp_path, scene)
    assert [line["outcome"] for line in lines] == ["refused"] * 5 + ["finished"]
    assert counts(outcomes.collectors[1]) == {(): 7}
    assert counts(outcomes.collectors[0]) == {("418", "teapot"): 12}


# --- the file -------------------------------------------------------------------------------------


def written(file: RequestFile) -> float:
    return counts(file.lines)["written",]


def lost(file: RequestFile) -> float:
    return counts(file.lines)["lost",]


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    """Each `RequestFile` opens the file by itself, as those of several processes do."""
    path = tmp_path / "log"
    files = [RequestFile(str(path)) for _ in range(4)]

    def write(number: int) -> None:
        for i in range(500):
            files[number].write({"from": number, "i": i, "text": "x" * (i * 7 % 900)})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for file in files:
        file.close()
    found = lines_of(path)
    assert len(found) == 2000 == sum(written(file) for file in files)
    for number in range(4):
        assert [one["i"] for one in found if one["from"] == number] == list(range(500))
    assert (path.stat().st_mode & 0o777) == 0o600


def test_a_file_that_is_renamed_is_followed_by_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"old": 1}\n')
    path.chmod(0o640)
    file = RequestFile(str(path))
    file.write({"n": 1})
    until(lambda: written(file) == 1)
    path.rename(tmp_path / "log.1")
    file.write({"error": "x" * 100_000})
    file.close()
    assert lines_of(tmp_path / "log.1") == [{"old": 1}, {"n": 1}]
    assert ((tmp_path / "log.1").stat().st_mode & 0o777) == 0o640
    assert lines_of(path) == [{"error": "x" * MAX_CHARS}]


def test_a_line_that_cannot_be_written_is_lost_and_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = RequestFile(str(folder / "log"))
    (folder / "log").unlink()
    folder.rmdir()
    for n in range(3):
        file.write({"n": n})
    until(lambda: lost(file) == 3)
    assert len(caplog.messages) == 1
    assert "a line of the request log is lost: No such file" in caplog.text
    folder.mkdir()
    file.write({"n": 3, "what": object()})  # of no form in JSON
    file.write({"n": 4})
    file.close()
    assert lines_of(folder / "log")[-1] == {"n": 4}
    assert written(file) + lost(file) == 5


def test_a_full_disk_tears_one_line_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    file = RequestFile(str(path))
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        return write(descriptor, data[: len(data) - 4])

    monkeypatch.setattr(log.os, "write", full)
    file.write({"n": 1})
    until(lambda: lost(file) == 1)
    monkeypatch.undo()
    file.write({"n": 2})
    file.close()
    torn, whole = path.read_text().splitlines()
    assert torn == '{"n"'
    assert json.loads(whole) == {"n": 2}


def test_more_lines_than_may_wait_are_lost_without_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "MAX_WAITING", 8)
    file = RequestFile(str(tmp_path / "log"))
    writing, go_on = threading.Event(), threading.Event()

    def append(line: dict[str, Any]) -> None:
        writing.set()
        assert go_on.wait(PATIENCE_S)

    monkeypatch.setattr(file, "_append", append)
    file.write({"n": 0})
    assert writing.wait(PATIENCE_S)
    for n in range(50):
        file.write({"n": n})
    go_on.set()
    file.close()
    assert (written(file), lost(file)) == (1 + 8, 50 - 8)


@pytest.mark.parametrize("what", ["no folder", "a folder", "a pipe without a reader"])
def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, what: str) -> None:
    path = tmp_path / "missing" / "log" if what == "no folder" else tmp_path
    if what == "a pipe without a reader":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"request_log: .* cannot be written"):
        RequestFile(str(path))
