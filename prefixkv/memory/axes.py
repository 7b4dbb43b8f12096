"""From an engine's own tensors to the slabs of a pool: what each axis means, by name.

A name says which dimension of a tensor is the page, the token and so on, whatever their order in
memory. What a pool is told besides has to agree with the shape. Nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from prefixkv.errors import ConfigError, check_range
from prefixkv.paging import MAX_INDEX

SLAB_AXES: Final = ("page", "token", "head", "dim")
_LATENT_AXES: Final = ("page", "token", "dim")
_NAMES: Final = (*SLAB_AXES, "kv", "packed")


class Told(NamedTuple):
    """What an engine says of its tensors. None: as their shape is. See `KVPool.from_tensors`."""

    axes: Sequence[str] | None
    page_size: int | None
    num_kv_heads: int | None
    head_dim: int | None
    opaque: str


def as_slabs(
    k: Sequence[torch.Tensor], v: Sequence[torch.Tensor] | None, told: Told
) -> tuple[list[torch.Tensor], str]:
    """Views [page, token, head, dim] in the order of `KVLayout.slabs`, and the kind of attention.

    Raises: ConfigError where the tensors differ, or are not what was said.
    """
    if v is not None and len(v) != len(k):
        raise ConfigError(f"{len(k)} layers of k and {len(v)} of v")
    if not k:
        raise ConfigError("no layers, must be at least 1")
    axes = _checked_axes(told, k_and_v=v is not None)
    tensors = list(k) if v is None else [view for pair in zip(k, v, strict=True) for view in pair]
    for i, tensor in enumerate(tensors):
        _check_alike(i, tensor, tensors[0])
    _check_shape(tensors[0], axes, told)
    attention = "fused" if told.opaque else "mla"
    if "kv" in axes:
        at = axes.index("kv")
        tensors = [half for tensor in tensors for half in tensor.unbind(at)]
        axes = (*axes[:at], *axes[at + 1 :])
    if v is not None or len(tensors) > len(k):
        attention = "mha"
    as_slab = _opaque_slab if told.opaque else _plain_slab
    return [as_slab(i, tensor, axes, told) for i, tensor in enumerate(tensors)], attention


def _checked_axes(told: Told, *, k_and_v: bool) -> tuple[str, ...]:
    """The names of each tensor's axes, in its order."""
    if not isinstance(told.opaque, str):
        raise ConfigError(f"opaque is {told.opaque!r}, must be a str, the name of the format")
    axes = tuple(told.axes or (SLAB_AXES if k_and_v else _LATENT_AXES))
    for axis in axes:
        if axis not in _NAMES or axes.count(axis) > 1:
            raise ConfigError(f"axes are {axes}, must be different ones of {', '.join(_NAMES)}")
    if k_and_v and "kv" in axes:
        raise ConfigError(f'axes are {axes}, but with k and v apart no tensor has an axis "kv"')
    if told.opaque:
        if told.axes is None or told.page_size is None or "page" not in axes:
            raise ConfigError('opaque pages need page_size and axes, among them "page"')
        return axes
    latent = not k_and_v and "kv" not in axes
    needed = _LATENT_AXES if latent else SLAB_AXES
    if {*axes} - {"kv"} != {*needed}:
        raise ConfigError(f"axes are {axes}, must be {', '.join(needed)} in any order")
    return axes


def _check_alike(i: int, tensor: torch.Tensor, first: torch.Tensor) -> None:
    for name in ("shape", "dtype", "device"):
        if getattr(tensor, name) != getattr(first, name):
            raise ConfigError(
                f"tensor {i} has {name} {getattr(tensor, name)}, tensor 0 has "
                f"{getattr(first, name)}"
            )


def _check_shape(tensor: torch.Tensor, axes: tuple[str, ...], told: Told) -> None:
    """All tensors have the shape of this one."""
    if tensor.dim() != len(axes):
        raise ConfigError(
            f"the tensors have {tensor.dim()} dimensions, must have {len(axes)}: {', '.join(axes)}"
        )
    sizes = dict(zip(axes, tensor.shape, strict=True))
    said = [("token", "page_size", told.page_size), ("head", "num_kv_heads", told.num_kv_heads)]
    if not told.opaque:
        said.append(("dim", "head_dim", told.head_dim))
    for axis, name, value in (*said, ("kv", "K and V", 2)):
        if axis in sizes and value is not None and sizes[axis] != value:
            raise ConfigError(
                f'{name} is {value}, but axis {axes.index(axis)} ("{axis}") has {sizes[axis]}'
            )


def _plain_slab(i: int, tensor: torch.Tensor, axes: tuple[str, ...], told: Told) -> torch.Tensor:
    if "head" not in axes:
        tensor, axes = tensor.unsqueeze(0), ("head", *axes)
    slab = tensor.permute([axes.index(axis) for axis in SLAB_AXES])
    if slab.stride(-1) != 1:
        raise ConfigError(
            f'slab {i} has a stride of {slab.stride(-1)} in its axis "dim", must be 1'
        )
    return slab


def _opaque_slab(i: int, tensor: torch.Tensor, axes: tuple[str, ...], told: Told) -> torch.Tensor:
    """A page's bytes, in the order that they lie in, under the shape of a plain one."""
    sizes = dict(zip(axes, tensor.shape, strict=True))
    strides = dict(zip(axes, tensor.stride(), strict=True))
    page_elements = 1
    for axis in sorted({*axes} - {"page"}, key=lambda axis: (strides[axis], sizes[axis])):
        if sizes[axis] != 1 and strides[axis] != page_elements:
            raise ConfigError(
                f'slab {i} has a stride of {strides[axis]} in its axis "{axis}", must be '
                f"{page_elements}: an opaque page is one run of bytes"
            )
        page_elements *= sizes[axis]
    said_heads = 1 if told.num_kv_heads is None else told.num_kv_heads
    page_size, heads = told.page_size or 0, sizes.get("head", said_heads)
    check_range("page_size", page_size, 1, MAX_INDEX)
    check_range("num_kv_heads", heads, 1, MAX_INDEX)
    head_dim, rest = divmod(page_elements, page_size * heads)
    if rest or told.head_dim not in (None, head_dim):
        raise ConfigError(
            f"a page of slab {i} has {page_elements} elements, must have "
            f"{told.head_dim or 'equally many'} for each of {page_size} tokens and {heads} heads"
        )
    shape = (sizes["page"], page_size, heads, head_dim)
    return tensor.as_strided(shape, (strides["page"], heads * head_dim, head_dim, 1))
