"""The file of `--request-log`: whole lines from several writers, rotation, and disks that are
full."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from prefixkv.errors import ConfigError
from prefixkv.serving import request_file
from prefixkv.serving.request_file import RequestFile
from tests.support.patience import PATIENCE_S, until


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    assert len(found) == 2000 == sum(file.written for file in files)
    for number in range(4):
        assert [one["i"] for one in found if one["from"] == number] == list(range(500))
    assert (path.stat().st_mode & 0o777) == 0o600


def test_a_file_that_is_renamed_is_followed_by_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"old": 1}\n')
    path.chmod(0o640)
    file = RequestFile(str(path))
    file.write({"n": 1})
    until(lambda: file.written == 1)
    path.rename(tmp_path / "log.1")
    file.write({"n": 2})
    file.close()
    assert lines_of(tmp_path / "log.1") == [{"old": 1}, {"n": 1}]
    assert ((tmp_path / "log.1").stat().st_mode & 0o777) == 0o640
    assert lines_of(path) == [{"n": 2}]


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
    until(lambda: file.lost == 3)
    assert len(caplog.messages) == 1
    assert "a line of the request log is lost: No such file" in caplog.text
    folder.mkdir()
    file.write({"n": 3, "what": object()})  # of no form in JSON
    file.write({"n": 4})
    file.close()
    assert lines_of(folder / "log")[-1] == {"n": 4}
    (family,) = file.collect()
    assert {one.labels["outcome"]: one.value for one in family.samples} == {
        "written": file.written, "lost": file.lost,
    }  # fmt: skip
    assert file.written + file.lost == 5


def test_a_full_disk_tears_one_line_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    file = RequestFile(str(path))
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        return write(descriptor, data[: len(data) - 4])

    monkeypatch.setattr(request_file.os, "write", full)
    file.write({"n": 1})
    until(lambda: file.lost == 1)
    monkeypatch.undo()
    file.write({"n": 2})
    file.close()
    torn, whole = path.read_text().splitlines()
    assert torn == '{"n"'
    assert json.loads(whole) == {"n": 2}


def test_more_lines_than_may_wait_are_lost_without_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_file, "MAX_WAITING", 8)
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
    assert file.lost == 50 - 8
    go_on.set()
    file.close()
    assert (file.written, file.lost) == (1 + 8, 50 - 8)


@pytest.mark.parametrize("what", ["no folder", "a folder", "a pipe without a reader"])
def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, what: str) -> None:
    path = tmp_path / "missing" / "log" if what == "no folder" else tmp_path
    if what == "a pipe without a reader":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"request_log: .* cannot be written"):
        RequestFile(str(path))


def test_texts_are_bounded(tmp_path: Path) -> None:
    file = RequestFile(str(tmp_path / "log"))
    file.write({"error": "x" * 100_000})
    file.close()
    assert len(lines_of(tmp_path / "log")[0]["error"]) == request_file.MAX_CHARS
