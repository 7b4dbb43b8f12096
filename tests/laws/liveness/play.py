"""A case as it is played, whatever the two servers are: requests arrive in its order, what lives
takes turns, the clock stands still until nothing moves, and then all has to have ended. The
library's schedulers: `world.py`; vLLM's: tests/integration/vllm/liveness/world.py."""

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, Self

import msgspec

from tests.laws.liveness.arrivals import Ask, LivenessError

Act = Callable[[], object]


class Played(msgspec.Struct, frozen=True):
    """What every case has. `order` names what arrives: "P0" is request 0 at its prefill server,
    "D0" at its decode server; "-P0" and "-D0" its client's leave there, "!D0" the word to decode
    that its client has left before, "~D0" that decode's engine sends it to the prefill worker.

    `paces` are what goes on before each arrival but the first: "none", the name of a part of all
    that lives, to its end, "rest" (all of it), or "random", a few steps of anything; fewer are used
    again from the first on. `storm` is how many steps are taken at random behind the last arrival.
    """

    asks: tuple[Ask, ...]
    order: tuple[str, ...]
    paces: tuple[str, ...] = ("none",)
    storm: int = 0
    seed: int = 0

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def of(cls, text: str) -> Self:
        """The case that `str` gave."""
        return msgspec.json.decode(text, type=cls)


class Play:
    """See the module's text. A subclass has the servers, and says what they could do now."""

    tell: Callable[[str], None] | None
    random: Random
    now_s: float
    counters: Counter[str]
    quiet_rounds = 1  # in which what lives may act, and nothing moves
    tick_s: float  # that passes between two looks at the clock

    def begin(self, case: Any, tell: Callable[[str], None] | None) -> None:
        self.case, self.tell = case, tell
        self.to_come = list(case.order)
        self.arrived: set[str] = set()
        self.left: set[str] = set()  # whose clients have left
        self.steps: list[str] = []

    # --- what a subclass has ----------------------------------------------------------------------

    def names(self, only: str) -> Iterable[str]:
        """What may take a turn: all, or a part by its name."""
        raise NotImplementedError

    def act(self, name: str) -> Act | None:
        """What does this, if it could happen now."""
        raise NotImplementedError

    def after(self) -> None:
        """Called behind each step."""

    def see_time(self) -> None:
        """All see that time has passed."""
        raise NotImplementedError

    def bring(self, event: str, name: str, number: int) -> None:
        raise NotImplementedError

    def is_answered(self, number: int) -> bool:
        """Whether prefill has answered for a room that it has drawn."""
        raise NotImplementedError

    def never_answers(self, number: int) -> bool:
        """Whether it has not, and will not."""
        raise NotImplementedError

    @property
    def alive(self) -> Any:
        """What has not ended."""
        raise NotImplementedError

    def picture(self) -> str:
        raise NotImplementedError

    # --- arrivals ---------------------------------------------------------------------------------

    def _may_come(self, event: str) -> bool:
        """A drawn room's decode server is asked when prefill has answered."""
        name, number = named(event)
        if event[0] in "-~":
            return name in self.arrived
        return not self._is_drawn(name, number) or self.is_answered(number)

    def _is_drawn(self, name: str, number: int) -> bool:
        return self.case.asks[number].kind == "drawn" and name[0] == "D"

    def _is_moot(self, event: str) -> bool:
        """Whether a router has no reason left to ask decode."""
        name, number = named(event)
        drawn = self._is_drawn(name, number) and name not in self.arrived
        return drawn and not self.is_answered(number) and self.never_answers(number)

    def come(self) -> bool:
        """Let the next event come that may. False: there is none."""
        self.to_come = [event for event in self.to_come if not self._is_moot(event)]
        for event in self.to_come:
            if self._may_come(event):
                self.to_come.remove(event)
                self.log(f"+{event}")
                name, number = named(event)
                if event[0] in "-!":
                    self.left.add(name)
                if event[0] not in "-~":
                    self.arrived.add(name)
                self.bring(event, name, number)
                self.after()
                return True
        return False

    # --- steps ------------------------------------------------------------------------------------

    def log(self, what: str) -> None:
        self.steps.append(what)
        if self.tell is not None:
            self.tell(what)

    def do(self, name: str, act: Act) -> bool:
        """False: nothing has moved."""
        self.log(name)
        moved = act() is not False
        self.after()
        return moved

    def settle(self, only: str = "", *, arrivals: bool = False, most_rounds: int = 3000) -> None:
        """All take turns until nothing moves any more. Raises LivenessError where that goes on."""
        quiet = 0
        for _ in range(most_rounds):
            moved, idle = arrivals and self.come(), True
            for name in list(self.names(only)):
                if (act := self.act(name)) is not None:
                    idle, moved = False, self.do(name, act) or moved
            quiet = 0 if moved else quiet + 1
            if not moved and (idle or quiet >= self.quiet_rounds):
                return
        raise LivenessError(f"no rest after {most_rounds} rounds\n{self.picture()}")

    def random_step(self) -> bool:
        choices = [(name, act) for name in self.names("") if (act := self.act(name)) is not None]
        come = any(map(self._may_come, self.to_come))
        if not choices and not come:
            return False
        at = self.random.randrange(len(choices) + come)
        if at == len(choices):
            self.come()
        else:
            self.do(*choices[at])
        return True

    def pass_time(self, seconds: float, until: Callable[[], object]) -> None:
        """Let the clock go on, at most so far."""
        end_s = self.now_s + seconds
        while self.now_s < end_s and not until():
            self.now_s += self.tick_s
            self.log(f"at {self.now_s:.2f}")
            self.see_time()
            self.after()
            self.settle(arrivals=True)

    def play(self, resend_s: float) -> None:
        """All arrives, and goes on until nothing moves. What lives then is given the time in which
        frames are said again."""
        case, gap = self.case, -1
        while self.to_come:
            pace = case.paces[gap % len(case.paces)] if gap >= 0 else "none"
            gap += 1
            if pace == "random":
                for _ in range(self.random.randrange(12)):
                    self.random_step()
            elif pace != "none":
                self.settle("" if pace == "rest" else pace)
            if not self.come():
                break
        for _ in range(case.storm):
            if not self.random_step():
                break
        self.settle(arrivals=True)
        if self.alive:
            self.counters["waited for a repeated frame"] += 1
            self.pass_time(resend_s, lambda: not self.alive)

    def check_alive(self) -> None:
        if self.alive:
            raise LivenessError(f"a deadlock: nothing moves\n{self.picture()}")


def named(event: str) -> tuple[str, int]:
    """The request at a server that an event is of, and the request's number."""
    name = event.lstrip("-!~")
    return name, int(name[1:])
