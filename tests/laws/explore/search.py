"""Every state of a configuration, once: the laws with each move, rest in the end, and from every
state a way to rest without another fault."""

import time
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.laws.explore.actors import Actors, ControlError
from tests.laws.explore.state import Config, LawError, Move, Packed, State
from tests.laws.explore.world import World


@dataclass
class Found:
    """What a search has seen. `rests` are the states in which nothing more happens."""

    config: str
    states: int
    moves: int
    rests: int
    actor_states: int
    seconds: float
    complete: bool

    def __str__(self) -> str:
        what = f"{self.states:,} states, {self.moves:,} moves, {self.rests:,} rests"
        how = "" if self.complete else ", not all"
        return f"{self.config}: {what}, {self.actor_states:,} of actors, {self.seconds:.1f} s{how}"


class Search:
    """Breadth first, so that a trace is a shortest one."""

    def __init__(self, config: Config, table: Actors | None = None) -> None:
        self.world = World(config, table)
        self.states: list[Packed] = []
        self._numbers: dict[Packed, int] = {}
        self._parents = array("I")
        # Moves that are no faults, for the way back from rest.
        self._froms, self._tos = array("I"), array("I")
        self._rests: list[int] = []
        self.num_moves = 0

    def run(self, max_states: int = 10**9, max_seconds: float = 1e9) -> Found:
        """Raises LawError, with its trace."""
        started = time.perf_counter()
        self._number(self.world.start(), 0)
        at = 0
        while at < len(self.states) < max_states:
            if at % 256 == 0 and time.perf_counter() - started > max_seconds:
                break
            self._expand(at)
            at += 1
        complete = at == len(self.states)
        if complete:
            self._check_way_to_rest()
        config, seconds = self.world.config.name, time.perf_counter() - started
        sizes = len(self.states), self.num_moves, len(self._rests), len(self.world.table)
        return Found(config, *sizes, seconds, complete)

    def _number(self, state: Packed, parent: int) -> int:
        number = self._numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
            self._parents.append(parent)
        return number

    def _expand(self, at: int) -> None:
        world, packed = self.world, self.states[at]
        state = world.unpack(packed)
        goes_on = False
        for is_fault, move in world.moves(state):
            self.num_moves += 1
            try:
                made = world.apply(state, move)
            except (LawError, ControlError) as error:
                raise self._broken(at, error, world.name(state, move)) from error
            to = self._number(world.pack(made, state, packed), at)
            if not is_fault:
                goes_on = True
                self._froms.append(at)
                self._tos.append(to)
        if not goes_on:
            self._rests.append(at)
            try:
                world.check_rest(state)
            except LawError as error:
                raise self._broken(at, error) from None

    def _broken(self, at: int, error: Exception, *last: str) -> LawError:
        broken = LawError(str(error))
        broken.trace = (*self.trace(at), *last)
        return broken

    def trace(self, at: int) -> list[str]:
        """The moves that lead from the start to a state."""
        names: list[str] = []
        while at:
            parent = self._parents[at]
            state = self.world.unpack(self.states[parent])
            moves = (move for _, move in self.world.moves(state))
            found = next(move for move in moves if self._leads(state, move, parent, at))
            names.append(self.world.name(state, found))
            at = parent
        return names[::-1]

    def _leads(self, state: State, move: Move, before: int, after: int) -> bool:
        try:
            made = self.world.apply(state, move)
        except (LawError, ControlError):
            return False
        return self.world.pack(made, state, self.states[before]) == self.states[after]

    def _check_way_to_rest(self) -> None:
        """Backwards from the rests."""
        froms = np.frombuffer(self._froms, np.uint32)
        order = np.argsort(np.frombuffer(self._tos, np.uint32), kind="stable")
        froms, tos = froms[order], np.frombuffer(self._tos, np.uint32)[order]
        starts = np.searchsorted(tos, np.arange(len(self.states) + 1))
        seen = np.zeros(len(self.states), bool)
        front = np.array(self._rests, np.int64)
        seen[front] = True
        while len(front):
            spans = [froms[starts[at] : starts[at + 1]] for at in front]
            before = np.unique(np.concatenate(spans))
            front = before[~seen[before]].astype(np.int64)
            seen[front] = True
        if not seen.all():
            raise self._broken(int(np.argmin(seen)), LawError("from here nothing leads to rest"))


def explore(config: Config, table: Actors | None = None, **bounds: Any) -> Found:
    return Search(config, table).run(**bounds)
