"""Chance that is spelled by integers, as the fuzzed machines share it."""

import random


class Spelled(random.Random):
    """Chance that reads its choices off an integer, digit by digit; 0 spells the first of every
    choice.

    What a step needs beyond its digits follows from the integer too.
    """

    _left = _state = 0

    def spell(self, value: int) -> None:
        self._left = self._state = value

    def _randbelow(self, n: int) -> int:
        if self._left < n and self._state:
            self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
            self._left = self._state >> 11
        self._left, chosen = divmod(self._left, n)
        return chosen

    def getrandbits(self, k: int) -> int:
        return self._randbelow(1 << k)

    def random(self) -> float:
        return 1.0 - self._randbelow(1024) / 1024
