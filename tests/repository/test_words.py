"""Words that the package does without."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "prefixkv").rglob("*.py"))

WORDS = re.compile(r"afresh|anew\b|so many|nobody|stumbl", re.IGNORECASE)
PER = re.compile(
    r"\b(tokens|bytes|pages|requests|ms|us|KiB|MiB) an? "
    r"(token|page|second|request|pass|turn|step|peer|worker)\b"
)
CODE = re.compile(r"`[^`]*`")  # names in a text are as the code has them


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def tokens_of(path: Path) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))


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


@pytest.mark.parametrize(
    "pattern",
    [pytest.param(WORDS, id="words"), pytest.param(PER, id="an a that means per")],
)
def test_texts_of_the_package_do_without(pattern: re.Pattern[str]) -> None:
    wrong = [line for path in MODULES for line in found(path, pattern)]
    assert not wrong, "\n".join(wrong)
