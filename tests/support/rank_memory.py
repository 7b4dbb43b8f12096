"""Memory in which a rank's pool lies, at real addresses, for tests of the copies."""

import numpy as np
import torch

from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Shard
from tests.support.mesh_pools import elements, moved


class Memory:
    """A rank's memory on a device, with the layout that says where it really is. Every byte
    random."""

    def __init__(self, made: tuple[KVLayout, int], device: str, seed: int = 0) -> None:
        virtual, num_bytes = made
        raw = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
        self.tensor = torch.from_numpy(raw).to(device)
        self.virtual = virtual
        self.layout = moved(virtual, self.tensor.data_ptr())

    def bytes(self) -> np.ndarray:
        return self.tensor.cpu().numpy().copy()

    def places(
        self, pages: tuple[int, ...], part: Shard, unit_tokens: int, start: int, stop: int
    ) -> np.ndarray:
        """Where units `start` to `stop` of a request in `pages` lie, in the order of the stage:
        flat."""
        kinds = self.virtual.slabs_per_layer
        at = elements(self.virtual, pages, stop * unit_tokens)[:, start * unit_tokens :]
        layers = slice(part.first_layer * kinds, (part.first_layer + part.num_layers) * kinds)
        return at[layers, :, part.first_head : part.first_head + part.num_heads].ravel()
