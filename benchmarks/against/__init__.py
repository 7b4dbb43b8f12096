"""`python -m benchmarks sched --against COMMIT`: this tree's hot calls beside another commit's.

Three sides measure in turn: this tree, the other commit in a git worktree of its own, and this tree
once more. The third is A against A: by as much as two equal sides differ, a difference says
nothing. Each side runs the driver of its own tree, `today.py`; a commit that has none, as 76518cc8,
is run by `driver_76518cc8.py`. Figures are of rounds: P50 or P99 of a round's calls, and the ratio
within each round. The processes are started again between some rounds, since two processes of one
tree are not equally fast.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.against.today import CALLS, PAIRS, Order, Seconds
from benchmarks.pair import turn_about
from benchmarks.report import ROOT, told, write
from prefixkv.errors import ConfigError, InternalError

FROZEN: Final = Path(__file__).with_name("driver_76518cc8.py")
BOUND: Final = 1.03
PATIENCE_S: Final = 900.0  # for one part
PARTS: Final = (*CALLS, *PAIRS)
SIDES: Final = ("ours", "theirs", "again")
TWO_FIGURES: Final = ("admission",)  # of which P99 is stated as well as P50

Rounds = dict[str, list[Seconds]]
"""What each side measured, round by round."""


@dataclass(frozen=True)
class Plan:
    """How much is measured. A part of two processes takes seconds, so it gets fewer rounds."""

    parts: Sequence[str]
    rounds: int = 24
    starts: int = 3  # of all processes, each with its share of the rounds
    calls: int = 100  # a round
    seed: int = 0
    policy: str | None = None
    quick: bool = False
    cpu: bool = False  # calls of one thread by its processor time

    def order(self, part: str) -> Order:
        return Order(part, self.calls, self.seed, self.policy, self.quick, self.cpu)

    def rounds_of(self, part: str, start: int) -> int:
        """Return how many rounds of a part are due after this start."""
        rounds = self.rounds if part in CALLS else max(1, self.rounds // 4)
        return rounds // self.starts + (start < rounds % self.starts)


@dataclass(frozen=True)
class Row:
    """One figure of both commits. Ratios are of times: above 1, this tree is slower."""

    name: str
    ours_s: float
    theirs_s: float
    ratio: float
    quartiles: tuple[float, float]
    same_ratio: float
    same_quartiles: tuple[float, float]
    rounds: int

    @property
    def spread(self) -> float:
        """The part by which the same tree differs from itself: its outer quartile."""
        low, high = self.same_quartiles
        return max(high, 1 / low, 1.0) - 1

    @property
    def verdict(self) -> str:
        """`within` the bound; beyond it, but no further than equal sides differ; or `SLOWER`."""
        if self.ratio <= BOUND:
            return "within"
        return "spread" if self.ratio <= 1 + self.spread else "SLOWER"

    def as_json(self) -> dict[str, Any]:
        spread = round(self.spread, 4)
        return {**asdict(self), "spread": spread, "bound": BOUND, "verdict": self.verdict}


# --- statistics -----------------------------------------------------------------------------------


def rows_of(rounds: Rounds) -> list[Row]:
    """Return a row for each figure that all sides have measured in every round."""
    rows = []
    for name in rounds["ours"][0]:
        if name not in rounds["theirs"][0]:  # what that commit has not
            continue
        figures = {"P50": 50, "P99": 99} if name.startswith(TWO_FIGURES) else {"P50": 50}
        for label, percent in figures.items():
            took = {
                side: [float(np.percentile(one[name], percent)) for one in rounds[side]]
                for side in SIDES
            }
            rows.append(row_of(f"{name}, {label}", *took.values()))
    return rows


def row_of(
    name: str, ours: Sequence[float], theirs: Sequence[float], again: Sequence[float]
) -> Row:
    """Return the figures of one call from what its rounds took, in seconds, by side."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    same = [a / b for a, b in zip(ours, again, strict=True)]
    return Row(
        name, statistics.median(ours), statistics.median(theirs),
        round(statistics.median(ratios), 4), quartiles(ratios), round(statistics.median(same), 4),
        quartiles(same), len(ratios),
    )  # fmt: skip


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(values, (25, 75))
    return round(float(low), 4), round(float(high), 4)


# --- processes ------------------------------------------------------------------------------------


class Side:
    """A process that measures with the code of one tree."""

    def __init__(self, tree: Path, seed: int) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(driver_of(tree)), str(theirs.fileno()), str(tree)],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": str(seed)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent, which ends this process
            )

    def measure(self, order: Order) -> Seconds:
        """Return what the part's calls took. Raises InternalError if the side cannot measure it."""
        self._pipe.send(tuple(order))
        if not self._pipe.poll(PATIENCE_S):
            raise InternalError(f"{order.part} did not end within {PATIENCE_S:g} s")
        try:
            good, result = self._pipe.recv()
        except EOFError:
            raise InternalError(f"the process that measures {order.part} died") from None
        if not good:
            raise InternalError(f"{order.part} failed\n{result}")
        seconds: Seconds = result
        return seconds

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def driver_of(tree: Path) -> Path:
    """Return the driver of a tree: its own, or the frozen one."""
    own = tree / "benchmarks" / "against" / "today.py"
    return own if own.exists() else FROZEN


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Have a commit checked out in a worktree of its own, until the end of the `with` block."""
    folder = Path(tempfile.mkdtemp(prefix="prefixkv-against-"))
    tree = folder / "tree"
    # `timeout` ends a run by SIGTERM, which by itself would leave the worktree behind.
    former = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        git("worktree", "add", "--detach", str(tree), commit)
        yield tree
    finally:
        signal.signal(signal.SIGTERM, former)
        # Also after Ctrl-C in the midst of the checkout, where git may know the worktree already.
        shutil.rmtree(folder, ignore_errors=True)
        git("worktree", "prune")


def git(*arguments: str) -> str:
    """Run git on this checkout. Raises ConfigError with the last thing it said."""
    command = ["git", "-C", str(ROOT), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ConfigError(f"git {arguments[0]}: {ended.stderr.strip().splitlines()[-1:]}")
    return ended.stdout.strip()


def commit_of(name: str) -> str:
    """Return the full id of a commit. Raises ConfigError unless there is one of this name."""
    try:
        return git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except ConfigError:
        raise ConfigError(f"--against is {name!r}, git knows no such commit here") from None


# --- all of it ------------------------------------------------------------------------------------


def compare(commit: str, plan: Plan) -> tuple[list[Row], list[str]]:
    """Measure both commits turn about; return the figures, and why a part has none."""
    rounds: dict[str, Rounds] = {part: {side: [] for side in SIDES} for part in plan.parts}
    failed: dict[str, str] = {}
    with tree_of(commit) as other:
        trees = dict(zip(SIDES, (ROOT, other, ROOT), strict=True))
        for start in range(plan.starts):
            with ExitStack() as stack:
                sides = {}
                for side in turn_about(SIDES, start):
                    sides[side] = Side(trees[side], plan.seed + start)
                    stack.callback(sides[side].close)
                for part in plan.parts:
                    began_s = time.monotonic()
                    for number in range(-1, plan.rounds_of(part, start)):  # the first warms up
                        # A pair has processes of its own, so nothing of it stays warm.
                        if part in failed or (number < 0 and part in PAIRS):
                            continue
                        order = plan.order(part)
                        for side in turn_about(SIDES, number + 1):
                            try:
                                took = sides[side].measure(order)
                            except InternalError as error:
                                failed[part] = f"{part}, {side}: {error}"
                                break
                            if number >= 0:
                                rounds[part][side].append(took)
                    took_s = time.monotonic() - began_s
                    print(f"start {start + 1}, {part}: {took_s:.0f} s", flush=True)
    rows = [row for part in plan.parts if part not in failed for row in rows_of(rounds[part])]
    return rows, list(failed.values())


def parts_of(names: Sequence[str]) -> list[str]:
    """Return the parts to measure: those named, or all. Raises ConfigError for a name of none."""
    if unknown := set(names) - set(PARTS):
        raise ConfigError(f"--part is {min(unknown)!r}, the parts are {', '.join(PARTS)}")
    return [part for part in PARTS if part in (names or PARTS)]


def against_command(commit: str, plan: Plan, json_file: Path | None) -> None:
    """Compare, print and write the figures. Raises InternalError if a part failed."""
    theirs, ours = commit_of(commit), commit_of("HEAD")
    rows, failed = compare(theirs, plan)
    found = told(row.as_json() for row in rows)
    write(
        json_file, f"sched --against {commit}", found, failed=failed,
        statistic="medians over rounds of a round's P50 or P99, and of the ratio within a round; "
        "ours beside ours again is A against A", ours=ours, theirs=theirs, plan=asdict(plan),
        ours_is_changed=bool(git("status", "--porcelain", "--untracked-files=no")),
    )  # fmt: skip
    if failed:
        raise InternalError("\n".join(failed))
