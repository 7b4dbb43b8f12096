"""The package does not grow by itself: code lines of each folder, and constructors with many
parameters.

Both lists only shrink, unless an issue names a budget. `python -m tests.repository.test_size`
writes what has shrunk into `sizes.json`; what has grown is raised there by hand.
"""

import ast
import io
import json
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "prefixkv"
LIMITS = Path(__file__).with_name("sizes.json")
MOST_PARAMETERS = 6  # `self` aside


def docstrings_and_imports(tree: ast.Module) -> set[int]:
    """The lines of docstrings and of imports.

    >>> sorted(docstrings_and_imports(ast.parse("'a'\\nimport b\\nc = 1")))
    [1, 2]
    """
    lines: set[int] = set()
    for node in ast.walk(tree):
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_import or (is_text and isinstance(node.value.value, str)):  # type: ignore[attr-defined]
            lines |= set(range(node.lineno, (node.end_lineno or 0) + 1))  # type: ignore[attr-defined]
    return lines


def code_lines(source: str) -> int:
    """Lines without docstrings, imports, comments and blanks.

    >>> code_lines("'''Doc.'''\\nimport os\\n\\n# why\\na = 1  # one\\nb = (a,\\n     2)\\n")
    3
    """
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT and token.string.strip():
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings_and_imports(ast.parse(source)))


def folder_of(path: Path) -> str:
    """`cache`, `engines/vllm`, ...; modules beside the folders are `.`."""
    parts = path.relative_to(PACKAGE).parts[:-1]
    return "/".join(parts[: 2 if parts[:1] == ("engines",) else 1]) or "."


def measured() -> dict[str, dict[str, int]]:
    """Code lines by folder, and the parameters of each constructor that has more than it may."""
    folders: Counter[str] = Counter()
    wide: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        folders[folder_of(path)] += code_lines(source)
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.ClassDef):
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    args = method.args
                    count = len(args.posonlyargs + args.args + args.kwonlyargs) - 1
                    if count > MOST_PARAMETERS:
                        name = path.relative_to(PACKAGE).with_suffix("").as_posix()
                        wide[f"{name}:{node.name}"] = count
    return {"code_lines": dict(sorted(folders.items())), "wide_constructors": wide}


def limits() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads(LIMITS.read_text(encoding="utf-8"))
    return found


def grown(kind: str) -> list[str]:
    most = limits()[kind]
    return [
        f"{name}: {count}, at most {most.get(name, 0)}"
        for name, count in measured()[kind].items()
        if count > most.get(name, 0)
    ]


def test_no_folder_has_more_code_than_it_had() -> None:
    assert not grown("code_lines")


def test_no_constructor_has_more_than_six_parameters_but_those_that_had() -> None:
    assert not grown("wide_constructors")


def shrink() -> None:
    """Write what is less than the limits; what is gone is left out."""
    now, most = measured(), limits()
    less = {
        kind: {name: min(count, most[kind].get(name, 0)) for name, count in counts.items()}
        for kind, counts in now.items()
    }
    text = json.dumps(
        {kind: {k: v for k, v in of.items() if v} for kind, of in less.items()}, indent=1
    )
    LIMITS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    shrink()
