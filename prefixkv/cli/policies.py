"""Eviction policies on the command line: a name, or the class of a module, each with settings."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from inspect import isabstract, signature
from itertools import combinations
from math import isclose
from random import Random
from typing import Any

from prefixkv.errors import ConfigError
from prefixkv.spi import Policy, Use, explain_policy, make_policy, policy_names


def policy_of(text: str) -> Policy:
    """Make an eviction policy object of `NAME` or `MODULE:CLASS`; `:setting=value` may follow,
    repeatedly.

    A module is looked for in the current folder too.

    Raises:
        ConfigError: an unknown name, module, class or setting; a module that fails when it is
            imported; a class that is no policy, fails when one is made, or breaks a law of
            policies in a small sample; a value that is no number or out of its bounds.

    >>> policy_of("adaptive:trust=5:half_life_s=600").half_life_s
    600
    """
    name, *pairs = text.split(":")
    is_own = name not in policy_names() and bool(pairs) and "=" not in pairs[0]
    if is_own:
        name = f"{name}:{pairs.pop(0)}"
        kind = _class_of(name)
    elif why := explain_policy(name):
        raise ConfigError(f"policy {why}; one of your own is MODULE:CLASS")
    else:
        kind = type(make_policy(name))
    settings: dict[str, Any] = {}
    for pair in pairs:
        setting, _, value = pair.partition("=")
        try:
            settings[setting] = int(value) if value.isdecimal() else float(value)
        except ValueError:
            raise ConfigError(f"policy {text!r}: {setting!r} is no number") from None
    try:
        signature(kind).bind(**settings)
    except TypeError as error:
        raise ConfigError(f"policy {text!r}: settings of {name}: {error}") from None
    try:
        policy = kind(**settings)
    except ConfigError:
        raise
    except Exception as error:  # a class of one's own may raise anything
        raise ConfigError(f"policy {text!r}: {name} cannot be made: {_said(error)}") from None
    if not isinstance(getattr(policy, "name", None), str) or not policy.name:
        raise ConfigError(f"policy {text!r}: {name} has no name")
    if is_own and (broken := broken_law(kind(**settings))):
        raise ConfigError(f"policy {text!r}: {name} {broken}")
    return policy


def broken_law(policy: Policy) -> str:
    """Return the law that a new policy breaks in a sample of uses, "" if none. What a method raises
    is left to the replay, which shows where."""
    with suppress(Exception):
        policy.serve(1, 64)
        # The first four are alike but for tick and time: only the ticks tell these leaves apart.
        # As in a cache, a single object serves every use.
        marks, draw, use = [], Random(1), Use(tree_pages=16)
        for tick in range(1, 17):
            pages, priority = (4, 0) if tick < 5 else (draw.randint(1, 12), draw.randint(0, 2))
            use.tick, use.now_s, use.num_pages, use.priority = tick, float(tick), pages, priority
            marks.append(policy.insertion_marks(use)[-1][1])  # that of the leaf's last page
        ranks = [policy.rank(mark) for mark in marks]
        # A queue of the policy's own need not go by rank.
        by_rank = type(policy).make_queue is Policy.make_queue
        if by_rank and (same := [a for a, b in combinations(ranks, 2) if not (a < b or b < a)]):
            return f"gives two leaves the same rank, {same[0]!r:.60}: no two may be equal"
        if by_rank and any(a < b or b < a for a, b in zip(ranks, map(policy.rank, marks))):  # noqa: B905
            return "has a rank that is another one when asked for again"
        for number in range(64):
            at = [0, 1, 2] if number == 0 else draw.sample(range(16), 3)
            one, two, three = (marks[index] for index in at)
            left = policy.fold(policy.fold(one, two), three)
            right = policy.fold(one, policy.fold(two, three))
            if not _alike(left, right):
                return (
                    f"has a fold that is not associative: of three marks it makes {left!r:.60} or "
                    f"{right!r:.60}"
                )
            for mark, tick in ((one, at[0] + 1), (left, max(at) + 1)):
                if (told := policy.last_tick(mark)) != tick:
                    return f"has a last_tick of {told!r:.60} for a history whose last is {tick}"
    return ""


def _alike(one: Any, other: Any) -> bool:
    """Return whether they are equal but for the rounding of floats."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
    # An object without an equality of its own says nothing.
    kind: Any = type(one)
    return bool(one == other) or kind.__eq__ is object.__eq__


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ImportError | SyntaxError):
        return text  # says it all by itself
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _class_of(name: str) -> type[Policy]:
    """Import `MODULE:CLASS`. Raises ConfigError if it cannot serve as a policy."""
    module, _, kind = name.partition(":")
    folder = os.getcwd()
    sys.path.insert(0, folder)  # which a console script does not do by itself
    try:
        found = getattr(import_module(module), kind, None)
    # Anything may be wrong in a module of one's own, and some end the process.
    except (Exception, SystemExit) as error:
        why = f"module {module!r} cannot be imported: {_said(error)}"
        raise ConfigError(f"policy {name!r}: {why}") from None
    finally:
        sys.path.remove(folder)
    if found is None:
        raise ConfigError(f"policy {name!r}: module {module!r} has no class {kind!r}")
    if not isinstance(found, type) or not issubclass(found, Policy):
        raise ConfigError(f"policy {name!r}: {kind!r} is no class derived from prefixkv's Policy")
    if isabstract(found):
        lacks = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"policy {name!r}: {kind!r} does not define {lacks}")
    return found
