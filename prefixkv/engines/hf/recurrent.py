"""Recurrent layers on the slots of a StatePool.

A recurrent layer must not carry one sequence's state into the next, so it computes those of a row
apart: those with one new token as a batch, the others one after the other. Each begins from a copy
of the state in its source, and what it leaves goes to its slot: a checkpoint stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from prefixkv import StatePool
from prefixkv.engines.hf.layers import Layers, StatePart, cache_argument
from prefixkv.errors import ConfigError

NO_SLOT: Final = -1
"""Source of a sequence that begins: its state is zero."""


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
        sources, slots = np.array(copies).T
        for views in self.views.values():
            for _, view in views:
                to = torch.from_numpy(slots.copy()).to(view.device)
                view.index_copy_(0, to, view[torch.from_numpy(sources.copy()).to(view.device)])


class StateRows(NamedTuple):
    """The states of the sequences of a forward.

    `sources`: the slot that has the state behind each sequence's `starts` tokens, NO_SLOT for one
    that begins. `slots`: the one that gets the state behind its `ends`; it may be the source.
    `saves`: by sequence, the slots that get its state besides, by number of tokens: above `starts`,
    at most `ends`.
    """

    memory: StateMemory
    sources: Sequence[int]
    slots: Sequence[int]
    saves: Mapping[int, Mapping[int, int]] = MappingProxyType({})


class _Group(NamedTuple):
    """Sequences that a recurrent layer computes in one call."""

    tokens: torch.Tensor  # indices into the packed row: [sequences, new tokens of each]
    sources: torch.Tensor  # [sequences]; 0 for one that begins
    slots: torch.Tensor
    save: int  # the slot that gets the state of a single sequence besides, or NO_SLOT
    begins: torch.Tensor | None  # bool [sequences]; None: none of them


class StatePlan:
    """The states that one forward reads and writes, for every recurrent layer. The new tokens of
    each sequence are [start, end), as in `Plan`."""

    def __init__(
        self, rows: StateRows, starts: Sequence[int], ends: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        # A state of a former owner, or none, would answer wrongly and raise nothing.
        assert all(
            (start == 0) == (source == NO_SLOT)
            for start, source in zip(starts, rows.sources, strict=True)
        ), (starts, rows.sources)
        assert len({*rows.slots}) == len(starts), rows.slots
        self._memory, self._device = rows.memory, device
        lens = [end - start for start, end in zip(starts, ends, strict=True)]
        firsts = np.cumsum([0, *lens[:-1]]).tolist()
        # Those with one new token and nothing to save as one group. The others one after the other,
        # cut where a state is saved: each part begins with what the one before has left in the
        # slot.
        single = [at for at, num in enumerate(lens) if num == 1 and not rows.saves.get(at)]
        self._groups = []
        if single:
            sources = [rows.sources[at] for at in single]
            self._groups.append(
                self._group(rows, single, sources, [firsts[at] for at in single], 1)
            )
        for at in sorted({*range(len(lens))} - {*single}):
            begin, saves = starts[at], rows.saves.get(at, {})
            for end in sorted({*saves, ends[at]}):
                source = rows.sources[at] if begin == starts[at] else rows.slots[at]
                place = firsts[at] + begin - starts[at]
                save = saves.get(end, NO_SLOT)
                self._groups.append(self._group(rows, [at], [source], [place], end - begin, save))
                begin = end

    def _group(
        self, rows: StateRows, members: list[int], sources: list[int], firsts: list[int], num: int,
        save: int = NO_SLOT,
    ) -> _Group:  # fmt: skip
        """Plan one call of each layer: `num` new tokens of each member, from `firsts` on."""
        begins = [source == NO_SLOT for source in sources]
        return _Group(
            (torch.tensor(firsts)[:, None] + torch.arange(num)).to(self._device),
            torch.tensor([max(0, source) for source in sources], device=self._device),
            torch.tensor([rows.slots[at] for at in members], device=self._device),
            save,
            torch.tensor(begins, device=self._device) if any(begins) else None,
        )

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
            _states(layer, part)[part.number] = state
        mixed = forward(rows, **options, **{mixer.cache_argument: self._memory.cache})
        if not isinstance(mixed, torch.Tensor):
            raise ConfigError(f"{type(mixer).__name__} returns a {type(mixed).__name__}")
        for part, view in views:
            state = _states(layer, part)[part.number]
            view.index_copy_(0, group.slots, state)
            if group.save != NO_SLOT:
                view[group.save].copy_(state[0])
        return mixed


def _states(layer: Any, part: StatePart) -> dict[int, torch.Tensor]:
    states: dict[int, torch.Tensor] = getattr(layer, f"{part.kind}_states")
    return states


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
            mixer.__class__ = _paged(mixer)


def _paged(mixer: Any) -> type:
    """Return the layer's class with `PagedMixer` in front."""
    kind = type(mixer)
    named = {"cache_argument": cache_argument(mixer), "__module__": kind.__module__}
    return type(kind.__name__, (PagedMixer, kind), named)
