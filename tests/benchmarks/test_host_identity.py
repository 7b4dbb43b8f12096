"""The benchmark of answers behind host memory still runs, and sees an answer that is another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import host_identity as bench
from benchmarks.__main__ import run
from prefixkv.engines.hf.reference import Reference
from prefixkv.engines.hf.small import small_model


def answer(prompt: list[int], tokens: list[int], most: int = 9, end: str = "finished") -> object:
    made = bench._Answer(prompt, most)
    made.tokens, made.end = tokens, end
    return made


def test_an_answer_that_is_another_or_shorter_is_counted() -> None:
    reference = Reference(small_model(1, trial=False))
    prompt = [300, 301, 302, 303]
    said = reference.answer(prompt, 9)
    other = [*said[:4], said[4] + 1, *said[5:]]
    answers = [
        answer(prompt, said),
        answer(prompt, said[:5], most=5),
        answer(prompt, said[:3], end="left"),
        answer(prompt, [], end="refused"),
        answer(prompt, said[:5]),  # it ended too early
        answer(prompt, other),
        answer(prompt, other[:5], end="cut"),
    ]
    found = bench._compare(reference, answers, {})  # type: ignore[arg-type]
    assert found == {
        "answers": 7, "tokens": sum(len(one.tokens) for one in answers), "ties": 0, "different": 3,
    }  # fmt: skip


@pytest.mark.slow
def test_a_small_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "AT_ONCE", 4)
    monkeypatch.setattr(bench, "TURNS", 3)
    out = tmp_path / "out.json"
    told = ["--conversations", "12", "--kills", "1", "--only", "decode computes"]
    assert run(["host_identity", *told, "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["finished"], row["cut"], row["refused"], row["different"]) == (36, 0, 0, 0)
    assert row["kills"] == 1
    assert row["host_loads"] > 0
    assert row["pages_left"] == 0
