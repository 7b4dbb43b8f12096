"""Rows of options in which every pair of values occurs: most faults of combinations need two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]


def all_pairs(
    choices: Mapping[str, Sequence[Any]], fits: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Rows, each with a value of every option, in which each pair of values that may stand together
    occurs at least once. Greedy: near the fewest rows, not the fewest.

    Args:
        choices: values by option; equal values of one option count once.
        fits: says of a row, which may lack options, whether its values may stand together.

    >>> len(all_pairs({name: [0, 1] for name in "abcdefgh"})) < 10
    True
    """
    places = {name: range(len(values)) for name, values in choices.items()}

    def value_of(row: Mapping[str, int]) -> Row:
        return {name: choices[name][at] for name, at in row.items()}

    left = {
        frozenset({(one, i), (other, j)})
        for one, other in combinations(choices, 2)
        for i, j in product(places[one], places[other])
        if fits(value_of({one: i, other: j}))
    }
    rows: list[Row] = []
    while left:
        # Begun by a pair that is missing, the smallest by name so that a run repeats.
        row: dict[str, int] = dict(sorted(min(left, key=sorted)))
        for name in choices:
            if name in row:
                continue
            fitting = [at for at in places[name] if fits(value_of({**row, name: at}))]
            assert fitting, f"no value of {name} fits {value_of(row)}"
            row[name] = max(
                fitting,
                key=lambda at: sum(
                    frozenset({(name, at), placed}) in left for placed in row.items()
                ),
            )
        left -= {frozenset(pair) for pair in combinations(row.items(), 2)}
        rows.append({name: choices[name][row[name]] for name in choices})
    return rows
