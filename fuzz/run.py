"""Long runs from a seed: `python fuzz/run.py NAME [--seconds 600] [--rounds 5000] [--seed 7]`; a
finding is raised, with the seed that leads to it. Names, and the invariant of each:

allocator    every page is in one state, free runs are maximal, an allocation has the fewest runs
radix        the radix cache and a naive dictionary of prefixes agree, under every `--policy`
leases       staging leases never overlap a live one, end once, are held until proof
windows      every token that a step sees in a window is there, of its path; a naive model agrees
scheduler    decode, one to four ranks, with host memory, windows, states, over transfers and copies
             that fail, keeps every law after each step, and ends with nothing held
mesh_pair    whole workers of any meshes, staged, sliced or direct, over a bad network, with aborts,
             restarts and flushes, end with nothing held; every byte read is the one computed
weights      the same while weights change in place: two versions never mix
engine       tokens of Hugging Face's models are what the model says by itself; `--models llama,...`
liveness     in whatever order requests arrive at small pools, each ends; `--case` plays one again,
             `--mutants` has to find each
frames       whatever a prefill and a decode node are sent, they live, no call of their engines
             raises, and honest requests are served with every byte right; `--frames`
explore      in every state that a small configuration can reach the laws hold, and a way leads to
             rest; `--config`, `--max-states`, and `--mutants` has to find each
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from fuzz.frames import attack
from tests.laws import scheduler_machine, window_machine
from tests.laws.allocator_model import AllocatorMachine
from tests.laws.explore import configs, search
from tests.laws.explore import mutants as explore_mutants
from tests.laws.explore.actors import Actors
from tests.laws.explore.state import LawError
from tests.laws.lease_machine import LeaseMachine
from tests.laws.liveness import explore as orders
from tests.laws.liveness import mutants as liveness_mutants
from tests.laws.liveness import world
from tests.laws.liveness.cases import ONCE
from tests.laws.radix_machine import POLICIES, RadixMachine
from tests.support.sim_engines import SIZES, simulation
from tests.support.sim_weights import weights_simulation

Round = Callable[[int], Any]
_QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


def rounds(options: argparse.Namespace, play: Round) -> None:
    """Play a round for each seed until the time is up; what it counts is added up."""
    began_s, number, totals = time.monotonic(), options.seed, Counter[str]()
    last = number + options.rounds
    while number < last and time.monotonic() - began_s < options.seconds:
        try:
            totals.update(play(number) or {})
        except BaseException:
            print(f"found with --seed {number}", file=sys.stderr)
            raise
        number += 1
    counted = {name: num for name, num in totals.items() if not name.startswith("failed:")}
    done = number - options.seed
    print(f"{options.name}: {done} rounds from seed {options.seed}, no finding; {counted}")


# --- state machines -------------------------------------------------------------------------------


def machine_round(machine: type[RuleBasedStateMachine], number: int) -> None:
    """A finding is shrunk, and printed with the calls that lead to it."""
    profile = settings(max_examples=50, stateful_step_count=100, **_QUIET)  # type: ignore[arg-type]
    run_state_machine_as_test(seed(number)(machine), settings=profile)


def radix(options: argparse.Namespace) -> Round:
    policies = [options.policy] if options.policy else POLICIES

    def play(number: int) -> None:
        policy = policies[number % len(policies)]
        machine_round(type(f"Machine_{policy}", (RadixMachine,), {"policy": policy}), number)

    return play


def scheduler(options: argparse.Namespace) -> Round:
    def play(number: int) -> Counter[str]:
        counts: Counter[str] = Counter()

        @seed(number)
        @settings(max_examples=20, **_QUIET)
        @given(
            setup=st.binary(min_size=8, max_size=8),
            spelling=st.lists(st.binary(min_size=4, max_size=4), min_size=500, max_size=500),
        )
        def one_run(setup: bytes, spelling: list[bytes]) -> None:
            values = [int.from_bytes(step, "little") for step in spelling]
            sim = scheduler_machine.run(int.from_bytes(setup, "little"), values)
            counts.update({"runs": 1, "steps": sim.counts["steps"]})
            counts.update(sim.decode.scheduler.counters)
            counts.update({f"copies {what}": num for what, num in sim.copies.counts.items()})

        one_run()
        return counts

    return play


# --- simulations of two workers -------------------------------------------------------------------


def simulated(make: Callable[[int], Any]) -> Round:
    def play(number: int) -> dict[str, int]:
        sim = make(number)
        try:
            sim.run()
        except BaseException:
            print(sim.shape, sim.storm, file=sys.stderr)
            raise
        counted = Counter(sim.counters) + Counter(sim.decode.scheduler.counters)
        return {**counted, "finished in all": sim.finished}

    return play


def mesh_pair(options: argparse.Namespace) -> Round:
    """Of 16 pairs 15 have a rank a side; of 64 one is audited after every step."""

    def make(number: int) -> Any:
        sizes = SIZES[:1] if number % 16 else SIZES
        return simulation(number, sizes=sizes, audit_every=1 if number % 64 == 1 else 32)

    return simulated(make)


def engine(options: argparse.Namespace) -> Round:
    import torch

    from prefixkv.engines.hf import PagedModel, make_model
    from tests.support.hf_workload import Found, run_round
    from tests.support.hf_world import TINY, Reference
    from tests.support.hybrid_models import FAMILIES, config_of

    def make(kind: str, number: int) -> PagedModel:
        if kind in FAMILIES:
            return make_model(config_of(kind), number)
        extra = {"sliding_window": None} if kind == "mistral" else {}
        return make_model(kind, number, **TINY, **extra)

    torch.set_num_threads(1)
    models = [make(kind, number) for number, kind in enumerate(options.models.split(","))]
    references = [Reference(model) for model in models]
    found = Found()

    def play(number: int) -> None:
        which = number % len(models)
        run_round(models[which], references[which], number, found, num_requests=12)

    return play


# --- liveness, and the explorer -------------------------------------------------------------------


def liveness(options: argparse.Namespace) -> None:
    if options.mutants:
        all_found((str(mutant), orders.find(mutant)) for mutant in liveness_mutants.MUTANTS)
    elif options.case:
        case = ONCE[options.case] if options.case in ONCE else world.Case.of(options.case)
        print(dict(world.run(case, print).counters))
    else:
        profile = orders.long_profile(options.seed)
        counts = orders.explore(profile, time.monotonic() + options.seconds)
        print(f"liveness: {dict(counts)}, no finding")


def frames(options: argparse.Namespace) -> None:
    try:
        attack(options.frames, options.seconds, options.seed)
    except BaseException:
        print(f"found with --seed {options.seed}", file=sys.stderr)
        raise


def all_found(found: Iterable[tuple[str, Any]]) -> None:
    missed = 0
    for name, failure in found:
        missed += not failure
        print(f"{name}: {failure or 'NOT FOUND'}", flush=True)
    if missed:
        raise SystemExit(1)
    print("all mutants found")


def explore(options: argparse.Namespace) -> None:
    if options.mutants:
        mutants = explore_mutants.MUTANTS
        all_found((mutant.name, explore_mutants.find(mutant)) for mutant in mutants)
        return
    named = options.config and [configs.config_of(options.config)]
    chosen = named or configs.needed(configs.WHOLE)
    end_s = time.monotonic() + options.seconds
    tasks = [(config, options.max_states, end_s) for config in chosen]
    states = 0
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for config, found in pool.imap_unordered(_explored, tasks):
            if isinstance(found, LawError):
                print(f"{config.name}: {found}", *found.trace, sep="\n    ", file=sys.stderr)
                raise found
            print(found, flush=True)
            states += found.states
    print(f"explore: {states:,} states of {len(chosen)} configurations, no finding")


_tables: dict[Any, Any] = {}  # of this process, by what decides what control objects do


def _explored(task: tuple[Any, int, float]) -> tuple[Any, Any]:
    """In a process of its own."""
    config, max_states, end_s = task
    table = _tables.setdefault((config.prefill, config.decode, config.uses), Actors())
    try:
        left_s = max(0.0, end_s - time.monotonic())
        return config, search.explore(config, table, max_states=max_states, max_seconds=left_s)
    except LawError as error:
        return config, error


SEEDED: dict[str, Callable[[argparse.Namespace], Round]] = {
    "allocator": lambda _: partial(machine_round, AllocatorMachine),
    "radix": radix,
    "leases": lambda _: partial(machine_round, LeaseMachine),
    "windows": lambda _: partial(window_machine.run, num_turns=600),
    "scheduler": scheduler,
    "mesh_pair": mesh_pair,
    "weights": lambda _: simulated(weights_simulation),
    "engine": engine,
}
WHOLE = {"liveness": liveness, "explore": explore, "frames": frames}


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("name", choices=[*SEEDED, *WHOLE])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rounds", type=int, default=10**9, help="at most")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; later ones add 1")
    parser.add_argument("--policy", help="of radix; by default all in turn")
    kinds = "llama,qwen3,mistral,qwen3_next,granitemoehybrid,gemma3_text,gpt_oss"
    parser.add_argument("--models", default=kinds, help="of engine")
    parser.add_argument("--case", help="of liveness, as a failure printed it, or a name of ONCE")
    parser.add_argument("--config", help="of explore; by default all")
    parser.add_argument("--max-states", type=int, default=10**9, help="of each configuration")
    parser.add_argument("--frames", type=int, default=1_000_000, help="at most")
    parser.add_argument("--mutants", action="store_true", help="of explore and liveness")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.name in WHOLE:
        WHOLE[options.name](options)
    else:
        rounds(options, SEEDED[options.name](options))


if __name__ == "__main__":
    main()
