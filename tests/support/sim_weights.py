"""A simulation of whole workers whose weights are changed in place while they serve: the KV bytes,
the tokens that are sampled and what comes with a transfer follow from the version as well as from
the tokens, so that whatever mixes two versions shows as a wrong byte or a wrong token.

Each side moves when it likes, the ranks of prefill at different times, a life that is started again
begins with its newest version or with the first.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from prefixkv.request import Request
from tests.support.sim import SINGLE, Storm
from tests.support.sim_engines import EngineSim, simulation


@dataclass
class WeightsSim(EngineSim):
    """See the module's text. `newest` counts the versions up."""

    move_rate: float = 0.01
    newest: int = 0
    ends: dict[str, set[str]] = field(default_factory=dict)  # the errors, by side

    @property
    def version(self) -> str:
        return f"v{self.newest}"

    def faults(self) -> None:
        super().faults()
        if self.random.random() < self.move_rate / self.pace:
            self.move()

    def move(self) -> None:
        """One side has the next version; the other follows, if it does, some time later."""
        if self.random.random() < 0.5:
            self.newest += 1
        self.move_side(self.decode if self.random.random() < 0.5 else self.prefill)

    def move_side(self, side: Any) -> None:
        if side.scheduler.weights_version != self.version:
            side.scheduler.flush(self.version)
            side.scheduler.flush()

    def restart_prefill(self, how: str) -> None:
        self.prefill_version = self.random.choice(["", self.version])
        super().restart_prefill(how)

    def restart_decode(self) -> None:
        super().restart_decode()
        self.decode.scheduler.weights_version = self.random.choice(["", self.version])

    def after_step(self) -> None:
        super().after_step()
        for side, engine in (("decode", self.decode), ("prefill", self.prefill)):
            found = {type(req.error).__name__ for req in engine.scheduler._failed}
            self.ends.setdefault(side, set()).update(found)

    def catch_up(self) -> None:
        """Both have the newest version."""
        self.calm = True
        self.newest += 1
        self.move_side(self.decode)
        self.move_side(self.prefill)

    def ask(self, first: int) -> list[str]:
        """Three requests; returns their names."""
        asked = []
        for number in range(first, first + 3):
            rid, tokens = f"late{number}", [1] * 6 + self._tokens(1, 14)
            more: Any = {"room": 10**6 + number, "decode": self.readers[0].me.name}
            address = self.addresses[0]
            self.decode.scheduler.add(
                Request(rid, tokens, max_new_tokens=4, prefill=address, **more)
            )
            self.submit(Request(rid, tokens, **more))
            asked.append(rid)
        return asked


def weights_pair(seed: int) -> WeightsSim:
    """One rank a side, and nothing goes wrong but that the weights move."""
    return WeightsSim(seed, Storm(), SINGLE, move_rate=0.03)


def weights_simulation(seed: int) -> Any:
    """As `sim_engines.simulation`, with moves."""
    return simulation(seed, kind=WeightsSim, move_rate=random.Random(seed).choice([0.005, 0.02]))
