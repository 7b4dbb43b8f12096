"""The file that benchmarks over traces write says how it was made."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.trace_rows import write_rows


def test_the_command_of_a_file_has_all_that_decides_its_rows(tmp_path: Path) -> None:
    file, traces = tmp_path / "rows.json", [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for requests, words in ((None, ""), (0, "--requests 0 "), (150, "--requests 150 ")):
        write_rows(file, "one --seeds 3", traces, requests, {"seed": "why"}, [{"hit": 0.5}])
        text = json.loads(file.read_text(encoding="utf-8"))
        command = f"python -m benchmarks one a.jsonl b.jsonl --seeds 3 {words}--json rows.json"
        assert text["recipe"]["command"] == command
        assert text["recipe"]["seed"] == "why"
        assert text["rows"] == [{"hit": 0.5}]
    write_rows(None, "one", traces, None, {}, [])
    assert list(tmp_path.iterdir()) == [file]
