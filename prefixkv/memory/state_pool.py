"""State pools: torch tensors with the extra state of requests, a slot each, and their layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prefixkv.errors import ConfigError
from prefixkv.memory.axes import TensorLike, as_tensors
from prefixkv.memory.kv_pool import checked_regions, make_zeros, storages
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_layout import StateEntry, StateLayout, StateTensor
from prefixkv.paging import MAX_INDEX
from prefixkv.settings import check_flag, check_kind, check_list, check_whole


class StatePool:
    """A view [num_slots, heads of this rank, *head_shape] for each tensor of this rank's stage.

    On decode the library assigns the slots (`DecodeRequest.state_slot`); on prefill the engine
    does. `device` is that of the views, and of the rank's KV pool. None: there are no views.
    """

    def __init__(
        self,
        tensors: Sequence[StateTensor],
        views: Sequence[TensorLike],
        mesh: Mesh | None = None,
        rank: int = 0,
        regions: Sequence[tuple[int, int]] | None = None,
        num_slots: int = 0,
    ) -> None:
        """Describe an engine's own tensors of extra state, and keep them alive.

        Args:
            tensors: all of the model's state.
            views: one for each tensor that this rank holds, in order; torch or numpy, used in
                place. A slot in it is contiguous; slots may lie apart.
            mesh, rank: as the node's; None: this rank holds everything.
            regions: (address, bytes) to register; by default the views' whole storages.
            num_slots: for a rank without tensors in its stage.

        Raises ConfigError: a value out of range, or views that do not fit or overlap.
        """
        self.tensors = _checked_tensors(tensors)
        views = as_tensors("views", views)
        held = _tensors_of_rank(self.tensors, mesh, rank)
        if len(views) != len(held):
            raise ConfigError(
                f"{len(views)} state views, this rank holds {len(held)} state tensors"
            )
        # 1. Each view against the shape that the mesh gives this rank.
        if any(not view.ndim for view in views):
            raise ConfigError("a state view has no dimension of slots")
        num_slots = len(views[0]) if views else num_slots
        for (tensor, shape), view in zip(held, views, strict=True):
            expected = (num_slots, *shape)
            if tuple(view.shape) != expected or str(view.dtype) != f"torch.{tensor.dtype}":
                raise ConfigError(
                    f"state tensor {tensor.name!r} of layer {tensor.layer} is {view.dtype} "
                    f"{tuple(view.shape)}, "
                    f"must be torch.{tensor.dtype} {expected}"
                )
            if not view[0].is_contiguous():
                raise ConfigError(f"a slot of state tensor {tensor.name!r} is not contiguous")
        # 2. All views together: names, device.
        self._views = {
            (tensor.name, tensor.layer): view for (tensor, _), view in zip(held, views, strict=True)
        }
        if len(self._views) != len(held):
            raise ConfigError("two state tensors have the same name and layer")
        devices = sorted({str(view.device) for view in views})
        if len(devices) > 1:
            raise ConfigError(f"state views are on {' and '.join(devices)}, must be on one device")
        self.device = devices[0] if devices else None
        # 3. Their description. Of a single slot the stride has no meaning, so it is the slot's
        #    size.
        entries = []
        for view in views:
            num_bytes = view[0].numel() * view.itemsize
            stride = view.stride(0) * view.itemsize if len(view) > 1 else num_bytes
            entries.append(StateEntry(view.data_ptr(), stride, num_bytes))
        found = storages(views) if regions is None else checked_regions(regions)
        self.layout = StateLayout(num_slots, tuple(entries), found)
        self.layout.validate()

    @classmethod
    def create(
        cls,
        tensors: Sequence[StateTensor],
        num_slots: int,
        mesh: Mesh | None = None,
        rank: int = 0,
        device: str = "cpu",
        shared: bool = False,
    ) -> StatePool:
        """Create a state pool of zeros; `shared` as for `KVPool.create`. Raises ConfigError: a
        value out of range. CapacityError: the device has not enough memory."""
        check_whole("num_slots", num_slots, 1, MAX_INDEX)
        check_flag("shared", shared)
        tensors = _checked_tensors(tensors)
        views = [
            make_zeros((num_slots, *shape), tensor.dtype, device, shared)[0]
            for tensor, shape in _tensors_of_rank(tensors, mesh, rank)
        ]
        return cls(tensors, views, mesh, rank, num_slots=num_slots)

    @property
    def num_slots(self) -> int:
        return self.layout.num_slots

    def view(self, name: str, layer: int) -> torch.Tensor:
        """Return the view [num_slots, heads of this rank, *head_shape] of a tensor. Raises KeyError
        if this rank has none."""
        return self._views[name, layer]


def _checked_tensors(tensors: Sequence[StateTensor]) -> tuple[StateTensor, ...]:
    check_list("tensors", tensors)
    for tensor in tensors:
        check_kind("a state tensor", tensor, StateTensor)
        check_whole("layer", tensor.layer, 0, MAX_INDEX)
    return tuple(tensors)


def _tensors_of_rank(
    tensors: Sequence[StateTensor], mesh: Mesh | None, rank: int
) -> list[tuple[StateTensor, tuple[int, ...]]]:
    if mesh is not None:
        check_kind("mesh", mesh, Mesh)
        mesh.validate()
    # Without a mesh a single rank holds every layer that is named.
    mesh = mesh or Mesh(1 + max((tensor.layer for tensor in tensors), default=0), 1)
    held = []
    for tensor in tensors:
        tensor.validate(mesh)
        shard = tensor.shard(mesh, rank)
        if shard is not None:
            held.append((tensor, (shard.num_heads, *tensor.head_shape)))
    return held
