"""`prefixkv keys`: what it writes is what both kinds of workers take."""

import stat
from pathlib import Path

import pytest

from prefixkv.cli.main import run_command
from prefixkv.serving.config import KINDS
from prefixkv.settings import load


def test_the_files_are_settings_of_workers_that_know_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    assert run_command(["keys", "decode-0", "other", "--folder", str(folder)]) == 0
    shown = capsys.readouterr().out
    prefill = load(KINDS["prefill"], folder / "prefill.toml").node.control.curve
    for name in ("decode-0", "other"):
        path = folder / f"{name}.toml"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert f"prefixkv worker decode --config {path}\n" in shown
        node = load(KINDS["decode"], path).node
        assert node.name == name
        assert node.control.curve.server_key == prefill.public_key
        assert prefill.allowed_clients[node.control.curve.public_key] == name
    assert prefill.secret_key not in shown


def test_what_is_there_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "decode-0.toml").write_text("mine")
    assert run_command(["keys", "--folder", str(tmp_path)]) == 2
    assert "its keys may be in use" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [tmp_path / "decode-0.toml"]


@pytest.mark.parametrize("names", [["prefill"], ["a", "a"], ["../a"], [""]])
def test_names_that_are_none_are_refused(names: list[str], tmp_path: Path) -> None:
    assert run_command(["keys", *names, "--folder", str(tmp_path / "k")]) == 2
    assert not (tmp_path / "k").exists()
