"""The kernel's part of proofs that a process is dead: there are none."""

from __future__ import annotations

from collections.abc import Callable

from prefixkv.config import ControlConfig
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import ProcessLife


class Prover:
    """Where nothing proves deaths: the fence of a peer is the caller's word alone.

    A part that looks at processes overrides these; `Transfers.prover` makes it.
    """

    def __init__(
        self, name: str, timing: ControlConfig, is_written_to: bool, tell: Callable[[PeerId], None]
    ) -> None:
        """`tell` takes each peer that is dead and has nothing on its way here. `is_written_to`:
        peers write into memory of this process."""

    @property
    def life(self) -> ProcessLife | None:
        """Identity of this process for Hello, None if it is not said."""
        return None

    def submit(self, peer: PeerId, life: ProcessLife) -> None:
        """Have a peer's process looked at soon. No-op while that is under way."""

    def close(self, *, ended: bool = True) -> None:
        """Let the identity go, if writes have `ended`. Idempotent."""
