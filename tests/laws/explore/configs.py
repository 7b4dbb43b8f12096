"""What is explored: `QUICK` in every run of the tests, `WHOLE` by `fuzz/run.py explore`, but for
what another of them has in it (`needed`)."""

from dataclasses import replace

from tests.laws.explore.actors import Use
from tests.laws.explore.state import Budget, Config

_CHUNKS = (Use(0, 0, 7, chunks=2),)
_AGAIN = (Use(0, 0, 7), Use(1, 0, 7, prompt=0))  # one number and prompt, one after the other
_OTHER = (Use(0, 0, 7, chunks=2), Use(1, 0, 7))  # the same with two prompts, of two lengths
_TWO = (Use(0, 0, 7), Use(1, 0, 8))
_RETRY = (Use(0, 0, 7), Use(1, 0, 7, prompt=0, generation=1))
_WORKERS = (Use(0, 0, 7), Use(1, 1, 8))  # two decode workers


def _configs(base: Config, *budgets: Budget) -> list[Config]:
    """The configuration with each of these budgets, named after it."""
    return [
        replace(base, name=": ".join(filter(None, (base.name, _named(budget)))), budget=budget)
        for budget in budgets
    ]


def _named(budget: Budget) -> str:
    return ", ".join(
        name if count == 1 else f"{name} {count}"
        for name, count in zip(Budget._fields, budget, strict=True)
        if count
    )


def _brief(config: Config) -> Config:
    """Where frames are repeated, `QUICK` shows that a copy of what has been heard does nothing."""
    return replace(config, brief=bool(config.budget.repeat))


def needed(configs: list[Config]) -> list[Config]:
    """Those that no other has in it, which is what may have all of their faults and more. The more
    faults, the earlier, since these take the longest."""
    shapes = [replace(config, name="", budget=Budget()) for config in configs]
    left = [
        config
        for config, shape in zip(configs, shapes, strict=True)
        if not any(
            shape == other_shape and config is not other and _is_part(config.budget, other.budget)
            for other, other_shape in zip(configs, shapes, strict=True)
        )
    ]
    return sorted(left, key=lambda config: -sum(config.budget))


def _is_part(budget: Budget, of: Budget) -> bool:
    # With more than three losses the laws ask for less (`World._lose`).
    alike = (budget.lose > 3) == (of.lose > 3)
    return alike and all(mine <= its for mine, its in zip(budget, of, strict=True))


_ONE, _B = Config(""), Budget
_SAME = replace(
    _ONE, name="one number of two workers", decode=(1, 1), uses=(Use(0, 0, 7), Use(1, 1, 7))
)
_HEARD = replace(_ONE, name="heard", heard=True)
QUICK = [
    *_configs(
        _ONE, _B(lose=1), _B(abort=1), _B(fail=1), _B(restart=1), _B(slow=1), _B(stall=1),
        _B(lose=1, abort=1), _B(repeat=1, abort=1), _B(lose=1, repeat=1), _B(abort=1, stall=1),
    ),
    *_configs(replace(_ONE, name="two chunks", uses=_CHUNKS, arrivals=True), _B(abort=1, fail=1)),
    *_configs(replace(_ONE, name="refused", refuse=True), _B(lose=1, abort=1)),
    *_configs(
        replace(_ONE, name="again", uses=_AGAIN, successor=True),
        _B(slow=1), _B(repeat=1, abort=1), _B(lose=1, slow=1), _B(stall=1, slow=1),
        _B(abort=2, slow=1),
    ),
    *_configs(
        replace(_ONE, name="again, late notifications", uses=_AGAIN, successor=True, arrivals=True),
        _B(abort=1),
    ),
    *_configs(
        replace(_ONE, name="again, another prompt", uses=_OTHER, successor=True, arrivals=True),
        _B(abort=1),
    ),
    *_configs(replace(_ONE, name="two writers", prefill=2), _B(), _B(abort=1)),
    *_configs(replace(_ONE, name="two readers", decode=(2,)), _B(), _B(lose=1)),
    *_configs(replace(_ONE, name="two workers", decode=(1, 1), uses=_WORKERS), _B()),
    *_configs(_SAME, _B(lose=1)),
    *_configs(_ONE, _B(restart=1, slow=1)),
    *_configs(replace(_ONE, name="fenced", fenced=True), _B(restart=1)),
    *_configs(replace(_ONE, name="retried", uses=_RETRY, retry=True), _B(abort=1), _B(fail=1)),
    # Four losses may be all that is said of an outcome, so that only asking again tells.
    *_configs(
        _HEARD, _B(lose=4, fail=1), _B(restart=1), _B(abort=1, stall=1), _B(abort=1, hush=1),
    ),
]  # fmt: skip

_LARGE = [
    # What the issue asks for: one of each, anywhere.
    *_configs(_ONE, _B(lose=1, repeat=1, abort=1, restart=1), _B(repeat=1, abort=1, restart=1)),
    *_configs(
        _ONE, _B(repeat=1, restart=1), _B(lose=1, repeat=1, abort=1, fail=1, slow=1),
        _B(abort=1, restart=1, fail=1),
        _B(restart=1, fail=1, stall=1), _B(abort=1, restart=1, slow=1),
        _B(repeat=1, restart=1, slow=1), _B(lose=1, restart=1, fail=1), _B(restart=2),
    ),
    *_configs(
        replace(_ONE, name="two chunks", uses=_CHUNKS, arrivals=True),
        _B(lose=1, repeat=1, abort=1), _B(restart=1, abort=1), _B(restart=1, fail=1),
    ),
    *_configs(
        replace(_ONE, name="refused", refuse=True),
        _B(repeat=1, abort=1), _B(lose=1, abort=1, restart=1),
    ),
    *_configs(
        replace(_ONE, name="again", uses=_AGAIN, successor=True),
        _B(lose=1, abort=1, slow=1), _B(restart=1),
        _B(stall=2, slow=1), _B(restart=1, slow=1),
    ),
    *_configs(
        replace(_ONE, name="again, another prompt", uses=(Use(0, 0, 7), Use(1, 0, 7)),
                successor=True),
        _B(lose=1, slow=1), _B(abort=2, slow=1),
    ),
    *_configs(
        replace(_ONE, name="two writers", prefill=2),
        _B(lose=1), _B(repeat=1), _B(restart=1), _B(abort=1, fail=1), _B(lose=1, abort=1),
        _B(abort=1, restart=1),
    ),
    *_configs(
        replace(_ONE, name="two readers", decode=(2,)),
        _B(repeat=1), _B(abort=1), _B(restart=1), _B(abort=1, fail=1), _B(lose=1, abort=1),
    ),
    # Two numbers have as many states as one number of two workers, below: rooms are a worker's own.
    *_configs(replace(_ONE, name="two workers", decode=(1, 1), uses=_WORKERS), _B(lose=1)),
    *_configs(
        replace(_ONE, name="two and two", prefill=2, decode=(2,)),
        _B(), _B(lose=1), _B(repeat=1), _B(abort=1),
    ),
    *_configs(
        _SAME, _B(abort=1), _B(repeat=1), _B(fail=1), _B(restart=1), _B(lose=1, abort=1),
    ),
    *_configs(
        replace(_ONE, name="fenced", fenced=True),
        _B(repeat=1, restart=1), _B(abort=1, restart=1), _B(restart=1, fail=1), _B(restart=2),
        _B(lose=1, restart=1),
    ),
    *_configs(
        replace(_ONE, name="retried", uses=_RETRY, retry=True),
        _B(lose=1, abort=1), _B(repeat=1, abort=1), _B(abort=2), _B(abort=1, fail=1),
        _B(stall=1), _B(abort=1, restart=1),
    ),
    *_configs(
        replace(_ONE, name="retried, two writers", prefill=2, uses=_RETRY, retry=True),
        _B(abort=1),
    ),
    *_configs(replace(_ONE, name="two rooms", uses=_TWO), _B(lose=1), _B(abort=1), _B(restart=1)),
    *_configs(
        _HEARD, _B(lose=4, abort=1, slow=1), _B(repeat=1, restart=1), _B(restart=1, hush=1),
        _B(abort=1, restart=1), _B(restart=1, slow=1), _B(restart=1, fail=1, stall=1),
        _B(restart=2), _B(lose=1, repeat=1, abort=1, hush=1),
    ),
    *_configs(
        replace(_HEARD, name="heard, again", uses=_AGAIN, successor=True),
        _B(lose=4), _B(stall=1, slow=1), _B(restart=1), _B(abort=2),
    ),
    *_configs(
        replace(_HEARD, name="heard, two writers", prefill=2), _B(lose=1), _B(abort=1),
        _B(restart=1),
    ),
    *_configs(
        replace(_HEARD, name="heard, two readers", decode=(2,)), _B(lose=1), _B(abort=1),
        _B(restart=1),
    ),
    *_configs(replace(_HEARD, name="heard, two rooms", uses=_TWO), _B(lose=1), _B(restart=1)),
    *_configs(replace(_HEARD, name="heard, refused", refuse=True), _B(lose=1, abort=1, restart=1)),
    *_configs(
        replace(_HEARD, name="heard, retried", uses=_RETRY, retry=True), _B(lose=1, abort=1),
        _B(abort=1, restart=1),
    ),
    *_configs(replace(_HEARD, name="heard, fenced", fenced=True), _B(restart=1, hush=1)),
]  # fmt: skip


WHOLE = [*QUICK, *map(_brief, _LARGE)]


def config_of(name: str) -> Config:
    """Raises LookupError for a name that there is not."""
    for config in WHOLE:
        if config.name == name:
            return config
    raise LookupError(f"there is no configuration {name!r}")
