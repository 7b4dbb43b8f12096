"""How things of vLLM are looked up: no vLLM is here, and so nothing of it."""

from __future__ import annotations

import ast
import logging
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import prefixkv.engines.vllm
from prefixkv.engines.vllm import compat
from prefixkv.errors import ConfigError

FOLDER = Path(prefixkv.engines.vllm.__file__).parent


def test_vllm_is_imported_by_compat_alone() -> None:
    """And there behind what looks it up: by its table, not by a statement of its own."""
    found = {}
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            vllm = [name for name in names if name.partition(".")[0] == "vllm"]
            if vllm:
                found.setdefault(path.name, []).extend(vllm)
    assert found == {"compat.py": ["vllm.utils.watch_dog"]}  # may be missing, without any loss


@pytest.mark.parametrize("module", ["connector", "block_queue", "metrics"])
def test_no_vllm_is_another_thing_than_another_version(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"prefixkv.engines.vllm.{module}"
    with pytest.raises(ModuleNotFoundError, match="No module named 'vllm'"):
        import_module(name)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(compat, "_look_up", compat._look_up.__wrapped__)
    with pytest.raises(ConfigError, match=r"vLLM unknown has no .* in vllm\..*, which .* needs to"):
        import_module(name)


def test_a_name_may_be_stored_by_a_method_of_a_base() -> None:
    class Base:
        def __init__(self) -> None:
            self.stored = 1

    @dataclass
    class Kind(Base):
        field: int

        @property
        def computed(self) -> int:
            return self.read_only  # type: ignore[attr-defined,no-any-return]

    for name in ("stored", "field", "computed"):
        assert compat._has(Kind, name)
    assert not compat._has(Kind, "read_only")
    assert compat._has(compat, "TABLE")
    assert not compat._has(compat, "NOTHING")


def test_parts_and_rows() -> None:
    parts = {key for key, one in vars(compat).items() if isinstance(one, compat.VllmFeature)}
    assert {row.part for row in compat.TABLE} == {getattr(compat, name) for name in parts}
    keys = [(row.part, row.module, row.owner, name) for row in compat.TABLE for name in row.names]
    assert len(keys) == len(set(keys))


def test_what_the_library_logs_is_written_as_vllm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, vllms = logging.getLogger("prefixkv"), logging.getLogger("vllm")
    handler, other = logging.NullHandler(), logging.NullHandler()
    monkeypatch.setattr(vllms, "handlers", [handler])
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "propagate", False)  # pytest's own are at the root
    for _ in range(2):
        compat.share_log()
        assert ours.handlers == [handler]
    monkeypatch.setattr(ours, "handlers", [other])
    compat.share_log()
    assert ours.handlers == [other]
