"""The site: `sphinx-build -W docs build/site`, with the extra `docs`."""

import re
from typing import Any

import prefixkv

project = "prefixkv"
version = release = prefixkv.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinxcontrib.mermaid",
]
html_theme = "furo"
html_title = "prefixkv"
exclude_patterns = ["ops/*"]
myst_heading_anchors = 4  # as GitHub makes them
myst_fence_as_directive = ["mermaid"]
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # they stand in the signatures
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_use_rtype = False
OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+(?:[A-Z]+\.md(?:#[\w-]+)?|tests/[\w/.]+|docs/ops/?[^)]*)\)"
)
"""Links that lead out of docs/: the site shows their text alone."""
OPS = re.compile(r"\[([^\]]+)\]\((?:\.\./)*ops/[^)]*\)")


def keep_inside(app: Any, name: str, source: list[str]) -> None:
    source[0] = OPS.sub(r"\1", OUTSIDE.sub(r"\1", source[0]))


def keep(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Napoleon would take what stands before a colon for a type."""
    app.attribute_lines = lines[:]


def plain(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with names in backquotes: nothing else in them is markup."""
    if what == "attribute":
        lines[:] = app.attribute_lines
    if what == "module" and any(line.startswith("    ") for line in lines):
        lines[:] = ["::", "", *(f"    {line}" for line in lines), ""]
        return
    parts = "\n".join(lines).split("`")
    parts[::2] = [re.sub(r"([*|\\]|_\b)", r"\\\1", part) for part in parts[::2]]
    lines[:] = "``".join(parts).split("\n")


def setup(app: Any) -> None:
    app.connect("source-read", keep_inside)
    app.connect("autodoc-process-docstring", keep, priority=1)
    app.connect("autodoc-process-docstring", plain, priority=1000)  # after napoleon
