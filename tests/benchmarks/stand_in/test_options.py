"""Options are checked, alone and against each other, and the message has the option, the value and
the bound."""

import inspect

import pytest

from benchmarks.stand_in import stand_in
from benchmarks.stand_in.options import RESERVE_TOKENS, StandInOptions
from prefixkv.errors import ConfigError
from prefixkv.paging import pages_for


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"seed": -1}, r"--seed is -1, must be in \[0, "),
        ({"conversations": 0}, r"--conversations is 0, must be in \[1, "),
        ({"turns": 0}, "--turns is 0"),
        ({"requests": 0}, "--requests is 0"),
        ({"concurrency": -2}, "--concurrency is -2"),
        ({"page_size": 0}, "--page-size is 0"),
        ({"layers": 0}, "--layers is 0"),
        ({"kv_heads": 0}, "--kv-heads is 0"),
        ({"head_dim": 2**30}, r"--head-dim is 1073741824, must be in \[1, 1048576\]"),
        ({"prefill_pages": 0}, "--prefill-pages is 0"),
        ({"decode_pages": 0}, "--decode-pages is 0"),
        ({"block_tokens": 513}, r"--block-tokens is 513, must be in \[1, 512\]"),
        ({"step_ms": float("nan")}, "--step-ms is nan"),
        (
            {"dtype": "int4"},
            "--dtype is 'int4', must be one of float32, float16, bfloat16, float8, uint8",
        ),
        ({"attention": "mqa"}, "--attention is 'mqa', must be one of mha, mla"),
        ({"layout": "strided"}, "--layout is 'strided'"),
        ({"decode_layout": "strided"}, "--decode-layout is 'strided'"),
        ({"prefill_tp": 3}, "--prefill-tp is 3: tp_size is 3, must divide num_kv_heads, 8"),
        (
            {"prefill_tp": 2, "decode_tp": 3, "kv_heads": 6},
            "--prefill-tp 2 and --decode-tp 3: tp_size",
        ),
        ({"policy": "lru:trust=5"}, "'trust' is no setting of lru"),
        ({"staging": "maybe"}, "--staging is 'maybe', must be one of on, off"),
        ({"staging_leases": 0.5}, "--staging-leases is 0.5"),
        (
            {"attention": "mla", "kv_heads": 2},
            "--kv-heads is 2, it has to be 1 with --attention mla",
        ),
    ],
)
def test_out_of_range(bad, why):
    with pytest.raises(ConfigError, match=why):
        StandInOptions(**bad)


def test_staging_is_for_slices_and_a_lease_takes_a_page():
    assert StandInOptions(prefill_tp=2, decode_tp=2).transport().staging_bytes == 0
    assert StandInOptions(prefill_tp=2, staging="off").transport().staging_bytes == 0
    usual = StandInOptions(prefill_tp=2, staging_leases=1.5).transport()
    assert (usual.lease_bytes, usual.staging_bytes) == (4 << 20, 6 << 20)
    large = StandInOptions(prefill_tp=2, layers=128)
    assert large.transport().lease_bytes >= large.page_bytes + 2 * 4096


def test_sizes_follow_the_attention():
    assert StandInOptions(layers=2, page_size=16).page_bytes == 16 * 2 * 2 * 8 * 128 * 2
    mla = StandInOptions(layers=2, page_size=16, attention="mla", dtype="float8")
    assert mla.page_bytes == 16 * 2 * 576
    assert (mla.heads, mla.dim) == (1, 576)


def test_a_pool_too_small_for_one_request():
    options = StandInOptions(conversations=2, turns=3)
    workload = options.workload()
    longest = workload.max_request_tokens
    enough = {
        "prefill_pages": pages_for(longest, 16),
        "decode_pages": pages_for(longest + RESERVE_TOKENS, 16),
    }
    StandInOptions(conversations=2, turns=3, **enough).check_pools(workload, 1 << 50)
    for name, needed in enough.items():
        small = StandInOptions(conversations=2, turns=3, **(enough | {name: needed - 1}))
        flag = name.replace("_", "-")
        with pytest.raises(
            ConfigError, match=f"--{flag} is {needed - 1}, at least {needed} are needed"
        ):
            small.check_pools(workload, 1 << 50)


def test_pools_larger_than_the_machine():
    options = StandInOptions()
    total = (options.prefill_pages + options.decode_pages) * options.page_bytes
    with pytest.raises(ConfigError, match=r"need \d+ bytes with their workers, \d+ are available"):
        options.check_pools(options.workload(), total)


def test_the_command_line_has_every_option_with_its_default():
    defaults = StandInOptions()
    parameters = inspect.signature(stand_in).parameters
    for name in StandInOptions.__dataclass_fields__:
        assert parameters[name].default == getattr(defaults, name), name


def test_default_pools_fit_in_8_gib():
    options = StandInOptions()
    options.check_pools(options.workload(), 7 << 30)
