"""From an engine's own tensors to the slabs of a pool: the meaning of each axis, by name.

A name says which dimension of a tensor is the page, the token and so on, whatever their order in
memory. Anything else that the engine says has to agree with the shape. Nothing is copied.
Tensors are torch's own, or numpy arrays, whose memory is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from prefixkv.errors import ConfigError, check_range, shown
from prefixkv.paging import MAX_INDEX
from prefixkv.settings import check_list, check_whole

TensorLike: TypeAlias = torch.Tensor | npt.NDArray[Any]

_ARRAYS: Final = (np.ndarray, np.memmap)
"""Classes of numpy arrays that are taken. Others, masked ones say, are more than memory."""


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """Return a dense torch tensor, or a writable numpy array, as a torch tensor on the same memory,
    which it keeps alive. Raises ConfigError, with `name`, for anything else."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise ConfigError(f"{name} is a tensor of {value.layout}, a dense one is needed")
        return value.detach() if value.requires_grad else value
    if type(value) not in _ARRAYS:
        raise ConfigError(
            f"{name} is a {type(value).__name__}, a torch tensor (or a numpy array, the memory of "
            "which is used as it is) is needed"
        )
    # A peer's bytes are written into it.
    if not value.flags.writeable:
        raise ConfigError(f"{name} is a numpy array that must not be written")
    try:
        return torch.from_numpy(value)
    # Another byte order, strides below 0, a dtype that torch has not.
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} is a numpy array of {value.dtype}: {error}") from None


def as_tensors(name: str, values: Any) -> list[torch.Tensor]:
    """Return a sequence of tensors; one tensor counts as the sequence of its parts. Raises as
    `as_tensor`."""
    if isinstance(values, torch.Tensor | np.ndarray):
        values = list(as_tensor(name, values)) if values.ndim else [values]
    elif not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise ConfigError(f"{name} is a {type(values).__name__}, a list of tensors is needed")
    return [as_tensor(f"{name}[{i}]", value) for i, value in enumerate(values)]


SLAB_AXES: Final = ("page", "token", "head", "dim")
_LATENT_AXES: Final = ("page", "token", "dim")
_V_IS_MISSING: Final = (
    ', since v is missing: give v, or an axis "kv" where each tensor of k holds K and V'
)
_NAMES: Final = (*SLAB_AXES, "kv", "packed")


class AxisNames(NamedTuple):
    """An engine's description of its tensors. None: believe the shape. See
    `KVPool.from_tensors`."""

    axes: Sequence[str] | None
    page_size: int | None
    num_kv_heads: int | None
    head_dim: int | None
    opaque: str


def as_slabs(
    k: Sequence[TensorLike], v: Sequence[TensorLike] | None, description: AxisNames
) -> tuple[list[torch.Tensor], str]:
    """Return an engine's tensors as views [page, token, head, dim] in the order of
    `KVLayout.slabs`, and the kind of attention. Raises ConfigError if they differ from each other
    or from their description."""
    k_tensors = as_tensors("k", k)
    v_tensors = None if v is None else as_tensors("v", v)
    if v_tensors is not None and len(v_tensors) != len(k_tensors):
        raise ConfigError(f"{len(k_tensors)} layers of k and {len(v_tensors)} of v")
    if not k_tensors:
        raise ConfigError("no layers, must be at least 1")
    # 1. Check the names, then that all tensors are alike, then that the first fits the names.
    axes = _checked_axes(description, k_and_v=v is not None)
    tensors = k_tensors
    if v_tensors is not None:
        tensors = [view for pair in zip(k_tensors, v_tensors, strict=True) for view in pair]
    for i, tensor in enumerate(tensors):
        for name in ("shape", "dtype", "device"):
            its, first = getattr(tensor, name), getattr(tensors[0], name)
            if its != first:
                raise ConfigError(f"tensor {i} has {name} {its}, tensor 0 has {first}")
    _check_shape(tensors[0], axes, description)
    # 2. One slab per layer and kind. K and V in one tensor are taken apart along their axis; in the
    #    order layer 0 K, layer 0 V, ..., as they are when they come apart.
    attention = "fused" if description.opaque else "mla"
    if "kv" in axes:
        at = axes.index("kv")
        tensors = [half for tensor in tensors for half in tensor.unbind(at)]
        axes = (*axes[:at], *axes[at + 1 :])
    if v is not None or len(tensors) > len(k_tensors):
        attention = "mha"
    # 3. Each slab under the shape of a pool.
    as_slab = _opaque_slab if description.opaque else _plain_slab
    return [as_slab(i, tensor, axes, description) for i, tensor in enumerate(tensors)], attention


def _checked_axes(description: AxisNames, *, k_and_v: bool) -> tuple[str, ...]:
    if not isinstance(description.opaque, str):
        raise ConfigError(
            f"opaque is {shown(description.opaque)}, must be a str, the name of the format"
        )
    given = description.axes
    if given is not None:
        check_list("axes", given)
    for name in ("page_size", "num_kv_heads", "head_dim"):
        if (size := getattr(description, name)) is not None:
            check_whole(name, size, 1, MAX_INDEX)
    axes = tuple(given or (SLAB_AXES if k_and_v else _LATENT_AXES))
    for axis in axes:
        if not isinstance(axis, str) or axis not in _NAMES or axes.count(axis) > 1:
            raise ConfigError(f"axes are {axes}, must be different ones of {', '.join(_NAMES)}")
    if k_and_v and "kv" in axes:
        raise ConfigError(f'axes are {axes}, but with k and v apart no tensor has an axis "kv"')
    # The bytes of opaque pages tell nothing about page size and axes: they have to be given.
    if description.opaque:
        if description.axes is None or description.page_size is None or "page" not in axes:
            raise ConfigError('opaque pages need page_size and axes, among them "page"')
        return axes
    # Otherwise the axes must be exactly those of K and V, or those of MLA, which has no heads.
    latent = not k_and_v and "kv" not in axes
    needed = _LATENT_AXES if latent else SLAB_AXES
    if {*axes} - {"kv"} != {*needed}:
        raise ConfigError(
            f"axes are {axes}, must be {', '.join(needed)} in any order" + _V_IS_MISSING * latent
        )
    return axes


def _check_shape(tensor: torch.Tensor, axes: tuple[str, ...], description: AxisNames) -> None:
    """Raise ConfigError unless the shape, which all tensors have, agrees with the description."""
    if tensor.dim() != len(axes):
        latent = {*axes} == {*_LATENT_AXES} and not description.opaque
        raise ConfigError(
            f"the tensors have {tensor.dim()} dimensions, must have {len(axes)}: {', '.join(axes)}"
            + _V_IS_MISSING * latent
        )
    sizes = dict(zip(axes, tensor.shape, strict=True))
    # `head_dim` of opaque pages is worked out from a page's size, see `_opaque_slab`.
    given = [
        ("token", "page_size", description.page_size),
        ("head", "num_kv_heads", description.num_kv_heads),
    ]
    if not description.opaque:
        given.append(("dim", "head_dim", description.head_dim))
    for axis, name, value in (*given, ("kv", "K and V", 2)):
        if axis in sizes and value is not None and sizes[axis] != value:
            raise ConfigError(
                f'{name} is {shown(value)}, but axis {axes.index(axis)} ("{axis}") has '
                f"{sizes[axis]}"
            )


def _plain_slab(
    i: int, tensor: torch.Tensor, axes: tuple[str, ...], description: AxisNames
) -> torch.Tensor:
    if "head" not in axes:
        tensor, axes = tensor.unsqueeze(0), ("head", *axes)
    slab = tensor.permute([axes.index(axis) for axis in SLAB_AXES])
    # A layout describes the other strides; a head of a token is the smallest piece that is copied,
    # so it has to be contiguous.
    if slab.stride(-1) != 1:
        raise ConfigError(
            f'slab {i} has a stride of {slab.stride(-1)} in its axis "dim", must be 1'
        )
    return slab


def _opaque_slab(
    i: int, tensor: torch.Tensor, axes: tuple[str, ...], description: AxisNames
) -> torch.Tensor:
    """Pages keep their bytes in order. The shape is that of plain pages of the same size; only the
    page axis has a meaning."""
    sizes = dict(zip(axes, tensor.shape, strict=True))
    strides = dict(zip(axes, tensor.stride(), strict=True))
    # From the innermost axis outwards: without gaps, or a page would be no run of bytes. Axes of
    # one element have no meaningful stride.
    page_elements = 1
    for axis in sorted({*axes} - {"page"}, key=lambda axis: (strides[axis], sizes[axis])):
        if sizes[axis] != 1 and strides[axis] != page_elements:
            raise ConfigError(
                f'slab {i} has a stride of {strides[axis]} in its axis "{axis}", must be '
                f"{page_elements}: an opaque page is one run of bytes"
            )
        page_elements *= sizes[axis]
    # `page_size` and heads are the engine's word. The rest of the page's size is `head_dim`.
    given_heads = 1 if description.num_kv_heads is None else description.num_kv_heads
    page_size, heads = description.page_size or 0, sizes.get("head", given_heads)
    check_range("num_kv_heads", heads, 1, MAX_INDEX)
    head_dim, rest = divmod(page_elements, page_size * heads)
    if rest or description.head_dim not in (None, head_dim):
        raise ConfigError(
            f"a page of slab {i} has {page_elements} elements, must have "
            f"{description.head_dim or 'equally many'} for each of {page_size} tokens and "
            f"{heads} heads"
        )
    shape = (sizes["page"], page_size, heads, head_dim)
    return tensor.as_strided(shape, (strides["page"], heads * head_dim, head_dim, 1))
