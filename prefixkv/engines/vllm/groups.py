"""vLLM's KV cache groups: layers that share a block table. One group keeps every token; in others
each token sees a window, and vLLM frees the blocks that have fallen out of it; in others again a
block holds a state, which is all that the layers keep.

With windows or states a transfer ends before the prompt's last token, which vLLM computes in any
case: the window of that token is one token longer than that of the first new one. A state has no
way back to an earlier token, so prefill computes no further either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Self

from prefixkv.engines.vllm.versions import check_takes
from prefixkv.errors import ConfigError
from prefixkv.spi import pages_for

LATENT: Final = "MLAAttentionSpec"
FULL: Final = ("FullAttentionSpec", LATENT)
"""Kinds of cache in which every token's KV stays in its block until the request ends."""
WINDOWED: Final = "SlidingWindowSpec"
STATE: Final = "MambaSpec"
"""Kind of cache that vLLM keeps a state in, of a request or at the ends of blocks: of Mamba, gated
delta nets, short convolutions and others."""
STATE_WINDOW: Final = 2
"""Window of a state in a transfer, tokens: what is sent behind a prompt is the block of its last
token alone."""

_SAME: Final = (
    "block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode",
    "state_content_bytes", "num_head_slots", "page_size_bytes",
)  # fmt: skip
_INSTEAD: Final = (
    "with --disable-hybrid-kv-cache-manager vLLM keeps all tokens in all layers, in one group, if "
    "the model has no state"
)

Block = int

Tables = Sequence[Sequence[Block]]
"""vLLM's block table of one request in each group, with the null block where a block has fallen out
of the window, or no state was kept."""


class WindowLayers(NamedTuple):
    """A window group: its number among the groups, its name in the handshake, and the tokens that
    its layers see, the own one included. Of a state `table_tokens` is the number of tokens per
    entry of its block table, and `most_blocks` the most that a request has at once; else 0."""

    number: int
    name: str
    window: int
    table_tokens: int = 0
    most_blocks: int = 0

    @property
    def is_state(self) -> bool:
        return self.table_tokens > 0


class WindowBlocks(NamedTuple):
    """Consecutive blocks of a request, from its block number `first` on."""

    first: int
    blocks: tuple[Block, ...]


class BlockGroups(NamedTuple):
    """The KV cache groups of a server.

    `full` is the number of the one that keeps every token, `spec` vLLM's description of it; states
    are among `windows`. `step_tokens` is the most tokens of a request that vLLM has under way at
    once, `hash_size` the tokens of an entry of `Request.block_hashes` (0: a block).

    >>> groups = BlockGroups(32, windows=(WindowLayers(1, "w", 96),), step_tokens=64)
    >>> groups.num_sent(300), groups.first_block(groups.windows[0], 299)
    (299, 6)
    >>> groups.blocks_of(300), groups.blocks_of(32), BlockGroups(32).blocks_of(300)
    (16, 2, 10)
    >>> state = WindowLayers(1, "s", STATE_WINDOW, table_tokens=32, most_blocks=3)
    >>> BlockGroups(32, windows=(state,)).window_blocks([[], [0, 0, 7, 8]], 128, 0, 4)
    (WindowBlocks(first=3, blocks=(8,)),)
    """

    block_size: int
    full: int = 0
    windows: tuple[WindowLayers, ...] = ()
    step_tokens: int = 0
    hash_size: int = 0
    spec: Any = None

    @classmethod
    def of(cls, kv_cache: Any, step_tokens: int = 0) -> Self:
        """Raises ConfigError, by name, for a `KVCacheConfig` whose blocks are not transferred."""
        groups = kv_cache.kv_cache_groups
        kinds = [_kind_of(group) for group in groups]
        # 1. Exactly one group keeps every token: a transfer has one list of blocks that both
        #    servers count prefixes by.
        full = [number for number, kind in enumerate(kinds) if kind in FULL]
        takes = f"prefixkv's connector takes {', '.join(FULL)}, and {WINDOWED} or {STATE} beside it"
        off = [n for n, one in enumerate(groups) if one.host_resident or not one.enable_kv_transfer]
        others = sorted({kind for kind in kinds if kind not in (*FULL, WINDOWED, STATE)})
        refusals = {
            f"the KV cache is a {', '.join(kinds)}, must be one of {', '.join(FULL)}":
                len(groups) == 1 and not full,
            f"the model has a KV cache group of {', '.join(others)}: {takes}; {_INSTEAD}":
                bool(others),
            f"the model has KV cache groups of {WINDOWED} and of {STATE}: {takes}":
                WINDOWED in kinds and STATE in kinds,
            f"the model has {len(full)} KV cache groups that keep every token "
            f"({', '.join(kinds)}), must have 1; {_INSTEAD}": len(full) != 1,
            f"KV cache groups {off} ({', '.join(kinds)}) are not on the device, or not to be sent":
                bool(off),
        }  # fmt: skip
        for why, is_so in refusals.items():
            if is_so:
                raise ConfigError(why)
        # 2. Blocks of all groups are alike, as they lie in the same memory.
        first = groups[full[0]]
        windows = tuple(
            _layers_of(number, group, first)
            for number, group in enumerate(groups)
            if number != full[0]
        )
        spec, hash_size = first.kv_cache_spec, kv_cache.hash_block_size or 0
        return cls(spec.block_size, full[0], windows, step_tokens, hash_size, spec)

    @property
    def has_states(self) -> bool:
        return any(group.is_state for group in self.windows)

    @property
    def is_latent(self) -> bool:
        return type(self.spec).__name__ == LATENT

    def num_sent(self, num_prompt_tokens: int) -> int:
        """Return the tokens of a prompt that a transfer carries."""
        return num_prompt_tokens - 1 if self.windows else num_prompt_tokens

    def first_block(self, group: WindowLayers, num_tokens: int) -> int:
        """Return the number of the first block that vLLM keeps behind `num_tokens` tokens."""
        return max(0, num_tokens + 1 - group.window) // self.block_size

    def window_blocks(
        self, tables: Tables, num_tokens: int, first: int, stop: int
    ) -> tuple[WindowBlocks, ...]:
        """Return, by window group, those of a request's blocks `first` to `stop` that vLLM keeps
        behind `num_tokens` tokens, which both servers send and get. A state is asked for when vLLM
        computes the last of them: its block has no other state then."""
        found = []
        for group in self.windows:
            table = tables[group.number]
            start = min(max(first, self.first_block(group, num_tokens)), stop)
            if group.is_state and start < stop:
                entry = (num_tokens - 1) // group.table_tokens
                found.append(WindowBlocks(start, (table[entry],)))
            else:
                found.append(WindowBlocks(start, tuple(table[start:stop])))
        return tuple(found)

    def blocks_to_compute(self, num_sent: int) -> int:
        """Return the most blocks at once of a prompt of which `num_sent` tokens are sent."""
        return self.blocks_of(num_sent + (1 if self.windows else 0))

    def blocks_of(self, num_tokens: int) -> int:
        """Return the most blocks that a request has at once."""
        num_blocks = pages_for(num_tokens, self.block_size)
        return num_blocks + sum(
            min(
                num_blocks,
                group.most_blocks
                or pages_for(group.window - 1 + self.step_tokens, self.block_size) + 1,
            )
            for group in self.windows
        )

    def hashes(self, request: Any, start: int, end: int) -> list[Any]:
        """Return the hash of each whole block of tokens `start` to `end`. The last ones may be
        missing: where a hash depends on tokens after its block, and where vLLM has not made it."""
        size, found = self.block_size, request.block_hashes
        per_block = size // (self.hash_size or size)
        blocks = range(start // size, min(end // size, len(found) // per_block))
        return [found[(block + 1) * per_block - 1] for block in blocks]


def look_up_densely(manager: Any, full: int, wanted: Callable[[Any], bool]) -> None:
    """Have a `KVCacheManager` look for the prefix of each `wanted` request in the group `full`
    alone: the windows behind the prompt are loaded into new blocks. vLLM itself looks for a prefix
    that ends where all groups have what comes before."""

    def get_computed_blocks_for_connector(
        request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[Any, int, int, bool]:
        # Of 0.33.0 on; before, vLLM's own function takes none.
        most = () if max_cache_hit_length is None else (max_cache_hit_length,)
        if not (wanted(request) and manager.prefix_cache_lookup_enabled(request)):
            return *manager.get_computed_blocks(request, *most), False
        # At least one token behind the prefix is left to load: what is loaded ends before the
        # prompt's last token, and without any vLLM would load no window either.
        found, lengths = manager.coordinator.find_longest_cache_hit_per_group(
            request.block_hashes, min((request.num_tokens - 2, *most))
        )
        blocks = tuple(one if number == full else [] for number, one in enumerate(found))
        # True: where nothing is loaded after all, vLLM looks again in its own way.
        return manager.create_kv_cache_blocks(blocks), lengths[full], 0, True

    theirs = manager.get_computed_blocks_for_connector
    check_takes(get_computed_blocks_for_connector, theirs, theirs.__qualname__)
    manager.get_computed_blocks_for_connector = get_computed_blocks_for_connector


def _kind_of(group: Any) -> str:
    return type(group.kv_cache_spec).__name__


def _layers_of(number: int, group: Any, first: Any) -> WindowLayers:
    """Raise ConfigError where a group's blocks do not lie in the memory of those of `first`, the
    group that keeps every token, or hold more than a transfer carries."""
    spec, kept, kind = group.kv_cache_spec, first.kv_cache_spec, _kind_of(group)
    where, is_state = f"the KV cache group {number} of {kind}", kind == STATE
    instead = "" if is_state else f"; {_INSTEAD}"
    for name in ("page_size_bytes",) if is_state else _SAME:
        if getattr(spec, name) != getattr(kept, name):
            raise ConfigError(
                f"{where}: {name} is {getattr(spec, name)}, that of the layers that keep every "
                f"token is {getattr(kept, name)}{instead}"
            )
    if len(group.layer_names) > len(first.layer_names):
        raise ConfigError(
            f"{where} has {len(group.layer_names)} layers, more than the {len(first.layer_names)} "
            f"that keep every token{instead}"
        )
    drafts = spec.num_speculative_blocks if is_state else spec.extra_retained_tokens
    if drafts or group.is_eagle_group or first.is_eagle_group:
        raise ConfigError(
            f"{where}: a draft model beside {'states' if is_state else 'sliding windows'} is not "
            f"transferred{instead or '; leave out --speculative-config'}"
        )
    # Both servers must agree in a group's name: its layers depend on how vLLM shares them out.
    if not is_state:
        return WindowLayers(
            number, _name_of("window", number, group.layer_names), spec.sliding_window
        )
    # 1. "none": one block, in which the state is written over. 2. "align": a block table like the
    # other groups', with a state at the ends of some blocks, and the newest in the last one. vLLM
    # gives up those of a step when the second one behind it is scheduled: at its end, and where
    # that was a long one also one on its way.
    if spec.mamba_cache_mode == "none":
        most_blocks = 1
    elif spec.mamba_cache_mode == "align" and spec.block_size == kept.block_size:
        most_blocks = 3 * (1 + spec.num_prefill_checkpoint_blocks)
    else:
        raise ConfigError(
            f"{where}: --mamba-cache-mode is {spec.mamba_cache_mode}, with blocks of "
            f"{spec.block_size} tokens; none is taken, and align with those of the layers that "
            f"keep every token, {kept.block_size}"
        )
    name = _name_of("state", number, [*group.layer_names, f"{spec.mamba_type} {spec.shapes}"])
    return WindowLayers(number, name, STATE_WINDOW, spec.block_size, most_blocks)


def _name_of(kind: str, number: int, parts: Sequence[str]) -> str:
    return f"{kind}-{number}-{blake2b(chr(10).join(parts).encode(), digest_size=4).hexdigest()}"
