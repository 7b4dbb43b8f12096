"""Recurrent layers on the slots of a StatePool.

A recurrent layer must not carry one sequence's state into the next, so it computes those of a row
apart: those with one new token as a batch, the others one after the other. Each begins from a copy
of the state in its source, and what it leaves goes to its slot: a checkpoint stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from prefixkv import StatePool
from prefixkv.engines.hf.layers import Layers, StatePart, cache_argument
from prefixkv.engines.hf.rows import NO_SLOT, Row
from prefixkv.errors import ConfigError


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


def page_mixers(layers: Layers) -> None:
    """Let the recurrent layers compute on slots where they get a plan; else they are as before."""
    for _, mixer in layers.mixers:
        if not isinstance(mixer, PagedMixer):
            kind = type(mixer)
            named = {"cache_argument": cache_argument(mixer), "__module__": kind.__module__}
            mixer.__class__ = type(kind.__name__, (PagedMixer, kind), named)
