"""The GPU's benchmark works, at tiny sizes and on the CPU; how fast anything was is not looked
at."""

import json

import pytest

from benchmarks import claim_staging, gpu, transfer
from benchmarks.__main__ import run


@pytest.fixture
def few(monkeypatch):
    """One row of each kind."""
    monkeypatch.setattr(transfer, "LAYOUTS", ("page_major",))
    monkeypatch.setattr(gpu, "PAGE_SIZES", (64,))
    monkeypatch.setattr(gpu, "PAGES", ("random",))
    monkeypatch.setattr(claim_staging, "MESHES", {"4 to 1": (4, 1)})


def measured(part, where):
    command = f"gpu --quick --device cpu --only {part} --json"
    assert run([*command.split(), str(where / "out.json")]) == 0
    written = json.loads((where / "out.json").read_text())
    assert written["recipe"]["device"] == "cpu"
    assert list(written["measured"]) == [part]
    return written["measured"][part]


def test_staging_copies_are_measured_by_shape(tmp_path):
    (copies,) = measured("copies", tmp_path)
    assert len(copies["staging"]) == 8
    assert all("wide_gather_whole_gb_s" in row for row in copies["staging"])


@pytest.mark.slow
def test_transfers_are_measured_between_equal_and_unequal_ranks(tmp_path, few):
    pair, unequal = measured("transfer", tmp_path)
    assert (pair["page_size"], pair["pages"]) == (64, "random")
    assert unequal["meshes"] == "TP4 to TP1"


@pytest.mark.slow
def test_a_step_is_measured_alone_and_beside_transfers(tmp_path, few):
    (step,) = measured("step", tmp_path)
    assert step["came_in_gb_s"] >= 0
    assert step["step_ms"]["beside"]["p50"] > 0


@pytest.mark.slow
def test_turns_send_less_with_the_cache_on(tmp_path):
    on, off = measured("turns", tmp_path)
    assert (on["cache"], off["cache"]) == (True, False)
    assert on["turns"][1]["hit_tokens"] == 64
    assert on["mib_in_all"] < off["mib_in_all"]
    assert on["pages_wrong"] == off["pages_wrong"] == 0 < on["pages_verified"]


def test_a_part_that_fails_is_told_and_stops_no_other(tmp_path, monkeypatch, capfd):
    def fails():
        raise ValueError("no such memory")

    monkeypatch.setitem(gpu.MEASURES, gpu.Part.copies, lambda device, quick: [fails, dict])
    monkeypatch.setitem(gpu.MEASURES, gpu.Part.turns, lambda device, quick: [lambda: {"ms": 1}])
    where = tmp_path / "out.json"
    command = "gpu --device cpu --only copies --only turns --json"
    assert run([*command.split(), str(where)]) == 1
    measured = json.loads(where.read_text())["measured"]
    assert "no such memory" in measured["copies"][0]["failed"]
    assert (measured["copies"][1], measured["turns"]) == ({}, [{"ms": 1}])


def test_bytes_that_differ_are_an_error():
    from prefixkv.errors import InternalError

    case = transfer.small("page_major", "fresh")
    ours, theirs = case.pool(1), case.pool(2)
    assert transfer.digest(ours, [1]) != transfer.digest(theirs, [1])

    class Pipe:
        send = staticmethod(lambda asked: None)
        recv = staticmethod(lambda: transfer.digest(theirs, [1]))

    class Node:
        pass

    decode = transfer.Decode(Pipe(), case, Node(), None, "")
    decode._pages = [1]
    decode.check_bytes(theirs)
    with pytest.raises(InternalError, match="other bytes"):
        decode.check_bytes(ours)
