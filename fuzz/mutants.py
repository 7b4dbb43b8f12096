"""Invariant tested: a change of one place of a module is noticed by the module's tests.

mutmut makes the changes (mutants) and runs the tests on each; this script makes a copy of the tree
for it, draws a sample with a seed, and prints those that no test has noticed. mutmut is no
dependency of the project. It needs a virtual environment that sees the project's packages as well:

    python -m venv ENV && ENV/bin/pip install mutmut==3.8.1
    echo PACKAGES > ENV/lib/python3.11/site-packages/project.pth  # the project's site-packages
    python fuzz/mutants.py kv_events --mutmut ENV/bin/mutmut [--sample 80] [--seed 28]

A mutant that makes a test hang is found when the test's patience ends; the copy has less of it.
"""

from __future__ import annotations

import argparse
import configparser
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
PATIENCE_S = 15.0
PARTS = {
    "kv_events": (
        ["kv_events/publisher.py", "kv_events/stream.py"],
        ["tests/unit/kv_events/test_publisher.py", "tests/unit/kv_events/test_stream.py"],
    ),
    "serving": (
        [
            "proxy/server.py", "serving/fleet.py", "serving/wire.py",
            "serving/worker.py", "serving/front.py", "serving/http.py",
        ],
        [
            "tests/unit/proxy", "tests/unit/serving/test_fleet.py",
            "tests/unit/serving/test_feed.py", "tests/unit/serving/test_http.py",
            "tests/unit/serving/test_page.py",
            "tests/integration/serving/test_decode_worker.py",
        ],
    ),
}  # fmt: skip


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--mutmut", default="mutmut", help="its program")
    parser.add_argument("--sample", type=int, default=80, help="mutants; 0: all")
    parser.add_argument("--seed", type=int, default=28)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    modules = [f"prefixkv/{module}" for module in PARTS[args.part][0]]
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        copy_tree(tree, modules, PARTS[args.part][1])
        program = str(pathlib.Path(args.mutmut).absolute()) if "/" in args.mutmut else args.mutmut

        def mutmut(*arguments: str, **options: Any) -> str:
            """Return what it prints."""
            command = [program, *arguments]
            options |= {"cwd": tree, "stdout": subprocess.PIPE, "text": True}
            return str(subprocess.run(command, **options).stdout)

        run = ["run", "--max-children", str(args.processes)]
        # No mutant has this name: mutants and the times of tests are made, and nothing is run.
        mutmut(*run, "none", stderr=subprocess.DEVNULL)
        metas = [json.loads((tree / f"mutants/{module}.meta").read_text()) for module in modules]
        made = sorted(name for meta in metas for name in meta["exit_code_by_key"])
        size = min(args.sample or len(made), len(made))
        names = random.Random(args.seed).sample(made, size)
        mutmut(*run, *names, check=True)
        told = mutmut("results", "--all", "true", check=True)
        found = dict(re.findall(r"^\s*(\S+): (.*)$", told, re.MULTILINE))
        ends = {name: found.get(name, "not run") for name in names}
        left = [name for name, end in ends.items() if end not in ("killed", "timeout")]
        print(f"{len(names)} of {len(made)} mutants, seed {args.seed}: {len(left)} not noticed")
        for name in left:
            print(f"\n{name}: {ends[name]}\n{mutmut('show', name)}")
    return 1 if left else 0


def copy_tree(tree: pathlib.Path, modules: list[str], tests: list[str]) -> None:
    """Copy the commit that is checked out, with mutmut's settings and less patience."""
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(tree)], check=True)
    patience = tree / "tests/support/patience.py"
    text, num = re.subn(
        r"^PATIENCE_S = .*$", f"PATIENCE_S = {PATIENCE_S}", patience.read_text(), flags=re.MULTILINE
    )
    if num != 1:
        sys.exit(f"{patience} has no PATIENCE_S of its own")
    patience.write_text(text)
    settings = configparser.ConfigParser()
    settings["mutmut"] = {
        "source_paths": "prefixkv",
        "only_mutate": "\n".join(modules),
        "pytest_add_cli_args_test_selection": "\n".join(tests),
        "also_copy": "docs\nREADME.md",
        "timeout_multiplier": "1.5",
        "timeout_constant": "25",
        "track_dependencies": "false",
        "use_git_change_detection": "false",
    }
    with (tree / "setup.cfg").open("w", encoding="utf-8") as file:
        settings.write(file)


if __name__ == "__main__":
    sys.exit(main())
