"""What each layer of a model keeps of a text: KV, on the pages of a pool; a recurrent state, in a
slot of a StatePool; both; or nothing, as experts by themselves. Models that are refused by their
config, and recurrent layers on slots.

The config of a model that only attends says which layers see a window of the last tokens alone. Of
others transformers' own cache says what a layer keeps, and a forward of two tokens shows the
shapes, and which module reads and writes the state.

A recurrent layer must not carry one sequence's state into the next, so it computes those of a row
apart: those with one new token as a batch, the others one after the other. Each begins from a copy
of the state in its source, and what it leaves goes to its slot: a checkpoint stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from transformers import DynamicCache

from prefixkv import StatePool, StateTensor
from prefixkv.errors import ConfigError
from prefixkv.spi import MAX_INDEX, GroupPages, Pages

ATTENTION: Final = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that keep KV and nothing else."""

DTYPES: Final = {
    torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
}  # fmt: skip

# What a layer keeps, KV and state, by the class that transformers' cache has for it.
_KEEPS: Final = {
    "DynamicLayer": (True, False),
    "DynamicSlidingWindowLayer": (True, False),
    "LinearAttentionLayer": (False, True),
    "LinearAttentionAndFullAttentionLayer": (True, True),
    "LinearAttentionAndSlidingWindowAttentionLayer": (True, True),
    "DummyLayer": (False, False),
}
_ROPE_BY_LENGTH: Final = ("dynamic", "longrope")
_CACHE_NAMES: Final = ("cache", "cache_params", "past_key_values")

StateKind = Literal["conv", "recurrent"]


class StatePart(NamedTuple):
    """One tensor of one layer's state: the last inputs of a convolution, or what recurs. `number`
    tells several of a kind apart; `shape` is that of one sequence."""

    layer: int
    kind: StateKind
    number: int
    shape: tuple[int, ...] = ()
    dtype: str = ""

    @property
    def name(self) -> str:
        """Name of the tensor in a StatePool."""
        return f"{self.layer}.{self.kind}.{self.number}"

    def of(self, layer: Any) -> dict[int, Any]:
        """Return the tensors of this kind that a layer of transformers' cache has, by number; some
        are None."""
        states: dict[int, Any] = getattr(layer, f"{self.kind}_states")
        return states


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model by what they keep.

    `full` layers have KV of every token; the i-th is layer i of the KV pool. `sliding` layers have
    KV of the last `window` tokens; the i-th is layer i of the window group. There are none where no
    text is longer than the window. transformers' `cache` lends the modules that read and write
    states (`PagedMixer`) those of some sequences.
    """

    full: tuple[int, ...]
    parts: tuple[StatePart, ...] = ()
    cache: Any = None
    sliding: tuple[int, ...] = ()
    window: int = 0

    @property
    def tensors(self) -> list[StateTensor]:
        """As a StatePool has them: a recurrent part has its heads, a convolution's has one."""
        tensors = []
        for part in self.parts:
            recurs = part.kind == "recurrent"
            heads, shape = (part.shape[0], part.shape[1:]) if recurs else (1, part.shape)
            # The KV layer that follows, or the last: state and KV are in one stage.
            at = min(sum(layer < part.layer for layer in self.full), len(self.full) - 1)
            tensors.append(StateTensor(part.name, at, heads, shape, part.dtype))
        return tensors


def find_layers(model: Any, context: int) -> Layers:
    """Return what the layers keep of texts of at most `context` tokens; recurrent ones compute on
    slots from then on where they get a plan, else as before.

    Costs a forward of two tokens where it is not attention alone. Raises ConfigError for a layer
    that keeps something else, or whose state is not in transformers' cache.
    """
    config = model.config.get_text_config()
    if not _has_states(config):
        window, sliding = _find_windows(config, context)
        full = tuple(at for at in range(int(config.num_hidden_layers)) if at not in sliding)
        return Layers(full, sliding=sliding, window=window)
    # 1. By the cache that transformers makes for it.
    try:
        cache = DynamicCache(config=config)
    except Exception as error:  # whatever an unknown kind of layer raises
        raise ConfigError(f"it has no cache: {error!r}") from error
    names = [type(layer).__name__ for layer in cache.layers]
    if unknown := sorted({*names} - {*_KEEPS}):
        raise ConfigError(f"it has layers of {', '.join(unknown)}")
    full = tuple(at for at, name in enumerate(names) if _KEEPS[name][0])
    recurrent = [at for at, name in enumerate(names) if _KEEPS[name][1]]
    # Pages are what a cache of prefixes consists of, and what a checkpoint of a state ends on.
    if not full:
        raise ConfigError("none of its layers has KV")
    # 2. By a forward: shapes, and modules.
    try:
        mixers = _find_mixers(model, cache, recurrent)
        parts = tuple(part for at in recurrent for part in _parts(at, cache.layers[at]))
    except (AttributeError, KeyError, TypeError) as error:  # another interface of transformers
        raise ConfigError(f"its states are not found: {error!r}") from error
    for at in recurrent:
        if at not in mixers or not cache_argument(mixers[at]):
            raise ConfigError(f"layer {at} keeps its state by itself")
    for part in parts:
        if part.dtype not in DTYPES.values():
            raise ConfigError(f"layer {part.layer} has {part.kind} of {part.dtype}")
    for mixer in mixers.values():
        if not isinstance(mixer, PagedMixer):
            kind = type(mixer)
            named = {"cache_argument": cache_argument(mixer), "__module__": kind.__module__}
            mixer.__class__ = type(kind.__name__, (PagedMixer, kind), named)
    return Layers(full, parts, cache)


def check_served(model: Any, context: int | None) -> int:
    """Return the longest context that is served: `context`, or what the model was made for.

    Raises ConfigError, which names the setting, for a model that needs more than attention to all
    earlier tokens on pages of K and V.
    """
    config = model.config.get_text_config()
    # 1. Kinds of models that do not call our attention, or not for all of their text.
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError("it has an encoder")
    # Some with recurrent layers do go through it and do not say so.
    can_set = getattr(model, "_can_set_attn_implementation", None)
    told = getattr(model, "_supports_attention_backend", False)
    if not told and not (_has_states(config) and can_set is not None and can_set()):
        raise ConfigError("its attention does not go through transformers' attention interface")
    # 2. The length, which the checks of windows below need.
    limit = getattr(config, "max_position_embeddings", None)
    if context is None:
        context = limit
    if not isinstance(context, int) or not 0 < context <= (limit or MAX_INDEX):
        kind = config.model_type
        raise ConfigError(f"context is {context!r}, {kind} was made for {limit} tokens")
    # 3. Attention of another kind.
    for name in ("attn_logit_softcapping", "kv_lora_rank", "attention_chunk_size"):
        if getattr(config, name, None):
            raise ConfigError(f"{name} is {getattr(config, name)}")
    if getattr(config, "use_bidirectional_attention", False):
        raise ConfigError("its tokens see later ones (use_bidirectional_attention)")
    # Pages of layers that keep every token are what a cache of prefixes consists of.
    window, sliding = _find_windows(config, context)
    why = ""
    if len(sliding) == config.num_hidden_layers:
        why = "no layer attends to all tokens"
    elif sliding and _has_states(config):
        why = "it has recurrent layers beside a window"
    if why:
        raise ConfigError(
            f"{why}: its sliding window has {window} tokens, the context {context}; with "
            f"context={window} it would be"
        )
    # 4. Positions. The parameters are one dict, or one per kind of layer. Cached KV can be reused
    # only if it does not depend on how long its text became.
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(one for one in ropes.values() if isinstance(one, dict))):
        if rope.get("rope_type") in _ROPE_BY_LENGTH:
            raise ConfigError(
                f"its rope is {rope['rope_type']}: KV depends on the length of the text"
            )
    return context


def _has_states(config: Any) -> bool:
    """Tell by a text config whether a model has layers that do not attend."""
    return bool({*(getattr(config, "layer_types", None) or ())} - ATTENTION)


def _find_windows(config: Any, context: int) -> tuple[int, tuple[int, ...]]:
    """Return by a text config the tokens that a token sees in layers with a window, itself among
    them, and these layers; 0 and () where no text of `context` tokens is longer."""
    window = getattr(config, "sliding_window", None)
    if not window or window >= context or getattr(config, "use_sliding_window", True) is False:
        return 0, ()
    # Without kinds of layers all have it.
    num = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * num
    layers = tuple(at for at, kind in enumerate(kinds[:num]) if "sliding" in kind)
    return (int(window), layers) if layers else (0, ())


def cache_argument(module: Any) -> str:
    """Return the name of the argument by which a module takes its cache; "" if there is none."""
    # A module that computes on slots already says it by itself.
    if said := getattr(module, "cache_argument", ""):
        return str(said)
    named = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHE_NAMES if name in named), "")


def _find_mixers(model: Any, cache: Any, layers: Sequence[int]) -> dict[int, Any]:
    """Return by layer the module that writes its state, by a forward that fills the cache."""
    mixers: dict[int, Any] = {}

    def note(module: Any, *_: Any) -> None:
        # Called where a module has ended, so the innermost comes first.
        at = module.layer_idx
        if at in layers and at not in mixers and next(_parts(at, cache.layers[at]), None):
            mixers[at] = module

    hooks = [
        module.register_forward_hook(note)
        for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)
    ]  # fmt: skip
    try:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
    finally:
        for hook in hooks:
            hook.remove()
    return mixers


def _parts(at: int, layer: Any) -> Iterator[StatePart]:
    """Yield the tensors of one layer's state, as a forward has left them in the cache."""
    for kind in get_args(StateKind):
        for number, state in StatePart(at, kind, 0).of(layer).items():
            if state is not None:  # a layer of convolutions alone
                dtype = str(state.dtype).removeprefix("torch.")
                yield StatePart(at, kind, number, tuple(state.shape[1:]), dtype)


NO_SLOT: Final = -1
"""Source of a sequence that begins: its state is zero."""


class Row(NamedTuple):
    """New tokens of one sequence; the KV of those before `start` is in its pages.

    `pages` are its page ids, for at least `end` tokens; `window` its pages in the window group,
    from the first token that the first new one sees. `wanted` says which of the new tokens need
    logits. With recurrent layers `source` is the slot that has the state behind `start` tokens, and
    `slot` gets the state behind `end`; it may be the source. `saves` are the slots that get its
    state besides, by number of tokens: above `start`, at most `end`.
    """

    tokens: Any  # integers, at least one
    start: int
    pages: Pages
    window: GroupPages | None = None
    wanted: Sequence[int] = (-1,)
    source: int = NO_SLOT
    slot: int = NO_SLOT
    saves: Mapping[int, int] = MappingProxyType({})

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class StateMemory:
    """A StatePool by layers: `views[layer]` has each part of the layer's state with its memory,
    [slots, *part.shape]. One thread's."""

    def __init__(self, pool: StatePool, layers: Layers) -> None:
        self.pool, self.cache = pool, layers.cache
        self.views: dict[int, list[tuple[StatePart, torch.Tensor]]] = {}
        for part, tensor in zip(layers.parts, layers.tensors, strict=True):
            view = pool.view(part.name, tensor.layer).view(-1, *part.shape)
            self.views.setdefault(part.layer, []).append((part, view))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy states from one slot to another each, all of them at once."""
        if not copies:
            return
        for views in self.views.values():
            for _, view in views:
                sources, slots = torch.tensor(copies, device=view.device).T
                view.index_copy_(0, slots, view[sources])


class _Group(NamedTuple):
    """Sequences that a recurrent layer computes in one call."""

    tokens: torch.Tensor  # indices into the packed row: [sequences, new tokens of each]
    sources: torch.Tensor  # [sequences]; 0 for one that begins
    slots: torch.Tensor
    begins: torch.Tensor | None  # bool [sequences]; None: none of them
    save: int  # the slot that gets the state of a single sequence besides, or NO_SLOT


class StatePlan:
    """The states that one forward reads and writes, for every recurrent layer."""

    def __init__(
        self, memory: StateMemory, rows: Sequence[Row], device: torch.device | str = "cpu"
    ) -> None:
        # A state of a former owner, or none, would answer wrongly and raise nothing.
        assert all((row.start == 0) == (row.source == NO_SLOT) for row in rows), rows
        assert len({row.slot for row in rows}) == len(rows), rows
        self._memory, self._device = memory, device
        self._groups: list[_Group] = []
        # Those with one new token and nothing to save as one group. The others one after the other,
        # cut where a state is saved: each part begins with what the one before has left in the
        # slot.
        singles: list[tuple[int, int, int]] = []
        first = 0
        for row in rows:
            if len(row.tokens) == 1 and not row.saves:
                singles.append((first, row.source, row.slot))
            else:
                begin, source = row.start, row.source
                for end in sorted({*row.saves, row.end}):
                    place = first + begin - row.start
                    self._add([(place, source, row.slot)], end - begin, row.saves.get(end, NO_SLOT))
                    begin, source = end, row.slot
            first += len(row.tokens)
        if singles:
            self._add(singles, 1)

    def _add(self, members: Sequence[tuple[int, int, int]], num: int, save: int = NO_SLOT) -> None:
        """Plan one call of each layer: `num` new tokens of each member, which is its first token's
        place, its source and its slot."""
        firsts, sources, slots = torch.tensor(members).T.to(self._device)
        tokens = firsts[:, None] + torch.arange(num, device=self._device)
        begins = sources == NO_SLOT if any(one[1] == NO_SLOT for one in members) else None
        self._groups.append(_Group(tokens, sources.clamp(min=0), slots, begins, save))

    def mix(
        self, mixer: Any, forward: Callable[..., torch.Tensor],
        hidden: torch.Tensor, options: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        """Return what a layer makes of `hidden`, [1, N, size], as that; states go to the slots.

        `forward` is the layer's own. Raises ConfigError for what cannot be computed by sequences.
        """
        for name, value in options.items():
            if isinstance(value, torch.Tensor | tuple | list):
                raise ConfigError(f"{type(mixer).__name__} is called with {name}")
        # A lone group is the whole row, in its order.
        if len(self._groups) == 1:
            (group,) = self._groups
            rows = hidden.reshape(*group.tokens.shape, -1)
            return self._mix_group(mixer, forward, group, rows, options).reshape(hidden.shape)
        out = torch.empty_like(hidden)
        for group in self._groups:
            rows = hidden[0][group.tokens]  # [sequences, tokens, size]
            out[0, group.tokens] = self._mix_group(mixer, forward, group, rows, options)
        return out

    def _mix_group(
        self, mixer: Any, forward: Callable[..., torch.Tensor], group: _Group,
        rows: torch.Tensor, options: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        views = self._memory.views[mixer.layer_idx]
        layer = self._memory.cache.layers[mixer.layer_idx]
        for part, view in views:
            state = view.index_select(0, group.sources)
            if group.begins is not None:
                state[group.begins] = 0
            part.of(layer)[part.number] = state
        mixed = forward(rows, **options, **{mixer.cache_argument: self._memory.cache})
        if not isinstance(mixed, torch.Tensor):
            raise ConfigError(f"{type(mixer).__name__} returns a {type(mixed).__name__}")
        for part, view in views:
            state = part.of(layer)[part.number]
            view.index_copy_(0, group.slots, state)
            if group.save != NO_SLOT:
                view[group.save].copy_(state[0])
        return mixed


class PagedMixer:
    """Stands in front of a recurrent layer's class: with a plan it computes on slots."""

    layer_idx: int
    cache_argument: str

    def forward(self, *args: Any, prefixkv_plan: Any = None, **options: Any) -> Any:
        own: Callable[..., Any] = super().forward  # type: ignore[misc]
        if prefixkv_plan is None:
            return own(*args, **options)
        if prefixkv_plan.states is None:
            raise ConfigError(f"{type(self).__name__} needs the states of its sequences")
        if args:
            options["hidden_states"], *args = args  # type: ignore[assignment]
        if args:
            raise ConfigError(f"{type(self).__name__} is called with {len(args) + 1} values")
        hidden = options.pop("hidden_states")
        options.pop(self.cache_argument, None)  # None, since the model runs without a cache
        return prefixkv_plan.states.mix(self, own, hidden, options)
