"""vLLM's KV tensors as pools: every layout of its `KVCacheLayout`, as `create_kv_cache_views` of
0.32.0 makes them (stand-ins of the same strides), and refusals by name."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefixkv.engines.vllm.groups import STATE_WINDOW, BlockGroups, WindowLayers
from prefixkv.engines.vllm.layout import PLAIN, check_engine, is_plain, pool_of
from prefixkv.errors import ConfigError
from tests.unit.engines.vllm.standin import FullAttentionSpec, kv_cache_config, options

L, B, H, N, C = 3, 8, 2, 4, 6  # layers, blocks, heads, tokens, content
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    mamba_type, shapes, mamba_cache_mode = "mamba2", ((4, 5),), "align"
    num_speculative_blocks = num_prefill_checkpoint_blocks = 0
    state_content_size_bytes = 4 * 5 * 4


class SlidingWindowSpec(FullAttentionSpec):
    sliding_window, extra_retained_tokens = 9, 0


def grouped(order: str = "LBHNC", **more: Any) -> tuple[Any, Any]:
    """Views and a config of three groups, of which the second keeps every token. The others lie in
    the same memory; the last has a layer less. `more`: of the last one's spec, or of the group."""
    views = caches(order)
    specs = SlidingWindowSpec(N), FullAttentionSpec(N), SlidingWindowSpec(N)
    made, groups = config(), []
    for number, (spec, layers) in enumerate(zip(specs, (L, L, L - 1), strict=True)):
        spec.dtype, spec.page_size_bytes = "float", H * N * C
        names = [f"{number}.layer.{i}" for i in range(layers)]
        views |= {name: views[f"layer.{i}"] for i, name in enumerate(names)}
        groups.append(
            SimpleNamespace(
                layer_names=names, kv_cache_spec=spec, host_resident=False,
                enable_kv_transfer=True, is_eagle_group=False,
            )
        )  # fmt: skip
    for name, value in more.items():
        owner = groups[2] if hasattr(groups[2], name) else groups[2].kv_cache_spec
        setattr(owner, name, value)
    made.kv_cache_groups = groups
    return views, made


def caches(order: str, dtype: torch.dtype = torch.bfloat16, parts: int = 1) -> dict[str, Any]:
    """One allocation; a view [block, head, token, content] of each layer. Of `parts` kernel blocks
    a block."""
    sizes = L, B * parts, H, N // parts, C
    permutation = ORDERS[order]
    memory = torch.zeros([sizes[dim] for dim in permutation], dtype=torch.float32).to(dtype)
    whole = memory.permute([permutation.index(dim) for dim in range(5)])
    return {f"layer.{i}": whole[i] for i in range(L)}


def config(spec: Any = None, **more: Any) -> Any:
    made = kv_cache_config(B, N)
    made.kv_cache_groups[0].layer_names = [f"layer.{i}" for i in range(L)]
    if spec is not None:
        made.kv_cache_groups[0].kv_cache_spec = spec
    vars(made.kv_cache_groups[0]).update(more)
    return made


PARALLEL = [
    "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size",
    "prefill_context_parallel_size",
]  # fmt: skip


@pytest.mark.parametrize(
    ("order", "parts"),
    # Kernel blocks of a block lie behind each other only where no other layer's are between.
    [("LBHNC", 1), ("LBNHC", 1), ("BLHNC", 1), ("BLNHC", 1), ("LBHNC", 2), ("LBNHC", 2)],
)
def test_a_block_is_one_page(order: str, parts: int) -> None:
    views = caches(order, parts=parts)
    pool = pool_of(views, config(), "tag")
    layout = pool.layout
    assert (layout.num_pages, layout.page_size, layout.num_layers) == (B, N, L)
    assert (layout.opaque, layout.attention, layout.num_kv_heads) == ("tag", "fused", H)
    assert layout.slab_page_bytes == H * N * C * 2
    for i, view in enumerate(views.values()):
        view[5 * parts : 6 * parts] = i + 1
    written = pool.read_pages([5]).view(torch.bfloat16).flatten(2)
    assert written.shape[:2] == (1, L)
    for i in range(L):
        assert (written[0, i] == i + 1).all()
    assert (pool.read_pages([0, 4, 6, 7]) == 0).all()


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_blocks_that_are_not_one_run_are_refused(order: str) -> None:
    with pytest.raises(ConfigError, match=r"layer\.0 has strides .* not one run"):
        pool_of(caches(order), config(), "tag")


def test_element_types_without_a_name_move_as_bytes() -> None:
    pool = pool_of(caches("LBHNC", torch.float8_e5m2), config(), "tag")
    assert pool.layout.dtype == "uint8"
    assert pool.layout.slab_page_bytes == H * N * C


def test_layers_that_share_a_cache_are_one() -> None:
    views = caches("LBHNC")
    views["layer.2"] = views["layer.0"]
    assert pool_of(views, config(), "tag").layout.num_layers == 2


def test_blocks_that_are_padded_are_stepped_over() -> None:
    wide = torch.zeros(L, B, H * N * C + 8)
    views = {
        f"layer.{i}": wide[i].as_strided(
            (B, H, N, C), (H * N * C + 8, N * C, C, 1), i * wide[0].numel()
        )
        for i in range(L)
    }
    pool = pool_of(views, config(), "tag")
    views["layer.1"][3] = 7.0
    assert (pool.read_pages([3]).view(torch.float32)[0, 1] == 7.0).all()


@pytest.mark.parametrize("order", [*ORDERS])
@pytest.mark.parametrize("parts", [1, 2])
def test_plain_blocks_are_k_and_v_of_tokens(order: str, parts: int) -> None:
    """As the kernels read them: K and V are the halves of the content."""
    views = caches(order, parts=parts)
    made = config()
    made.kv_cache_groups[0].kv_cache_spec.head_size = C // 2
    one_array = parts == 1 or order in ("LBNHC", "LHBNC")
    if not one_array and order != "LBHNC":
        with pytest.raises(ConfigError, match="not one run"):
            pool_of(views, made, "tag", plain=True)
        return
    pool = pool_of(views, made, "tag", plain=True)
    layout = pool.layout
    assert (layout.opaque, layout.attention) == (("", "mha") if one_array else ("tag", "fused"))
    if not one_array:
        return
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (L, H, C // 2)
    token, tokens = 3, N // parts
    kernel_block, slot = 5 * parts + token // tokens, token % tokens
    views["layer.2"][kernel_block, 1, slot] = torch.arange(C).to(torch.bfloat16)
    assert pool.k(2)[5, token, 1].tolist() == [0, 1, 2]
    assert pool.v(2)[5, token, 1].tolist() == [3, 4, 5]
    assert sum(int(slab.count_nonzero()) for slab in (pool.k(2), pool.v(2))) == C - 1


def test_plain_latent_vectors() -> None:
    views = {name: view[:, :1].contiguous() for name, view in caches("LBNHC").items()}
    pool = pool_of(views, config(MLAAttentionSpec(N)), "tag", plain=True)
    assert (pool.layout.attention, pool.layout.head_dim, pool.layout.opaque) == ("mla", C, "")
    views["layer.1"][5, 0, 3] = 7.0
    assert (pool.latent(1)[5, 3] == 7.0).all()
    assert int(pool.latent(1).count_nonzero()) == C


@pytest.mark.parametrize(
    ("changed", "backends", "plain"),
    [
        ({}, ["FLASH_ATTN"], True),
        ({}, [*PLAIN], True),
        ({"head_size_v": 0}, ["TRITON_MLA"], True),
        ({"kv_quant_mode": SimpleNamespace(name="FP8_PER_TENSOR")}, ["FLASH_ATTN"], True),
        ({}, ["CPU_ATTN"], False),
        ({}, ["FLASH_ATTN", "CPU_ATTN"], False),
        ({"kv_quant_mode": SimpleNamespace(name="NVFP4")}, ["FLASH_ATTN"], False),
        ({"kv_quant_mode": SimpleNamespace(name="INT8_PER_TOKEN_HEAD")}, ["TRITON_ATTN"], False),
        ({"state_content_bytes": 656}, ["FLASHMLA"], False),
        ({"num_head_slots": 3}, ["FLASH_ATTN"], False),
        ({"head_size_v": 3}, ["FLASH_ATTN"], False),
    ],
)
def test_which_blocks_are_plain(changed: dict[str, Any], backends: list[str], plain: bool) -> None:
    spec = FullAttentionSpec(N)
    vars(spec).update(changed)
    assert is_plain(spec, backends) is plain


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kv_cache_groups": []}, "0 KV cache groups"),
        ({"kv_cache_groups": config().kv_cache_groups * 2}, "2 KV cache groups"),
        ({"kv_cache_groups": config(MambaSpec(N)).kv_cache_groups}, "MambaSpec"),
        ({"kv_cache_groups": config(host_resident=True).kv_cache_groups}, r"\[0\] .* device"),
        ({"kv_cache_groups": config(enable_kv_transfer=False).kv_cache_groups}, "not to be sent"),
    ],
)
def test_caches_are_refused_by_name(changed: dict[str, Any], words: str) -> None:
    made = config()
    vars(made).update(changed)
    with pytest.raises(ConfigError, match=words):
        BlockGroups.of(made)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("plain", [True, False])
def test_window_groups_lie_in_the_memory_of_the_first_layers(order: str, plain: bool) -> None:
    views, made = grouped(order)
    for group in made.kv_cache_groups:
        group.kv_cache_spec.head_size = C // 2
    BlockGroups.of(made)
    pool = pool_of(views, made, "tag", plain=plain)
    assert [group.window for group in pool.layout.windows] == [9, 9]
    assert [group.layout.num_layers for group in pool.layout.windows] == [L, L - 1]
    assert all(pool.layout.is_shared(group) for group in pool.layout.windows)
    names = [group.name for group in pool.layout.groups]
    assert len(set(names)) == 2
    views["2.layer.1"][5] = 7.0
    for one in (pool, pool.group(names[0]), pool.group(names[1])):
        written = one.read_pages([5]).view(torch.bfloat16).flatten(2)
        assert (written.flatten(2).float().sum(-1) > 0).any()
    # Which layers a group has is a part of its name.
    made.kv_cache_groups[2].layer_names.reverse()
    assert pool_of(views, made, "tag", plain=plain).layout.groups[1].name != names[1]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"block_size": 8}, "group 2 of SlidingWindowSpec: block_size is 8"),
        ({"num_kv_heads": 1}, "num_kv_heads is 1, that of the layers that keep every token is 2"),
        ({"page_size_bytes": 7}, "page_size_bytes is 7"),
        ({"layer_names": ["x"] * (L + 1)}, f"has {L + 1} layers, more than the {L}"),
        ({"extra_retained_tokens": 1}, "a draft model beside sliding windows"),
        ({"is_eagle_group": True}, "a draft model beside sliding windows"),
        ({"enable_kv_transfer": False}, "not to be sent"),
        ({"kv_cache_spec": MambaSpec(N)}, "groups of SlidingWindowSpec and of MambaSpec"),
        ({"kv_cache_spec": FullAttentionSpec(N)}, "2 KV cache groups that keep every token"),
    ],
)
def test_groups_are_refused_by_name(changed: dict[str, Any], words: str) -> None:
    _, made = grouped(**changed)
    with pytest.raises(ConfigError, match=words):
        BlockGroups.of(made)


def stated(order: str = "LBHNC", **more: Any) -> tuple[Any, Any]:
    """As `grouped`, but that the last group keeps states: bytes [block, 1, 1, content] in the
    memory of the second group's blocks, which are longer."""
    views, made = grouped(order)
    first, _, last = made.kv_cache_groups
    made.kv_cache_groups.remove(first)
    last.kv_cache_spec = MambaSpec(N)
    for group in made.kv_cache_groups:
        group.kv_cache_spec.page_size_bytes = H * N * C * 2  # bfloat16
    vars(last.kv_cache_spec).update(more)
    content = last.kv_cache_spec.state_content_size_bytes
    for name in last.layer_names:
        raw = views[name].view(torch.int8)
        views[name] = raw.as_strided((B, 1, 1, content), (raw.stride(0), content, content, 1))
    return views, made


@pytest.mark.parametrize("order", ["LBHNC", "BLNHC"])
@pytest.mark.parametrize("plain", [True, False])
def test_states_lie_in_blocks_of_the_first_layers(order: str, plain: bool) -> None:
    """Whatever the kernels keep of KV, blocks move whole: a state is not an array of tokens."""
    views, made = stated(order)
    pool = pool_of(views, made, "tag", plain=plain)
    assert pool.layout.opaque == "tag"
    (group,) = pool.layout.windows
    assert pool.layout.is_shared(group)
    assert (group.first_page(2 * N), group.first_page(2 * N + 1)) == (1, 2)  # of the last token
    views["2.layer.1"][5] = 7
    states = pool.group(group.name).read_pages([5]).flatten(2)
    assert (states.shape[1], states.shape[2:].numel()) == (L - 1, H * N * C * 2)
    content = made.kv_cache_groups[1].kv_cache_spec.state_content_size_bytes
    assert (states[0, 1, :content] == 7).all()
    assert states.sum() == 7 * content
    # The same block of KV is the same memory.
    assert pool.read_pages([5])[0, 1].sum() == states.sum()
    # What a state is made of is a part of the group's name.
    _, other = stated(order, shapes=((5, 4),))
    assert pool_of(views, other, "tag").layout.groups[0].name != group.name


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"page_size_bytes": 7}, "group 1 of MambaSpec: page_size_bytes is 7, .* is 96$"),
        ({"mamba_cache_mode": "all"}, "--mamba-cache-mode is all"),
        ({"block_size": 8}, "--mamba-cache-mode is align, with blocks of 8 tokens"),
        ({"num_speculative_blocks": 1}, "a draft model beside states"),
        ({"state_content_size_bytes": 97}, "a state has 97 bytes, a block of KV 96"),
        ({"state_content_size_bytes": 76}, r"states are \(8, 1, 1, 80\), must be 8 of 76 bytes"),
    ],
)
def test_states_are_refused_by_name(changed: dict[str, Any], words: str) -> None:
    views, made = stated()
    vars(made.kv_cache_groups[1].kv_cache_spec).update(changed)
    with pytest.raises(ConfigError, match=words):
        pool_of(views, made, "tag")


# --- settings that transfers do not go with -------------------------------------------------------


def vllm_config(**changed: Any) -> Any:
    """vLLM's settings as transfers want them, but for what has `changed`."""
    model = dict.fromkeys(("is_encoder_decoder", "enable_sleep_mode", "enable_cumem_allocator"))
    cache = {"enable_prefix_caching": True, "use_replayssm": False, "prefix_match_unit": None}
    parts: dict[str, dict[str, Any]] = {
        "parallel_config": dict.fromkeys(PARALLEL, 1), "model_config": model,
        "cache_config": cache, "device_config": {"device_type": "cuda"},
        "kv_transfer_config": {"is_kv_consumer": True},
    }  # fmt: skip
    for name, value in changed.items():
        next(part for part in parts.values() if name in part)[name] = value
    return SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in parts.items()})


STATES = BlockGroups(N, windows=(WindowLayers(1, "s", STATE_WINDOW, N),))
WINDOWS = BlockGroups(N, windows=(WindowLayers(1, "w", 9),))


NOT_WINDOWED = {"policy": "lru", "host_memory": "4x", "compute_below": 9, "recompute_below": 9}


@pytest.mark.parametrize(
    ("changed", "groups", "said", "words"),
    [
        *(({name: 2}, BlockGroups(N), {}, f"{name} is 2, must be 1") for name in PARALLEL),
        ({"is_encoder_decoder": True}, BlockGroups(N), {}, "an encoder-decoder"),
        ({"enable_sleep_mode": True}, BlockGroups(N), {}, "enable_sleep_mode is True, must be F"),
        ({"use_replayssm": True}, STATES, {}, "--use-replayssm"),
        ({"prefix_match_unit": 2}, STATES, {}, "--prefix-match-unit is 2"),
        *(
            ({}, groups, {name: value}, f"{name}: is {value!r}; leave it out .* keep {kept}")
            for name, value in NOT_WINDOWED.items()
            for groups, kept in ((WINDOWS, "a window, or start vLLM with"), (STATES, "a state$"))
        ),
        ({"is_kv_consumer": False}, BlockGroups(N), {"host_memory": "4x"}, "a kv_producer alone"),
        (
            {"enable_prefix_caching": False}, BlockGroups(N), {"host_memory": "4x"},
            "host_memory: the prefix cache is off",
        ),
    ],
)  # fmt: skip
def test_settings_are_refused_by_name(
    changed: dict[str, Any], groups: BlockGroups, said: dict[str, Any], words: str
) -> None:
    """Of vLLM, and of the connector: each is taken where the other one is another."""
    check_engine(options("d"), vllm_config(), groups)
    check_engine(options("d", **said), vllm_config(), BlockGroups(N))
    if said:
        check_engine(options("d"), vllm_config(**changed), groups)
    check_engine(options("d"), vllm_config(enable_sleep_mode=True, device_type="cpu"), groups)
    with pytest.raises(ConfigError, match=words):
        check_engine(options("d", **said), vllm_config(**changed), groups)


def test_memory_that_may_be_released_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for device, lines in (("cpu", 0), ("cuda", 1)):
        config = vllm_config(enable_cumem_allocator=True, device_type=device)
        check_engine(options("d"), config, BlockGroups(N))
        assert caplog.text.count("--enable-cumem-allocator") == lines
