"""What a request keeps beside the KV of all tokens, in the form that transfers take.

SGLang calls each kind a *component*: it gives a backend the addresses of its buffers, and with each
request the indices of what is to be sent. A window (`swa`) is a window group of the pool, a
recurrent state (`mamba`) a slot of a StatePool, the keys of an index (`dsa`) an aligned group: they
lie under the page ids of the KV, and are sent with it. Every buffer's bytes are SGLang's own, so
two servers need equal numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from prefixkv import KVPool, Mesh, PoolGroup, StatePool, StateTensor
from prefixkv.engines.sglang.memory import bytes_at, pool_of
from prefixkv.errors import RequestError
from prefixkv.spi import PageIds

WINDOW: Final = "swa"
STATE: Final = "mamba"
INDEX: Final = "dsa"


def state_refusals(args: Any, window: int) -> list[str]:
    """Return why what a model keeps beside its KV cannot be sent, by SGLang's arguments. `window`
    is that of `Share`. Empty where it can, or where there is nothing."""
    kinds = [kind.value for kind in args.state_types]
    unknown = sorted({kind for kind in kinds if kind not in (WINDOW, STATE, INDEX)})
    found = {
        f"the model keeps state besides its KV ({', '.join(unknown)}), which is not sent":
            bool(unknown),
        # Buffers of several kinds, each with page ids or slots of its own, under one name.
        "DeepSeek V4's compressed KV and its windows are not sent":
            getattr(args, "mla_compression_ratios", None) is not None,
        f"the model keeps two components of one kind ({', '.join(kinds)}), which was not run":
            len({*kinds}) < len(kinds),
        "leave out --speculative-algorithm: a draft beside windows or states was not run":
            bool(kinds) and args.num_draft_entries > 0,
        # SGLang then caps decode's cached prefix nowhere, and it may reach into the window.
        "the model has sliding windows: --page-size above 1 is needed":
            WINDOW in kinds and args.page_size == 1,
        "SGLang does not say how long the model's sliding windows are":
            WINDOW in kinds and window <= 0,
    }  # fmt: skip
    return [reason for reason, refused in found.items() if refused]


class OfRequest(NamedTuple):
    """For each window group the pages of its window, and the slot of the state, -1 without one."""

    windows: tuple[PageIds, ...] = ()
    state_slot: int = -1


NOTHING: Final = OfRequest()


class Components:
    """The components of a rank's memory, and what a request has in each. `args`: without a reason
    in `state_refusals`."""

    def __init__(self, args: Any, window: int, device: str) -> None:
        """Raises ConfigError for buffers of one component that differ in the size or number of
        their items, and for a model without any KV."""
        self._kinds = [kind.value for kind in args.state_types]
        self._groups: list[PoolGroup] = []
        self._buffers: list[tuple[int, int, int]] = []  # of states: address, length, bytes a slot
        layout = getattr(args, "swa_kv_cache_layout", None) or "plain"
        for kind, *buffers in zip(
            self._kinds, args.state_data_ptrs, args.state_data_lens, args.state_item_lens,
            strict=True,
        ):  # fmt: skip
            if kind == STATE:
                self._buffers = list(zip(*buffers, strict=True))
                continue
            tag = f"sglang {args.kv_cache_dtype_str} {kind} {layout if kind == WINDOW else ''}"
            pool = pool_of(*buffers, page_size=args.page_size, device=device, tag=tag.strip())
            # SGLang's window is what a token sees before its own.
            self._groups.append(PoolGroup(kind, pool, window + 1 if kind == WINDOW else 0))
        self._device = device

    def pool_with(self, pool: KVPool) -> KVPool:
        """Add windows and indices to a pool. Raises ConfigError for those that do not fit it."""
        return pool.with_groups(*self._groups) if self._groups else pool

    def state_pool(self, mesh: Mesh, rank: int) -> StatePool | None:
        """Each rank's share of a buffer counts as one head. None without any state."""
        if not self._buffers:
            return None
        tensors = [
            StateTensor(f"{STATE}{i}", 0, mesh.tp_size, (size,), "uint8")
            for i, (_, _, size) in enumerate(self._buffers)
        ]
        views = [
            bytes_at(address, length, self._device).view(length // size, 1, size)
            for address, length, size in self._buffers
        ]
        return StatePool(tensors, views, mesh, rank)

    def of_request(self, indices: Sequence[Any] | None, pages: Sequence[int]) -> OfRequest:
        """`pages` are those of its KV, behind decode's prefix. Raises RequestError where the
        indices are not of as many components, no single slot of a state, or other pages."""
        if not self._kinds:
            return NOTHING
        if indices is None or len(indices) != len(self._kinds):
            raise RequestError(f"indices of {len(indices or ())} components of {self._kinds}")
        windows: list[PageIds] = []
        slot = -1
        for kind, given in zip(self._kinds, indices, strict=True):
            if kind == WINDOW:
                windows.append(np.asarray(given, np.int32))
            elif kind == STATE:
                slots = np.asarray(given).ravel()
                if len(slots) != 1:
                    raise RequestError(f"{len(slots)} slots of a request's state, 1 is needed")
                slot = int(slots[0])
            elif not np.array_equal(given, pages):
                raise RequestError(f"{len(given)} pages of {kind}, which are not those of the KV")
        return OfRequest(tuple(windows), slot)
