"""Documents run, and what they name exists. docs/reference is written from the code (docs/gen.py).

A Python block runs, after those before it in the same document, unless the line above it is a
comment `<!-- not run: why -->`, or `<!-- example -->`: those lines tests/test_example_scheduler.py
runs; or `<!-- file: NAME -->`: a file that the reader makes, which a test of its own runs.
"""

import builtins
import importlib
import inspect
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import prefixkv
from benchmarks.__main__ import BENCHMARKS
from prefixkv import DecodeNode, PrefillNode
from prefixkv.decode.request import DecodeState
from tests.support.node_pair import NodePair, make_pool, tokens_of
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "integrate").glob("*.md")),
]
README = ROOT / "README.md"
NOT_RUN = re.compile(r"<!-- (not run: .+|file: .+|example) -->")
# Names of loggers, none of modules.
LOGGERS = {"prefixkv.requests", "prefixkv.transport", "prefixkv.peers", "prefixkv.record",
           "prefixkv.kv_events"}  # fmt: skip
# Modules that import vLLM, which is not installed here, and what is imported from them.
VLLM = tuple(f"prefixkv.engines.vllm.{name}" for name in (
    "compat", "connector", "hooks", "metrics", "PrefixKVConnector"))  # fmt: skip
FILES = {path.name for folder in ("prefixkv", "benchmarks", "docs", "tests", "fuzz")
         for path in (ROOT / folder).rglob("*.*")}  # fmt: skip
INSTALL = re.compile(r"pip install ([^`\n#&]*)")
each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


# --- reading --------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A fenced block. `line` is that of its first line of code, counted from 1."""

    language: str
    line: int
    code: str
    above: str


def blocks(text: str) -> Iterator[Block]:
    lines = text.splitlines()
    opened: int | None = None
    for i, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = i
        else:
            code = "\n".join(lines[opened + 1 : i])
            yield Block(lines[opened][3:], opened + 2, code, lines[opened - 1] if opened else "")
            opened = None
    assert opened is None, f"a block that begins on line {opened} does not end"


def program(text: str) -> str:
    """The Python blocks that run, each on the lines that it has in the document."""
    out: list[str] = []
    for block in blocks(text):
        if block.language == "python" and not NOT_RUN.fullmatch(block.above.strip()):
            out += [""] * (block.line - 1 - len(out)) + block.code.splitlines()
    return "\n".join(out)


def prose(text: str) -> str:
    """The document without its blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    """What stands in backquotes."""
    return re.findall(r"`([^`\n]+)`", prose(text))


def read(name: str) -> str:
    return (ROOT / name).read_text()


# --- code -----------------------------------------------------------------------------------------


def python_process(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    """Python with this checkout's packages, where every warning is an error."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", *arguments], text=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


_SECONDS = ("engine", "fleet", "operate")  # pages whose code takes seconds


def run_to_its_end(process: subprocess.Popen[str]) -> str:
    """What it has written. Fails if it fails, or takes too long."""
    try:
        written, error = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        written, error = process.communicate()
    assert process.returncode == 0, error
    return written


def run_code(document: Path, folder: Path) -> str:
    """All of a document's code as one program in a process of its own. What it has written."""
    code = program(document.read_text(encoding="utf-8"))
    if not code:
        return ""
    script = folder / f"{document.stem}.py"  # its line numbers are the document's
    script.write_text(code, encoding="utf-8")
    return run_to_its_end(python_process(str(script), folder=folder))


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(one, marks=pytest.mark.slow if one.stem in _SECONDS else (), id=one.name)
        for one in DOCUMENTS
        if one != README
    ],
)
def test_the_code_in_it_runs(document: Path, tmp_path: Path) -> None:
    run_code(document, tmp_path)


def test_the_readme_s_example_prints_what_its_comments_say(tmp_path: Path) -> None:
    """And its last three lines show a hit."""
    code = program(README.read_text(encoding="utf-8"))
    said = [line.partition("  # ")[2] for line in code.splitlines() if "print(" in line]
    assert len(said) == 3
    assert all("print(" in line for line in code.rstrip().splitlines()[-3:])
    assert run_code(README, tmp_path).splitlines() == said


@pytest.mark.slow
def test_the_two_workers_of_the_first_steps_say_what_the_page_says(tmp_path: Path) -> None:
    """docs/start.md: the file that the reader makes, as two processes, at another port."""
    found = list(blocks(read("docs/start.md")))
    (worker,) = (one for one in found if one.above == "<!-- file: worker.py -->")
    (said,) = (one for one in found if one.above == "<!-- output: decode -->")
    code, num = re.subn(r"127\.0\.0\.1:\d+", f"127.0.0.1:{free_port()}", worker.code)
    assert num == 1
    (tmp_path / "worker.py").write_text(code, encoding="utf-8")
    prefill = python_process("worker.py", "prefill", folder=tmp_path)
    try:
        decode = python_process("worker.py", "decode", folder=tmp_path)
        assert run_to_its_end(decode).rstrip("\n") == said.code
        assert run_to_its_end(prefill) == ""
    finally:
        prefill.kill()
        prefill.communicate()


def test_a_node_leaves_once_what_it_serves_has_ended() -> None:
    """docs/ops.md: `leave`, of a rolling restart."""
    scope: dict[str, Any] = {}
    code = (block.code for block in blocks(read("docs/ops.md")))
    exec(next(block for block in code if block.startswith("def leave(")), scope)
    with PrefillNode(make_pool()) as prefill, DecodeNode(make_pool()) as decode:
        pair = NodePair(decode, prefill)
        pair.p.hold = True
        req = pair.submit("r1", tokens_of(1, 20))
        assert not scope["leave"](decode, pair.step, timeout_s=0.1), "prefill computes nothing"
        assert not decode.closed
        pair.p.hold = False
        assert scope["leave"](decode, pair.step, timeout_s=PATIENCE_S)
        assert decode.closed
        assert req.state is DecodeState.FINISHED


def test_the_map_of_the_tests_names_nothing_that_is_gone() -> None:
    text = (ROOT / "tests" / "README.md").read_text()
    folders = [ROOT / "tests" / name for name in ("laws", "support")]
    names = {path.stem for folder in folders for path in folder.glob("*.py")}
    kinds = re.findall(
        r"^\| .* \| (.*) \|$", text.partition("## `laws/`")[2].partition("##")[0], re.M
    )
    assert set(re.findall(r"`([a-z_]+)`", " ".join(kinds))) - names <= {"until"}
    for file in re.findall(r"`(?:tests/)?([\w/]+(?:\.py|/))`", text.partition("## To run")[0]):
        places = [ROOT / "tests", *folders]
        assert any((place / file).exists() for place in places), file


# --- names ----------------------------------------------------------------------------------------


def resolve(name: str) -> Any:
    """The object that a dotted name in prefixkv stands for. Raises AttributeError."""
    found: Any = prefixkv
    for i, part in enumerate(name.split(".")[1:], start=2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(name.split(".")[:i]))
            except ModuleNotFoundError:
                raise AttributeError(name) from None
    return found


@each_document
def test_every_name_in_prefixkv_exists(document: Path) -> None:
    named = re.findall(r"\bprefixkv(?:\.[A-Za-z_]\w*)+", document.read_text())
    for name in set(named) - LOGGERS - {*VLLM}:
        resolve(name)


ENGINES = {"ray", "sglang", "vllm"}
"""What no extra brings: modules that need it are loaded where it is."""


def defined() -> dict[str, list[Any]]:
    """What the package's modules define, by name; several may have something of one name."""
    found: dict[str, list[Any]] = {}
    for module in pkgutil.walk_packages(prefixkv.__path__, "prefixkv."):
        of_command = module.name.startswith("prefixkv.cli") and not module.name.startswith(
            "prefixkv.cli.replay."
        )
        if of_command or module.name.endswith(("_triton", "serving.cluster", "replay.command")):
            continue  # they need extras
        try:
            members = vars(importlib.import_module(module.name))
        except ModuleNotFoundError as error:
            if error.name not in ENGINES:
                raise
            continue
        for name, value in members.items():
            if not isinstance(value, type) or value.__module__ == module.name:
                found.setdefault(name, []).append(value)
    return found


DEFINED = defined()


def has(cls: type, member: str) -> bool:
    """Whether objects of the class have this: a method, a field, or what a method sets."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("prefixkv")]
    return (
        hasattr(cls, member)
        or any(member in vars(base).get("__annotations__", {}) for base in ours)
        or any(re.search(rf"\bself\.{member}\b", inspect.getsource(base)) for base in ours)
    )


@each_document
def test_every_class_and_member_exists(document: Path) -> None:
    """`DecodeNode.add`, `Gated(fresh_s=60)`, `OutOfPagesError`: what begins like a class is one, or
    an alias, and has what is named of it."""
    for span in spans(document.read_text()):
        match = re.match(r"([A-Z]\w*[a-z]\w*)(?:\.(\w+))?(?:\(|$)", span)
        if match is None or hasattr(builtins, match[1]):
            continue
        name, member = match.groups()
        found = DEFINED.get(name, [])
        assert found, f"{span}: there is no {name}"
        if member:
            named = [value for value in found if isinstance(value, type) and has(value, member)]
            assert named, f"{span}: {name} has no {member}"


@each_document
def test_every_benchmark_and_module_that_is_run_exists(document: Path) -> None:
    text = document.read_text()
    for name in re.findall(r"python -m benchmarks ([a-z]\w*)", text):
        assert name in BENCHMARKS
    for name in re.findall(r"python -m (prefixkv[\w.]*)", text):
        resolve(name)


@each_document
def test_every_file_and_folder_that_is_named_exists(document: Path) -> None:
    """As seen from the checkout, or from the package; a bare file name is somewhere in them."""
    for span in spans(document.read_text()):
        if re.fullmatch(r"[\w./-]+/|[\w./-]+\.(py|md|json|png|toml|txt)", span):
            assert any((folder / span).exists() for folder in (ROOT, ROOT / "prefixkv")) or (
                "/" not in span and span in FILES
            ), span


_TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
TESTS = {
    name for path in (ROOT / "tests").rglob("test_*.py") for name in _TEST.findall(path.read_text())
}


@each_document
def test_every_test_that_is_named_exists(document: Path) -> None:
    assert {
        span for span in spans(document.read_text()) if re.fullmatch(r"test_\w+", span)
    } <= TESTS


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_every_link_inside_the_project_resolves(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_every_law_that_is_cited_is_there() -> None:
    text = read("docs/architecture.md").partition("\n## The laws\n")[2].partition("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("fuzz/**/*.py"), *DOCUMENTS]:
        for number in re.findall(r"\blaw (\d+)", path.read_text()):
            assert int(number) in numbers, f"{path.name} cites law {number}"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for needed in ("sphinx", "furo", "myst_parser", "sphinxcontrib.mermaid"):
        pytest.importorskip(needed)
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(ROOT / "docs"), "site"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr


# --- commands -------------------------------------------------------------------------------------


@each_document
def test_each_install_is_of_this_checkout_and_editable(document: Path) -> None:
    """prefixkv is in no index. And a copy would take the place of what was installed before it, so
    that servers no longer run what the checkout has."""
    for said in INSTALL.findall(document.read_text(encoding="utf-8")):
        words = [word for word in shlex.split(said) if word != "-q"]
        if "-c" in words:
            at = words.index("-c")
            assert (ROOT / words[at + 1]).is_file()
            del words[at : at + 2]
        assert words[0] == "-e", said
        assert re.fullmatch(r"\.(\[\w+\])?", words[1]), said
        extra = words[1].strip(".[]")
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert not extra or extra in extras["optional-dependencies"]
