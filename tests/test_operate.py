"""docs/operate.md names every setting with its default, every metric, every field of the request
log and every counter, and nothing that is not there."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import prefixkv
from prefixkv import config as settings
from prefixkv.admission import admission_names
from prefixkv.cache.eviction.policy import policy_names
from prefixkv.config import (
    ComputeConfig,
    ControlConfig,
    CurveConfig,
    DecodeConfig,
    HostConfig,
    KVEventsConfig,
    ModelConfig,
    PrefillConfig,
    TransportConfig,
)
from prefixkv.decode import journal as decode_journal
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.pages.manager import PageManager
from prefixkv.prefill import journal as prefill_journal
from prefixkv.prefill.request import PrefillRequest
from prefixkv.request import Request
from prefixkv.runtime import metrics
from prefixkv.runtime.decode_node import DecodeNode
from prefixkv.runtime.node import Node
from prefixkv.runtime.prefill_node import PrefillNode
from prefixkv.serving.router import BoundedAffinityRouter
from prefixkv.serving.tracing import PHASES
from tests.models.node_pair import NodePair, make_pool, tokens_of
from tests.models.patience import PATIENCE_S

TEXT = (Path(__file__).parents[1] / "docs" / "operate.md").read_text(encoding="utf-8")
SIDES = {"both": {"decode", "prefill"}, "decode": {"decode"}, "prefill": {"prefill"}}


def table_after(mark: str) -> list[list[str]]:
    """The cells of the first table behind `mark`, without its two head lines."""
    assert TEXT.count(f"{mark}\n") == 1, mark
    lines = iter(TEXT.partition(f"{mark}\n")[2].splitlines())
    rows = []
    for line in lines:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split(" |")])
        elif rows:
            break
    return rows[2:]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def by_side(mark: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """(side, names, cells) of each row of a table whose second column says which side it is of."""
    for cells in table_after(mark):
        for side in SIDES[cells[1].partition(",")[0]]:
            yield side, code(cells[0]), cells


# --- settings -------------------------------------------------------------------------------------

CONFIGS = [
    DecodeConfig, ComputeConfig, HostConfig, PrefillConfig, ControlConfig, TransportConfig,
    KVEventsConfig, ModelConfig, CurveConfig,
]  # fmt: skip


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@pytest.mark.parametrize("config", CONFIGS)
def test_every_setting_is_there_with_its_default(config: type) -> None:
    fields = dataclasses.fields(config)
    told = {code(cells[0])[0]: cells for cells in table_after(f"### {config.__name__}")}
    assert list(told) == [field.name for field in fields]
    for field in fields:
        _, default, unit, what = told[field.name]
        expected = default_of(field)
        said = eval(code(default)[0], vars(settings)) if default else dataclasses.MISSING
        assert said == expected, field.name
        assert type(said) is type(expected), field.name
        assert what, field.name
        assert unit or not isinstance(expected, int | float) or isinstance(expected, bool)
        seconds = field.name.endswith("_s") and not field.name.endswith("_per_s")
        assert unit == "s" or not seconds


def test_every_config_is_there() -> None:
    own = {
        name for name, value in vars(settings).items()
        if dataclasses.is_dataclass(value) and value.__module__ == settings.__name__  # type: ignore[union-attr]
    }  # fmt: skip
    assert own == {config.__name__ for config in CONFIGS}


def test_every_argument_of_the_router_is_there_with_its_default() -> None:
    arguments = inspect.signature(BoundedAffinityRouter).parameters
    told = {code(cells[0])[0]: code(cells[1])[0] for cells in table_after("## The router")}
    assert {name: eval(default) for name, default in told.items()} == {
        name: argument.default for name, argument in arguments.items()
    }


def shipped(names: Callable[[], list[str]], pattern: str) -> list[str]:
    """Names that the package registers itself, in these files: tests and documents register
    more."""
    sources = Path(prefixkv.__file__).parent.glob(pattern)
    written = "".join(source.read_text(encoding="utf-8") for source in sources)
    return [name for name in names() if f'name = "{name}"' in written]


@pytest.mark.parametrize(
    ("mark", "names", "pattern"),
    [
        ("<!-- policies -->", policy_names, "cache/eviction/*.py"),
        ("## Admission", admission_names, "admission.py"),
    ],
)
def test_every_policy_is_there(mark: str, names: Callable[[], list[str]], pattern: str) -> None:
    told = [name for cells in table_after(mark) for name in code(cells[0])]
    assert sorted(told) == shipped(names, pattern)


# --- metrics --------------------------------------------------------------------------------------


def collected() -> set[tuple[str, str, tuple[str, ...]]]:
    """(side, name as scraped, labels) of every metric."""
    specs: list[tuple[str, Any]] = [("both", spec) for spec in (*metrics.BOTH, *metrics.HISTOGRAMS)]
    specs += [("decode", spec) for spec in metrics.DECODE]
    specs += [("prefill", spec) for spec in metrics.PREFILL]
    counters = metrics.CounterMetricFamily
    return {
        (one, spec.name + "_total" * (getattr(spec, "family", None) is counters), spec.labels)
        for side, spec in specs
        for one in SIDES[side]
    }


def test_every_metric_is_there_with_its_labels() -> None:
    told = {
        (side, names[0], tuple(code(cells[2])))
        for side, names, cells in by_side("<!-- metrics -->")
    }
    assert told == collected()


def test_the_questions_ask_for_metrics_that_there_are() -> None:
    asked = {name for cells in table_after("<!-- questions -->") for name in code(cells[1])}
    assert len(asked) > 10
    assert asked <= {name for _, name, _ in collected()}


# --- the request log and stats --------------------------------------------------------------------

ADDED = {"node", "incarnation", "arrived_at"}  # by runtime/request_log.py, to what journals say


def test_every_field_of_the_request_log_is_there() -> None:
    pages = PageManager(8, 4, 4)
    request = Request("r1", [1, 2, 3], room=7, prefill="tcp://127.0.0.1:1")
    decode = decode_journal.timeline(DecodeRequest(request, pages, 0.0), 1, 1)
    prefill = prefill_journal.timeline(PrefillRequest(request, pages, 0.0), 1, 1)
    told: dict[str, set[str]] = {"decode": set(), "prefill": set()}
    for side, names, _ in by_side("<!-- request-log -->"):
        told[side].update(names)
    assert told == {"decode": decode.keys() | ADDED, "prefill": prefill.keys() | ADDED}


def told_stats(*, at_once: bool) -> dict[str, set[str]]:
    told: dict[str, set[str]] = {"decode": set(), "prefill": set()}
    for side, names, cells in by_side("<!-- stats -->"):
        if ("once it happens" not in cells[1]) == at_once:
            told[side].update(names)
    return told


@pytest.mark.parametrize(("side", "node"), [("decode", DecodeNode), ("prefill", PrefillNode)])
def test_every_key_of_the_stats_is_there(
    side: str, node: Callable[[Any], Node[Any, Any, Any]]
) -> None:
    with node(make_pool()) as made:
        assert told_stats(at_once=True)[side] == made.stats().keys()


@pytest.mark.parametrize(("side", "source"), [("decode", "receiver"), ("prefill", "sender")])
def test_every_counter_of_staging_is_there(side: str, source: str) -> None:
    """They come into the stats when they are first counted."""
    path = Path(prefixkv.__file__).parent / "staging" / f"{source}.py"
    counted = re.findall(r'counters\["(\w+)"\]', path.read_text(encoding="utf-8"))
    told = told_stats(at_once=True)[side] | told_stats(at_once=False)[side]
    assert {f"staging_{name}" for name in counted} == {
        name for name in told if name.startswith("staging_")
    }


# --- a rolling restart ----------------------------------------------------------------------------


def test_a_node_leaves_once_what_it_serves_has_ended() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(next(block for block in blocks if block.startswith("def leave(")), scope)
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


def test_every_span_of_a_nodes_request_is_there_with_the_field_of_its_end() -> None:
    told: dict[str, list[list[str]]] = {"decode": [], "prefill": []}
    for cells in table_after("<!-- spans -->"):
        told.get(cells[0], []).append(cells)
    for side, phases in PHASES.items():
        above, *rows = told[side]  # the span of the whole request comes first
        assert code(above[1])[0] in ("generate", "prefill")
        assert [code(cells[1])[0] for cells in rows] == [name for name, _, _ in phases]
        ends = [[name for name in code(cells[2]) if name.endswith("_s")] for cells in rows]
        fields = [[] if field == "ended_s" else [field] for _, field, _ in phases]
        assert ends == fields
