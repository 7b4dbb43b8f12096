"""The house style, as far as a script can hold it: first words of docstrings, words that the
package does without, class names that mean one thing, and enough comments.

Rules and reasons are in CONTRIBUTING.md, "Rules of the code".
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "prefixkv").rglob("*.py"))

# A docstring begins with a verb, or with the thing that is returned.
FIRST_WORDS = re.compile(r"(What|Of|Where|Whether|How|Its?|By|As|No|Who|So|That|Again)\b")
WORDS = re.compile(r"afresh|anew\b|so many|nobody|stumbl", re.IGNORECASE)
PER = re.compile(
    r"\b(tokens|bytes|pages|requests|ms|us|KiB|MiB) an? "
    r"(token|page|second|request|pass|turn|step|peer|worker)\b"
)
CODE = re.compile(r"`[^`]*`")  # names in a text are as the code has them

LEAST_COMMENTS = 6  # per 100 lines of code


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def tokens_of(path: Path) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions, methods and properties, nested ones included."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, string literal and comment; names in backticks left out."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    # Neighbours are one text: a phrase may be broken between two lines of a comment.
    last, begun, text = -1, 0, ""
    for token in tokens_of(path):
        if token.type != tokenize.COMMENT:
            continue
        line, said = token.start[0], token.string.lstrip("# ")
        if line == last + 1:
            text += " " + said
        else:
            yield begun, text
            begun, text = line, said
        last = line
    yield begun, text


def found(path: Path, pattern: re.Pattern[str]) -> list[str]:
    """Each line at which a text of this module has the pattern."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {match.group()}"
        for line, text in texts_of(path)
        for match in pattern.finditer(" ".join(CODE.sub("", text).split()))
    ]


def test_docstrings_begin_with_a_verb_or_a_thing() -> None:
    wrong = []
    for path in MODULES:
        for node in functions_of(path):
            if first := FIRST_WORDS.match(ast.get_docstring(node) or ""):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {first.group()}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "pattern",
    [pytest.param(WORDS, id="words"), pytest.param(PER, id="an a that means per")],
)
def test_texts_of_the_package_do_without(pattern: re.Pattern[str]) -> None:
    wrong = [line for path in MODULES for line in found(path, pattern)]
    assert not wrong, "\n".join(wrong)


def test_a_class_name_stands_for_one_thing() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: places for name, places in homes.items() if len(places) > 1}
    assert not twice, f"rename these: {twice}"


def test_there_are_comments_where_the_reader_stands() -> None:
    num_code = num_comments = 0
    for path in MODULES:
        documented = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                documented |= set(range(node.lineno, (node.end_lineno or 0) + 1))
        code: set[int] = set()
        for token in tokens_of(path):
            if token.type == tokenize.COMMENT:
                num_comments += 1
            elif token.string.strip():
                code |= set(range(token.start[0], token.end[0] + 1))
        num_code += len(code - documented)
    assert 100 * num_comments >= LEAST_COMMENTS * num_code, (num_comments, num_code)
