"""How much Python a call runs, which is its cost without the machine's."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_steps(call: Callable[[], object]) -> int:
    """The number of bytecodes that a call runs. Loops inside C code count as one."""
    steps = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return steps
