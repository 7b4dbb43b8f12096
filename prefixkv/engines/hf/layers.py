"""What each layer of a model keeps of a text: KV, on the pages of a pool; a recurrent state, in a
slot of a StatePool; both; or nothing, as experts by themselves.

The config of a model that only attends says which layers see a window of the last tokens alone. Of
others transformers' own cache says what a layer keeps, and a forward of two tokens shows the
shapes, and which module reads and writes the state.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from transformers import DynamicCache

from prefixkv import StateTensor
from prefixkv.errors import ConfigError

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
    text is longer than the window. `mixers` maps a layer to the module that reads and writes its
    state; transformers' `cache` lends it the state of some sequences.
    """

    full: tuple[int, ...]
    parts: tuple[StatePart, ...] = ()
    mixers: tuple[tuple[int, Any], ...] = ()
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
    """Return what the layers keep of texts of at most `context` tokens.

    Costs a forward of two tokens where it is not attention alone. Raises ConfigError for a layer
    that keeps something else, or whose state is not in transformers' cache.
    """
    config = model.config.get_text_config()
    if not has_states(config):
        window, sliding = find_windows(config, context)
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
    return Layers(full, parts, tuple(mixers.items()), cache)


def has_states(config: Any) -> bool:
    """Tell by a text config whether a model has layers that do not attend."""
    return bool({*(getattr(config, "layer_types", None) or ())} - ATTENTION)


def find_windows(config: Any, context: int) -> tuple[int, tuple[int, ...]]:
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
