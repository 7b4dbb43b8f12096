"""Prompts that decode's own vLLM computes: the measurements by which `Sources` decides, the same
rule as of a `DecodeNode`.

A step ends when its result comes. It begins where the one before ended, or when it was scheduled,
whichever is later, since vLLM may schedule a step while another one runs. vLLM alone decides the
size of a step, so no share of a step bounds what is computed here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from prefixkv import ComputeConfig
from prefixkv.errors import check_laws
from prefixkv.spi import Sources

_UNBOUNDED_SHARE: Final = 100.0
"""`ComputeConfig.itl_share` at its most: vLLM alone says how long a step may become."""

_MOST_STEPS: Final = 64
"""Steps that are remembered until they end; a vLLM that says nothing of their ends keeps these."""


@dataclass(slots=True)
class _VllmStep:
    prompt_tokens: int = 0
    running: int = 0  # requests that decode
    begun_s: float = 0.0


@dataclass(slots=True)
class _Prompt:
    length: int
    due: int  # tokens that vLLM has still to compute
    is_decoding: bool = False


class OwnCompute:
    """What decode computes of prompts, and what is left. The scheduler's.

    Args:
        below: most missing tokens of a request that may be computed here; 0: nothing is measured.
        step_tokens: the most that a step computes of prompts, at least 1.
        loads: True if there is host memory, whose loads are compared with what prefill takes.
    """

    def __init__(
        self,
        below: int,
        step_tokens: int,
        now_s: Callable[[], float] = time.monotonic,
        loads: bool = False,
    ) -> None:
        config = ComputeConfig(below=below, chunk_tokens=step_tokens, itl_share=_UNBOUNDED_SHARE)
        self.is_on = below > 0
        self.now_s = now_s
        self.sources = Sources(config if self.is_on else None, loads=loads)
        self._prompts: dict[str, _Prompt] = {}
        # Of requests that wait to be admitted: what was missing, and what was decided by that.
        self._decided: dict[str, tuple[int, bool]] = {}
        self._awaited: dict[int, Any] = {}  # what prefill was promised, by room
        self._next = _VllmStep()  # is being scheduled
        self._steps: deque[_VllmStep] = deque(maxlen=_MOST_STEPS)  # under way, the oldest first
        self._ended_s = 0.0  # when the last step ended

    def is_here(self, rid: str, missing: int, address: str) -> bool:
        """Decide whether decode, if `is_on`, computes a request's `missing` tokens,
        or the prefill server. vLLM asks in each step until it admits the request; it is decided
        again only where other tokens are missing, since the rule counts decisions as requests.
        O(admitted requests)."""
        last = self._decided.get(rid)
        if last is None or last[0] != missing:
            prompts = self._prompts.values()
            due, running = sum(one.due for one in prompts), sum(one.is_decoding for one in prompts)
            is_here = self.sources.is_here(missing, due, running, address, self.now_s())
            last = self._decided[rid] = missing, is_here
        return last[1]

    def is_worth_loading(self, missing: int, num_loaded: int, load_s: float, address: str) -> bool:
        """Return whether to load `num_loaded` of the `missing` tokens from host memory, in
        `load_s`, rather than have prefill send them all."""
        return self.sources.worth_loading(missing, num_loaded, load_s, address, self.now_s())

    def admitted(self, rid: str, prompt_len: int, due: int) -> None:
        """`due` tokens of the prompt are computed here. Its steps say so too, but a request that is
        admitted before the next one has to know it now."""
        if self.is_on:
            self._decided.pop(rid, None)
            self._prompts.setdefault(rid, _Prompt(prompt_len, due)).due = due

    def ended(self, rid: str) -> None:
        self._decided.pop(rid, None)
        self._prompts.pop(rid, None)

    def promised(self, address: str, room: int, num_tokens: int) -> None:
        self._awaited[room] = self.sources.promised(address, self.now_s(), num_tokens)

    def arrived(self, room: int) -> None:
        self.sources.arrived(self._awaited.pop(room, None), self.now_s())

    def gave_up(self, room: int) -> None:
        self.sources.gave_up(self._awaited.pop(room, None))

    def scheduled(self, rid: str, start: int, count: int) -> None:
        if (prompt := self._prompts.get(rid)) is None:
            return
        prompt.due = max(0, prompt.length - start - count)
        prompt.is_decoding = not prompt.due  # no more where it comes back after a preemption
        # One token is a step of the batch, also where it is a prompt's last one: so a request
        # begins whose KV was loaded.
        if start < prompt.length and count > 1:
            self._next.prompt_tokens += count
        else:
            self._next.running += 1

    def step_scheduled(self) -> None:
        if self.is_on:
            self._next.begun_s = self.now_s()
            self._steps.append(self._next)
            self._next = _VllmStep()

    def step_ended(self) -> None:
        if not self._steps:
            return
        step, now_s = self._steps.popleft(), self.now_s()
        seconds = now_s - max(step.begun_s, self._ended_s)
        self._ended_s = now_s
        if step.prompt_tokens:
            self.sources.chunk(step.prompt_tokens, seconds, step.running)
        elif step.running:
            self.sources.step(seconds)

    @property
    def rids(self) -> frozenset[str]:
        """Requests that are remembered: decided or admitted, and not over."""
        return frozenset(self._decided) | frozenset(self._prompts)

    def check_invariants(self) -> None:
        laws = {
            "what is decided is not admitted": not self._decided.keys() & self._prompts.keys(),
            "what is due is part of a prompt": all(
                0 <= one.due <= one.length for one in self._prompts.values()
            ),
        }
        check_laws(laws, self._prompts)
