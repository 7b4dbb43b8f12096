"""What goes wrong in a case, and the smallest case in which it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.integration.vllm.liveness.case import Case
from tests.integration.vllm.liveness.world import run


def failure_of(case: Case, *, promises_first: bool = True) -> str:
    """What goes wrong in a case; "": nothing."""
    try:
        run(case, promises_first=promises_first)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def kind_of(failure: str) -> str:
    return failure.split(":", 2)[1].strip() if ":" in failure else failure


def shortest(case: Case) -> Case:
    """A smaller case that fails in the same way."""
    kind = kind_of(failure_of(case))
    smaller = True
    while smaller:
        smaller = False
        for one in _smaller(case):
            if kind_of(failure_of(one)) == kind:
                case, smaller = one, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    for i in range(len(case.asks)):
        if len(case.asks) > 1:
            asks = case.asks[:i] + case.asks[i + 1 :]
            yield replace(case, asks=asks, order=tuple(_without(case.order, i)))
    for event in case.order:
        if event[0] == "-":
            yield replace(case, order=tuple(one for one in case.order if one != event))
    plain = Case(case.asks, case.order)
    names = [
        "storm",
        "asynchronous",
        "recompute_below",
        "compute_below",
        "chunk",
        "share",
        "copies_fail",
        "flushes",
        "leaves",
        "host",
    ]
    if not any(ask.way == "ba" for ask in case.asks):
        names.append("both")
    if not case.windows and not case.states:  # else a prompt may be too large for them
        names.append("blocks")
    for name in names:
        if getattr(case, name) != getattr(plain, name):
            yield replace(case, **{name: getattr(plain, name)})
    if case.join:
        yield replace(case, join=False)
    if case.pace not in ("none", "rest"):
        yield replace(case, pace="rest")
    if case.pace != "none":
        yield replace(case, pace="none")
    for i, ask in enumerate(case.asks):
        if ask.num_out > 1:
            asks = (*case.asks[:i], replace(ask, num_out=1), *case.asks[i + 1 :])
            yield replace(case, asks=asks)


def _without(order: tuple[str, ...], i: int) -> Iterator[str]:
    for event in order:
        sign = event[:-1]
        number = int(event[-1])
        if number != i:
            yield f"{sign}{number - (number > i)}"
