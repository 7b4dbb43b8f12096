"""Versions of vLLM, and the signatures of its functions. No vLLM is here."""

import logging
from typing import Any

import pytest

import prefixkv.engines.vllm
from prefixkv.engines.vllm import versions
from prefixkv.engines.vllm.groups import look_up_densely
from prefixkv.engines.vllm.stats import share_log
from prefixkv.errors import ConfigError


@pytest.mark.parametrize("found", ["0.31.9", "0.34.0", "1.0", "none"])
def test_another_version_is_refused_in_plain_words(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: found)
    with pytest.raises(ImportError, match=f"from 0.32 on, and before 0.34; installed is {found}"):
        prefixkv.engines.vllm.PrefixKVConnector  # noqa: B018


@pytest.mark.parametrize("found", ["0.32.0", "0.33.1rc1.dev7"])
def test_what_this_one_lacks_is_named(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no vLLM here, so it lacks everything."""
    for module in (versions, prefixkv.engines.vllm):
        monkeypatch.setattr(module, "installed_version", lambda: found)
    with pytest.raises(ImportError, match=f"vLLM {found}: No module named 'vllm'.*is for vLLM"):
        prefixkv.engines.vllm.PrefixKVConnector  # noqa: B018


def test_what_the_library_logs_is_written_as_vllm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, vllms = logging.getLogger("prefixkv"), logging.getLogger("vllm")
    handler, other = logging.NullHandler(), logging.NullHandler()
    monkeypatch.setattr(vllms, "handlers", [handler])
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "propagate", False)  # pytest's own are at the root
    for _ in range(2):
        share_log()
        assert ours.handlers == [handler]
    monkeypatch.setattr(ours, "handlers", [other])
    share_log()
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
        look_up_densely(manager, 1, lambda request: isinstance(request, Blocks))
        assert manager.get_computed_blocks_for_connector(manager) == (([], ["y"]), 32, 0, True)
    assert old.get_computed_blocks_for_connector(object()) == ("own", 3, 4, False)
    # 0.33's two calls: by position, and by name.
    assert new.get_computed_blocks_for_connector(object(), 40) == ("own", 3, 40, False)
    new.get_computed_blocks_for_connector(new, 40)
    new.get_computed_blocks_for_connector(new, max_cache_hit_length=64)
    assert (old.asked, new.asked) == ([63], [63, 40, 63])


def test_what_takes_less_than_what_it_replaces_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=r"get_computed_blocks_for_connector.*cut.*deep"):
        look_up_densely(OfAnother(), 1, lambda request: True)

    class Ours(Of32):
        def prefix_cache_lookup_enabled(self, request: Any) -> bool:
            return False

    versions.check_overrides(Ours, Of32)

    class Fewer(Of33):
        def get_computed_blocks(self, request: Any) -> Any: ...

    with pytest.raises(ConfigError, match=r"Of33.get_computed_blocks\(.*max_cache_hit_length"):
        versions.check_overrides(Fewer, Of33)

    class Renamed(Of33):
        def get_computed_blocks(self, request: Any, most: int | None = None) -> Any: ...

    with pytest.raises(ConfigError, match="max_cache_hit_length"):  # vLLM may pass it by name
        versions.check_overrides(Renamed, Of33)
