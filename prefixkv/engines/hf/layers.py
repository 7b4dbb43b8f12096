"""What each layer of a model keeps of a text: KV, on the pages of a pool; a recurrent state, in a
slot of a StatePool; both; or nothing, as experts by themselves.

The config of a model that only attends says which layers see a window of the last tokens alone. Of
others transformers' own cache says what a layer keeps, and a forward of two tokens shows the
shapes, and which module reads and writes the state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

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
    shape: tuple[int, ...]
    dtype: str

    @property
    def name(self) -> str:
        """Name of the tensor in a StatePool."""
        return f"{self.layer}.{self.kind}.{self.number}"


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model by what they keep.

    `full` layers have KV of every token; the i-th is layer i of the KV pool. `sliding` layers have
    KV of the last `window` tokens; the i-th is layer i of the window group. There are none where no
    text is longer than the window. `mixers` maps a layer to the module that reads and writes its
    state; transformers' `cache` lends it the state of some sequences.
    """

    num: int
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
            heads, head_shape = (
                (part.shape[0], part.shape[1:]) if part.kind == "recurrent" else (1, part.shape)
            )
            # The KV layer that follows, or the last: state and KV are in one stage.
            at = min(sum(layer < part.layer for layer in self.full), len(self.full) - 1)
            tensors.append(StateTensor(part.name, at, heads, head_shape, part.dtype))
        return tensors


def find_layers(model: Any, context: int) -> Layers:
    """Return what the layers keep of texts of at most `context` tokens.

    Costs a forward of two tokens where it is not attention alone. Raises ConfigError for a layer
    that keeps something else, or whose state is not in transformers' cache.
    """
    config = model.config.get_text_config()
    kind = config.model_type
    num = int(config.num_hidden_layers)
    if not has_states(config):
        window, sliding = find_windows(config, context)
        full = tuple(at for at in range(num) if at not in sliding)
        return Layers(num, full, sliding=sliding, window=window)
    # 1. By the cache that transformers makes for it.
    try:
        cache = DynamicCache(config=config)
    except Exception as error:  # whatever an unknown kind of layer raises
        raise ConfigError(f"{kind} is not served: it has no cache: {error!r}") from error
    names = [type(layer).__name__ for layer in cache.layers]
    if unknown := sorted({*names} - {*_KEEPS}):
        raise ConfigError(f"{kind} is not served: it has layers of {', '.join(unknown)}")
    full = tuple(at for at, name in enumerate(names) if _KEEPS[name][0])
    recurrent = [at for at, name in enumerate(names) if _KEEPS[name][1]]
    # Pages are what a cache of prefixes consists of, and what a checkpoint of a state ends on.
    if not full:
        raise ConfigError(f"{kind} is not served: none of its layers has KV")
    # 2. By a forward: shapes, and modules.
    try:
        mixers = _find_mixers(model, cache, recurrent)
        parts = [part for at in recurrent for part in _parts(kind, at, cache.layers[at])]
    except (AttributeError, KeyError, TypeError) as error:  # another interface of transformers
        raise ConfigError(f"{kind} is not served: its states are not found: {error!r}") from error
    for at in recurrent:
        if at not in mixers or not cache_argument(mixers[at]):
            raise ConfigError(f"{kind} is not served: layer {at} keeps its state by itself")
    return Layers(num, full, tuple(parts), tuple(mixers.items()), cache)


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
    running: list[Any] = []
    found: dict[int, Any] = {}

    @contextmanager
    def watched(at: int) -> Iterator[None]:
        layer = cache.layers[at]
        for name in ("update_conv_state", "update_recurrent_state"):
            # On this one object, in front of its class's.
            setattr(layer, name, _noting(getattr(layer, name), at, running, found))
        yield
        del layer.update_conv_state, layer.update_recurrent_state

    with ExitStack() as stack:
        for at in layers:
            stack.enter_context(watched(at))
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                before = module.register_forward_pre_hook(lambda one, _: running.append(one))
                after = module.register_forward_hook(lambda *_: running.pop() and None)
                stack.callback(before.remove)
                stack.callback(after.remove)
        device = next(model.parameters()).device
        ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
        given = {cache_argument(model): cache}
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **given)
    return found


def _noting(
    call: Callable[..., Any], layer: int, running: list[Any], found: dict[int, Any]
) -> Callable[..., Any]:
    """Wrap a method of a cache's layer to note the module that calls it."""

    def noting(*args: Any, **options: Any) -> Any:
        if running:
            found[layer] = running[-1]
        return call(*args, **options)

    return noting


def _parts(kind: str, at: int, layer: Any) -> list[StatePart]:
    """Return the tensors of one layer's state, as a forward has left them in the cache."""
    parts = []
    kinds: tuple[tuple[StateKind, dict[int, torch.Tensor | None]], ...] = (
        ("conv", layer.conv_states), ("recurrent", layer.recurrent_states),
    )  # fmt: skip
    for name, states in kinds:
        for number, state in states.items():
            if state is None:  # a layer of convolutions alone
                continue
            if state.dtype not in DTYPES:
                raise ConfigError(f"{kind} is not served: layer {at} has {name} of {state.dtype}")
            parts.append(StatePart(at, name, number, tuple(state.shape[1:]), DTYPES[state.dtype]))
    return parts
