"""The toy engine with its prefill worker in a process of its own, which a restart kills.

It makes a pass whenever decode's side does, over a pipe, so that a scenario has its order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefixkv.request import Request
from prefixkv.testing.sides import ScenarioSettings, Side
from prefixkv.testing.toy import ToyPrefill, ToySides
from tests.support.node_pair import left
from tests.support.patience import until
from tests.support.processes import Child, obey


class ServedPrefill:
    """What the child does."""

    def __init__(self, settings: ScenarioSettings) -> None:
        self.prefill = ToyPrefill(settings)

    def add(self, fields: dict[str, Any]) -> None:
        self.prefill.node.add(Request(**fields))

    def step(self) -> bool:
        return self.prefill.step()

    def abort(self, rid: str) -> None:
        for req in list(self.prefill.computing):
            if req.rid.partition(".")[0] == rid:
                self.prefill.node.abort(req.rid)

    def left(self) -> dict[str, int]:
        """What keeps it from rest, after one more pass."""
        self.prefill.step()
        self.prefill.node.audit()
        return left(self.prefill.node)


def serve(pipe: Any, settings: ScenarioSettings) -> None:
    served = ServedPrefill(settings)
    pipe.send(served.prefill.node.endpoint)
    obey(pipe, served)


class TwoProcesses(ToySides):
    """`start` makes the child: `processes.children(Child)` sees to its end."""

    def __init__(self, start: Callable[..., Child], settings: ScenarioSettings) -> None:
        self.settings, self.start = settings, start
        self.child = start(serve, settings)
        self.d = self.make_decode(settings)
        self.killed = 0

    @property
    def prefill(self) -> None:  # type: ignore[override]
        return None

    def submit(self, prompt: Any, answer: Any) -> None:
        self.d.add(prompt, answer, self.child.hello)

    def abort(self, rid: str, side: Side) -> None:
        if side == "decode":
            self.d.abort(rid)
        else:
            self.child.call("abort", rid)

    def step(self) -> bool:
        asked, self.d.asked = self.d.asked, []
        for one in asked:
            if one.prefill == self.child.hello:
                names = ("rid", "room", "generation", "decode", "namespace", "cacheable",
                         "deadline_s")  # fmt: skip
                fields = {name: getattr(one, name) for name in names}
                self.child.call("add", fields | {"tokens": one.key.tokens()})
        busy = self.child.call("step")
        return self.d.step() or busy

    def restart(self, side: Side) -> None:
        if side == "decode":
            super().restart(side)
            return
        self.child.kill()
        self.killed += 1
        self.child = self.start(serve, self.settings)

    def close(self) -> None:
        until(lambda: not self.child.call("left"), state=lambda: self.child.call("left"))
        self.d.node.close()
