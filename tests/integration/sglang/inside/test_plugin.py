"""What SGLang's registries are told, what is refused at the start, and what the hooks do."""

import importlib.metadata
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation import decode
from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    create_tree_cache,
    get_radix_cache_factory,
    registered_radix_cache_backends,
)
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from prefixkv.engines.sglang import internals as sgl
from prefixkv.engines.sglang import plugin
from prefixkv.engines.sglang.cache import PrefixKVCache
from prefixkv.engines.sglang.waiting import CLOCK, TimeMark
from prefixkv.errors import ConfigError
from prefixkv.settings import PREFIX
from tests.integration.sglang.inside.desk import Desk
from tests.integration.sglang.inside.test_requests import request, served
from tests.integration.sglang.stubs import CONTEXT


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLICY", "ADMISSION", "PATIENCE_S", "CPU_NIXL", "JOIN"):
        monkeypatch.delenv(f"PREFIXKV_{name}", raising=False)
    monkeypatch.setattr(decode, "CLIP_MAX_NEW_TOKEN", 4096)
    plugin.load()


def context(**changed: Any) -> TreeCacheBuildContext:
    fixed: dict[str, Any] = {
        "server_args": None, "params": Desk("prefixkv", 16, 1024).params, "is_hybrid_swa": False,
        "is_hybrid_ssm": False, "enable_hierarchical_cache": False, "disable_radix_cache": False,
        "tp_worker": None, "model_config": None, "tp_size": 1, "tp_rank": 0, "tp_group": None,
    }  # fmt: skip
    return TreeCacheBuildContext(**{**fixed, **changed})


def test_the_entry_point_leads_to_the_backend() -> None:
    (found,) = [
        one
        for one in importlib.metadata.entry_points(group="sglang.srt.plugins")
        if one.name == "prefixkv"
    ]
    assert found.load() is plugin.load
    assert "prefixkv" in registered_radix_cache_backends()
    plugin.load()  # SGLang's processes may load it again
    cache = create_tree_cache(context())
    assert type(cache) is PrefixKVCache
    assert cache.tree.policy.name == "adaptive"
    assert cache.tree.pool_pages == 65


def test_another_version_of_sglang_is_named_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.24")
    registered: list[Any] = []
    monkeypatch.setattr(HookRegistry, "register", lambda *args: registered.append(args))
    monkeypatch.setattr("sglang.srt.mem_cache.registry._RADIX_CACHE_REGISTRY", {})
    with caplog.at_level(logging.WARNING, "prefixkv.sglang"):
        plugin.load()
    assert get_radix_cache_factory("prefixkv") is None
    assert not registered
    assert "supports SGLang 0.5.23 and is inactive under 0.5.24" in caplog.text


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"is_hybrid_swa": True}, "--disable-hybrid-swa-memory"),
        ({"is_hybrid_ssm": True}, "Mamba"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
    ],
)
def test_what_it_does_not_serve_is_refused_when_the_server_starts(
    change: dict[str, bool], option: str
) -> None:
    with pytest.raises(ConfigError, match=option):
        create_tree_cache(context(**change))


@pytest.mark.parametrize(
    ("bag", "name", "value"),
    [
        ("memory", "enable_lmcache", True),
        ("memory", "enable_flexkv", True),
        ("memory", "enable_unified_cache_external_linker", True),
        ("memory", "enable_hisparse", True),
        ("disagg", "disaggregation_decode_enable_offload_kvcache", True),
        ("disagg", "disaggregation_decode_retraction_backup", "host_pool"),
    ],
)
def test_options_that_need_sglangs_own_tree_are_refused_by_name(
    bag: str, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getattr(CONTEXT, bag), name, value)
    monkeypatch.setattr(CONTEXT.disagg, "disaggregation_mode", "decode")
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        create_tree_cache(context())


def test_sessions_and_pages_of_two_sizes_are_refused() -> None:
    with_sessions = context()
    with_sessions.params.enable_session_radix_cache = True
    with pytest.raises(ConfigError, match="--enable-session-radix-cache"):
        create_tree_cache(with_sessions)
    wide = context()
    wide.params.token_to_kv_pool_allocator.page_size = 32
    with pytest.raises(ConfigError, match="--dcp-size"):
        create_tree_cache(wide)


def test_the_policy_is_prefixkvs_by_name_or_sglangs_option(monkeypatch: pytest.MonkeyPatch) -> None:
    built = context()
    built.params.eviction_policy = "lfu"
    assert create_tree_cache(built).tree.policy.name == "lfu"
    monkeypatch.setenv("PREFIXKV_POLICY", "slru")
    assert create_tree_cache(built).tree.policy.name == "slru"
    monkeypatch.setenv("PREFIXKV_POLICY", "newest")
    with pytest.raises(ConfigError, match="PREFIXKV_POLICY: 'newest' is not one of"):
        create_tree_cache(built)


def test_a_variable_that_nothing_reads_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFIXKV_PAGE_SIZE", "64")  # a setting of `prefixkv serve`, perhaps beside
    create_tree_cache(context())
    monkeypatch.setenv(PREFIX + "POLICI", "slru")
    with pytest.raises(ConfigError, match=r"no variable \w+_POLICI; .* is PREFIXKV_POLICY$"):
        create_tree_cache(context())


def test_hooks_are_where_sglang_has_what_they_hook() -> None:
    hooked = {target: [kind for kind, *_ in found] for target, found in HookRegistry._hooks.items()}
    assert hooked[sgl.RECEIVER_BROADCAST] == [HookType.AROUND]
    assert hooked[sgl.POP_PREALLOCATED] == [HookType.AROUND]
    assert hooked[sgl.UPDATE_HANDSHAKES] == [HookType.AFTER]
    assert sgl.NIXL_MEMORY_KINDS not in hooked


def test_a_disabled_cache_keeps_nothing_and_holds_nothing() -> None:
    params = Desk("prefixkv", 4, 64).params
    params.disable = True
    cache = PrefixKVCache(params)
    desk = Desk("prefixkv", 4, 64)
    desk.cache = cache
    desk.allocator, desk.pool = params.token_to_kv_pool_allocator, params.req_to_token_pool
    served(desk, "a", range(20))
    assert desk.match(request("b", range(20))) == 0
    assert not cache.supports_prefix_sharing()
    assert cache.total_size() == 0


# --- hooks ----------------------------------------------------------------------------------------


def test_the_time_goes_with_the_requests_from_the_rank_that_receives() -> None:
    sent: list[Any] = []

    def broadcast(_receiver: Any, recv_reqs: list[Any] | None, local: Any = None) -> list[Any]:
        if recv_reqs is not None:
            sent[:] = recv_reqs
        return list(sent)

    assert plugin._with_time(broadcast, None, ["one"], None) == ["one"]
    first = CLOCK.now_s
    assert first > 0
    assert [type(item) for item in sent] == [str, TimeMark]
    sent[:] = ["two", TimeMark(first + 5)]
    assert plugin._with_time(broadcast, None, None) == ["two"]  # of a rank that is sent them
    assert CLOCK.now_s == first + 5
    sent[:] = [TimeMark(first)]
    assert plugin._with_time(broadcast, None, None) == []
    assert CLOCK.now_s == first + 5


def decode_queue(desk: Desk, prompts: dict[str, Any]) -> Any:
    """What the hooks read of SGLang's queue."""
    return SimpleNamespace(
        tree_cache=desk.cache,
        queue=[queued(rid, tokens) for rid, tokens in prompts.items()],
        transfer_queue=SimpleNamespace(queue=[]),
        scheduler=SimpleNamespace(enable_priority_scheduling=False, waiting_queue=[]),
    )


def queued(rid: str, tokens: Any) -> Any:
    return SimpleNamespace(req=request(rid, tokens), waiting_for_input=False, is_rebootstrap=False)


def pop(queue: Any, take: int = 0) -> list[str]:
    """SGLang's own pop, hooked: what it sees, and that it takes the first."""
    seen: list[str] = []

    def original(queue: Any) -> tuple[list[Any], list[Any]]:
        seen.extend(item.req.rid for item in queue.queue)
        taken, queue.queue[:take] = queue.queue[:take], []
        return taken, []

    plugin._around_pop(original, queue)
    return seen


def test_decodes_queue_is_tried_by_new_pages_until_patience_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk("prefixkv", 4, 4096)
    served(desk, "served", range(400))
    queue = decode_queue(
        desk, {"cold": range(900, 1100), "hit": [*range(400), 5, 5, 5, 5], "small": range(500, 512)}
    )
    monkeypatch.setattr(CLOCK, "now_s", 1000.0)
    assert pop(queue) == ["hit", "small", "cold"]
    monkeypatch.setattr(CLOCK, "now_s", 1004.9)
    queue.queue.insert(0, queued("newest", range(600, 608)))
    assert pop(queue) == ["hit", "newest", "small", "cold"]
    desk.evict(4096)
    assert pop(queue) == ["newest", "small", "cold", "hit"]
    monkeypatch.setattr(CLOCK, "now_s", 1005.0)
    assert pop(queue)[-1] == "newest"
    assert set(pop(queue)[:3]) == {"cold", "hit", "small"}


def test_sglangs_order_stays_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk("prefixkv", 4, 4096)
    prompts = {"large": range(100), "small": range(500, 504)}
    monkeypatch.setenv("PREFIXKV_ADMISSION", "fifo")
    assert pop(decode_queue(desk, prompts)) == ["large", "small"]
    monkeypatch.setenv("PREFIXKV_ADMISSION", "hit_aware")
    by_priority = decode_queue(desk, prompts)
    by_priority.scheduler.enable_priority_scheduling = True
    assert pop(by_priority) == ["large", "small"]
    stock = decode_queue(Desk("unified-rust", 4, 4096), prompts)
    assert pop(stock) == ["large", "small"]
    monkeypatch.setenv("PREFIXKV_ADMISSION", "newest")
    with pytest.raises(ConfigError, match="PREFIXKV_ADMISSION"):
        pop(decode_queue(desk, prompts))


def test_requests_with_one_new_prompt_have_it_sent_once() -> None:
    """As SGLang's `pop_preallocated` goes: polls say who is ready, the others are passed over."""
    desk = Desk("prefixkv", 4, 4096)
    prompt = range(100, 140)
    queue = decode_queue(desk, {"first": prompt, "again": prompt, "other": range(41)})
    rebootstrapped = queued("rebootstrapped", prompt)
    rebootstrapped.is_rebootstrap = True
    queue.queue.append(rebootstrapped)

    def tick() -> list[str]:
        def original(queue: Any) -> tuple[list[Any], list[Any]]:
            for item in queue.queue:
                item.waiting_for_input = True
            plugin._after_handshakes(None, queue)
            taken = [item for item in queue.queue if item.waiting_for_input]
            queue.queue = [item for item in queue.queue if not item.waiting_for_input]
            for item in taken:
                assert item is rebootstrapped or desk.admit(item.req)
            return taken, []

        popped, _ = plugin._around_pop(original, queue)
        queue.transfer_queue.queue += popped
        return [item.req.rid for item in popped]

    assert tick() == ["first", "other", "rebootstrapped"]
    assert tick() == []
    first = queue.transfer_queue.queue.pop(0)
    queue.scheduler.waiting_queue.append(first.req)
    assert tick() == []
    queue.scheduler.waiting_queue.clear()
    desk.checkpoint(first.req)
    (item,) = queue.queue
    assert tick() == ["again"]
    assert item.req.prefix_len == 36  # SGLang computes its last token
    assert desk.cache.counters["joined_requests"] == 1
    queue.queue = [queued("aborted", range(300, 341)), queued("a", range(300, 341))]
    queue.queue[0].req.finished_reason = "abort"
    for item in queue.queue:
        item.waiting_for_input = True
    plugin._after_handshakes(None, queue)
    assert [item.waiting_for_input for item in queue.queue] == [True, True]
    stock = decode_queue(Desk("unified-rust", 4, 4096), {"first": prompt, "again": prompt})
    for item in stock.queue:
        item.waiting_for_input = True
    plugin._after_handshakes(None, stock)
    assert all(item.waiting_for_input for item in stock.queue)
