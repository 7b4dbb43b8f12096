"""How things of vLLM are looked up: no vLLM is here, and so nothing of it."""

from __future__ import annotations

import ast
import logging
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

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


# --- signatures -----------------------------------------------------------------------------------


class Blocks:
    """What both managers below have in common."""

    num_tokens, block_hashes = 65, ("a", "b")

    def __init__(self) -> None:
        self.coordinator, self.asked = self, []

    def prefix_cache_lookup_enabled(self, request: Any) -> bool:
        return True

    def create_kv_cache_blocks(self, blocks: Any) -> Any:
        return blocks

    def find_longest_cache_hit_per_group(self, hashes: Any, most: int) -> Any:
        self.asked.append(most)
        return (["x"], ["y"]), (16, 32)


class Of32(Blocks):
    """vLLM 0.32's `KVCacheManager`, as far as prefixes are looked up."""

    def get_computed_blocks(self, request: Any) -> Any:
        return "own", 3, 4

    def get_computed_blocks_for_connector(self, request: Any) -> Any: ...


class Of33(Blocks):
    """vLLM 0.33's, which names the most tokens that may be found."""

    def get_computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> Any:
        return "own", 3, max_cache_hit_length

    def get_computed_blocks_for_connector(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> Any: ...


class OfAnother(Blocks):
    """One that says more than is known here."""

    def get_computed_blocks_for_connector(self, request: Any, cut: int, *, deep: bool) -> Any: ...


def test_prefixes_are_looked_up_as_both_versions_ask() -> None:
    old, new = Of32(), Of33()
    for manager in (old, new):
        compat.look_up_densely(manager, 1, lambda request: isinstance(request, Blocks))
        assert manager.get_computed_blocks_for_connector(manager) == (([], ["y"]), 32, 0, True)
    assert old.get_computed_blocks_for_connector(object()) == ("own", 3, 4, False)
    # 0.33's two calls: by position, and by name.
    assert new.get_computed_blocks_for_connector(object(), 40) == ("own", 3, 40, False)
    new.get_computed_blocks_for_connector(new, 40)
    new.get_computed_blocks_for_connector(new, max_cache_hit_length=64)
    assert (old.asked, new.asked) == ([63], [63, 40, 63])


def test_what_takes_less_than_what_it_replaces_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=r"get_computed_blocks_for_connector.*cut.*deep"):
        compat.look_up_densely(OfAnother(), 1, lambda request: True)

    class Ours(Of32):
        def prefix_cache_lookup_enabled(self, request: Any) -> bool:
            return False

    compat.check_overrides(Ours, Of32)

    class Fewer(Of33):
        def get_computed_blocks(self, request: Any) -> Any: ...

    with pytest.raises(ConfigError, match=r"Of33.get_computed_blocks\(.*max_cache_hit_length"):
        compat.check_overrides(Fewer, Of33)

    class Renamed(Of33):
        def get_computed_blocks(self, request: Any, most: int | None = None) -> Any: ...

    with pytest.raises(ConfigError, match="max_cache_hit_length"):  # vLLM may pass it by name
        compat.check_overrides(Renamed, Of33)


def test_a_call_that_a_function_of_vllm_does_not_take_is_named_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def get_ip(of: str) -> str:
        return of

    network = ModuleType("vllm.utils.network_utils")
    monkeypatch.setattr(network, "get_ip", get_ip, raising=False)
    for name in ("vllm", "vllm.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, network.__name__, network)
    monkeypatch.setattr(compat, "_look_up", compat._look_up.__wrapped__)
    with pytest.raises(ConfigError, match=r"no get_ip\(of: 'str'\).* that takes 0 by position"):
        compat.require(compat.ADDRESS)
    monkeypatch.setattr(network, "get_ip", lambda: "10.0.0.1")
    assert compat.require(compat.ADDRESS).get_ip() == "10.0.0.1"


def test_each_call_is_of_a_part_with_rows() -> None:
    assert {call.part for call in compat.CALLS} <= {row.part for row in compat.TABLE}
