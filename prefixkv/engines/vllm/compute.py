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
from typing import Any, Final, NamedTuple

from prefixkv import ComputeConfig
from prefixkv.errors import check_laws
from prefixkv.spi import Lack, Sources

_UNBOUNDED_SHARE: Final = 100.0
"""`ComputeConfig.itl_share` at its most: vLLM alone says how long a step may become."""

_MOST_STEPS: Final = 64
"""Steps that are remembered until they end; a vLLM that says nothing of their ends keeps these."""


class _VllmStep(NamedTuple):
    begun_s: float
    prompts: int
    prompt_tokens: int
    running: int  # requests that decode


class OwnCompute:
    """What decode computes of prompts, and what is left. The scheduler's. Every call is O(1).

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
        self.measures_prefill = self.is_on or loads
        self.now_s = now_s
        self.sources = Sources(config if self.is_on else None, loads=loads)
        # Of admitted requests: the length of the prompt, and what of it vLLM has still to compute.
        self._prompt_lens: dict[str, int] = {}
        self._due: dict[str, int] = {}
        self._due_tokens = 0  # sum of these
        self._awaited: dict[int, Any] = {}  # what prefill was promised, by room
        self._decoding: set[str] = set()
        # Of requests that wait to be admitted: what was missing, and what was decided by that.
        self._decided: dict[str, tuple[int, bool]] = {}
        # Of the step that is being scheduled.
        self._prompts = self._prompt_tokens = self._running = 0
        self._steps: deque[_VllmStep] = deque(maxlen=_MOST_STEPS)  # under way, the oldest first
        self._ended_s = 0.0  # when the last step ended

    # --- the decision -----------------------------------------------------------------------------

    def is_here(self, rid: str, missing: int, address: str) -> bool:
        """Decide whether decode computes a request's `missing` tokens, or the prefill server. vLLM
        asks in each step until it admits the request; it is decided again only where other tokens
        are missing, since the rule counts decisions as requests."""
        if not self.is_on:
            return False
        last = self._decided.get(rid)
        if last is None or last[0] != missing:
            due, running = self._due_tokens, len(self._decoding)
            is_here = self.sources.is_here(missing, due, running, address, self.now_s())
            last = self._decided[rid] = missing, is_here
        return last[1]

    def is_worth_loading(self, missing: int, num_loaded: int, load_s: float, address: str) -> bool:
        """Return whether to load `num_loaded` of the `missing` tokens from host memory, in
        `load_s`, rather than have prefill send them all."""
        loaded = Lack(missing - num_loaded, num_loaded, load_s)
        return self.sources.worth_loading(Lack(missing), loaded, address, self.now_s())

    # --- requests ---------------------------------------------------------------------------------

    def admitted(self, rid: str, prompt_len: int, due: int) -> None:
        """`due` tokens of the prompt are computed here. Its steps say so too, but a request that is
        admitted before the next one has to know it now."""
        if self.is_on:
            self._decided.pop(rid, None)
            self._prompt_lens[rid] = prompt_len
            self._set_due(rid, due)

    def ended(self, rid: str) -> None:
        self._decided.pop(rid, None)
        self._prompt_lens.pop(rid, None)
        self._decoding.discard(rid)
        self._set_due(rid, 0)

    def _set_due(self, rid: str, due: int) -> None:
        self._due_tokens += due - self._due.pop(rid, 0)
        if due:
            self._due[rid] = due

    # --- transfers --------------------------------------------------------------------------------

    def promised(self, address: str, room: int, num_tokens: int) -> None:
        """Prefill is to send the KV of `num_tokens` to a room that a router has drawn."""
        if self.measures_prefill:
            self._awaited[room] = self.sources.promised(address, self.now_s(), num_tokens)

    def arrived(self, room: int) -> None:
        self.sources.arrived(self._awaited.pop(room, None), self.now_s())

    def gave_up(self, room: int) -> None:
        """A room has failed: its time says nothing."""
        self.sources.gave_up(self._awaited.pop(room, None))

    # --- steps ------------------------------------------------------------------------------------

    def scheduled(self, rid: str, start: int, count: int) -> None:
        """The next step computes `count` tokens of a request from token `start` on."""
        prompt_len = self._prompt_lens.get(rid)
        if prompt_len is None:
            return
        self._set_due(rid, max(0, prompt_len - start - count))
        # One token is a step of the batch, also where it is a prompt's last one: so a request
        # begins whose KV was loaded.
        if start < prompt_len and count > 1:
            self._prompts += 1
            self._prompt_tokens += count
        else:
            self._running += 1
        if start + count >= prompt_len:
            self._decoding.add(rid)
        else:
            self._decoding.discard(rid)  # where it comes back after a preemption

    def step_scheduled(self) -> None:
        if self.is_on:
            step = _VllmStep(self.now_s(), self._prompts, self._prompt_tokens, self._running)
            self._steps.append(step)
            self._prompts = self._prompt_tokens = self._running = 0

    def step_ended(self) -> None:
        """The result of the oldest step has come."""
        if not self._steps:
            return
        step, now_s = self._steps.popleft(), self.now_s()
        seconds = now_s - max(step.begun_s, self._ended_s)
        self._ended_s = now_s
        if step.prompt_tokens:
            self.sources.chunk(step.prompt_tokens, seconds, step.running)
        elif step.running:
            self.sources.step(seconds)

    # --- laws -------------------------------------------------------------------------------------

    @property
    def rids(self) -> frozenset[str]:
        """Requests that are remembered: decided or admitted, and not over."""
        return frozenset(self._decided) | frozenset(self._prompt_lens)

    def check_invariants(self) -> None:
        """Raise InternalError if what is due in its steps is not the sum of its parts."""
        admitted = self._prompt_lens.keys()
        check_laws(
            {
                "what is due is the sum of it": self._due_tokens == sum(self._due.values()),
                "what is decided is not admitted": not self._decided.keys() & admitted,
                "only admitted requests are due or decode": self._due.keys() <= admitted
                and self._decoding <= admitted,
                "what is due is part of a prompt": all(
                    0 < due <= self._prompt_lens[rid] for rid, due in self._due.items()
                ),
            },
            self._due,
            self._prompt_lens,
        )
