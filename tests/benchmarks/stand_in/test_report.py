"""The figures follow from the measurements as the issue defines them."""

import io
import json

import pytest
from rich.console import Console

from benchmarks.stand_in.report import Measured, Report
from prefixkv.cli.figures import machine

R_KEYS = {
    "requests", "failed", "token_hit_rate", "prefill_hit_rate", "prompt_tokens", "hit_tokens",
    "bytes_sent", "bytes_skipped", "ttft_s", "itl_s", "requests_per_s", "duration_s",
    "evicted_pages", "pages_verified", "pages_mismatched", "locks_at_end", "pages_at_end",
}  # fmt: skip


def measured(scale=1.0, **changed):
    values = {
        "requests": 10,
        "prompt_tokens": 1000,
        "hit_tokens": 800,
        "prefill_prompt_tokens": 1000,
        "prefill_hit_tokens": 700,
        "bytes_sent": int(1000 * scale),
        "bytes_skipped": 5,
        "ttft_s": [0.1 * scale * i for i in range(1, 101)],
        "itl_s": [0.005] * 10,
        "duration_s": 4.0 * scale,
        "pages_at_end": {"free": 3, "cached": 7},
    }
    return Measured(**(values | changed))


def both():
    return Report(
        {"seed": 1, "offered_load": {"requests_per_s": 2.0}},
        verified={
            c: measured(pages_verified=40 + c, pages_mismatched=2 * c, failed=1)
            for c in (True, False)
        },
        timed={True: measured(), False: measured(4.0)},
        saturated={True: measured(), False: measured(2.0, failed=5)},
    )


def test_json_has_the_fields_and_the_figures(tmp_path):
    both().write_json(tmp_path / "out.json")
    content = json.loads((tmp_path / "out.json").read_text())
    assert set(content) == {"recipe", "runs", "saturated", "ratios"}
    for kind in ("runs", "saturated"):
        assert set(content[kind]) == {"cache_on", "cache_off"}
        assert all(set(r) == R_KEYS for r in content[kind].values())
    on = content["runs"]["cache_on"]
    assert on["token_hit_rate"] == 0.8
    assert on["prefill_hit_rate"] == 0.7
    assert on["requests_per_s"] == 2.5
    assert on["ttft_s"] == pytest.approx({"p50": 5.05, "p90": 9.01, "p99": 9.901})
    assert set(on["itl_s"]) == {"p50", "p99"}
    assert on["pages_at_end"] == {"free": 3, "owned": 0, "cached": 7, "held": 0, "quarantined": 0}
    assert (on["pages_verified"], on["pages_mismatched"], on["failed"]) == (41, 2, 1)
    assert content["runs"]["cache_off"]["pages_verified"] == 40
    assert content["saturated"]["cache_off"]["requests_per_s"] == 5 / 8
    assert content["ratios"] == pytest.approx(
        {"ttft_p50": 4.0, "ttft_p50_saturated": 2.0, "bytes_sent": 4.0, "requests_per_s": 4.0}
    )


def test_one_side_alone_has_no_ratios(tmp_path):
    report = Report({}, timed={True: measured()}, saturated={True: measured()})
    content = report.as_json()
    assert set(content["runs"]) == {"cache_on"}
    assert content["ratios"] == dict.fromkeys(
        ["ttft_p50", "ttft_p50_saturated", "requests_per_s", "bytes_sent"]
    )
    assert report.verdict() == ""


def test_nothing_measured_is_null_and_no_error(tmp_path):
    report = Report({}, timed={c: Measured() for c in (True, False)}, saturated={})
    report.write_json(tmp_path / "out.json")  # refuses NaN
    r = report.as_json()["runs"]["cache_on"]
    assert r["token_hit_rate"] is None
    assert r["ttft_s"] == {"p50": None, "p90": None, "p99": None}
    Console(file=io.StringIO()).print(report.table())


def test_table_and_verdict_show_the_figures():
    console = Console(width=160, file=io.StringIO())
    console.print(both().table())
    text = console.file.getvalue()
    for shown in (
        "80.0%",
        "70.0%",
        "5050.0",
        "9010.0",
        "9901.0",
        "saturated",
        "moderate load",
        "2.5",
    ):
        assert shown in text
    verdict = both().verdict()
    assert "4.00 times lower TTFT P50" in verdict
    assert "4.00 times fewer bytes" in verdict


def test_complaints_name_the_pass():
    report = Report(
        {},
        verified={True: measured(pages_mismatched=3)},
        saturated={False: measured(locks_at_end=2)},
    )
    report.timed[True] = measured(
        prefill_pages_at_end={"held": 1, "cached": 5}, prefill_locks_at_end=4
    )
    assert report.complaints() == [
        "verified pass, cache_on: 3 pages mismatched",
        "timed pass, cache_on: 4 prefill locks left",
        "timed pass, cache_on: 1 prefill pages left held",
        "saturated pass, cache_off: 2 decode locks left",
    ]
    assert Report({}, timed={True: measured()}).complaints() == []


def test_plot_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    both().plot(tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_machine_is_json():
    found = json.loads(json.dumps(machine()))
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["nixl"].startswith("1.")
