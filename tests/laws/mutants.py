"""Mistakes in the code, to see that explorer and liveness alone find each.

A mutant is edits of functions' sources. Their code is swapped while it lives, so tables that name a
function have it too.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Edit = tuple[Any, str, str]  # in the source of this function, this text becomes that


class Mutant:
    """`shown_by` names what shows it; "": it is looked for in all that there is."""

    def __init__(self, name: str, *edits: Edit, shown_by: str = "") -> None:
        self.name, self.edits, self.shown_by = name, edits, shown_by

    def __str__(self) -> str:
        return self.name

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Raises LookupError where a source has not the text, or more than once."""
        with ExitStack() as stack:
            for edit in self.edits:
                stack.enter_context(_edited(*edit))
            yield


@contextmanager
def _edited(function: Any, old: str, new: str) -> Iterator[None]:
    function = getattr(function, "fget", function)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise LookupError(f"{old!r} is {source.count(old)} times in {function}")
    space: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + source.replace(old, new)
    exec(code, function.__globals__, space)
    before, made = function.__code__, space[function.__name__]
    function.__code__ = getattr(made, "fget", made).__code__
    try:
        yield
    finally:
        function.__code__ = before
