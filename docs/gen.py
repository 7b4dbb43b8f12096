"""Write docs/reference from the code: one page for each function in the last lines of this file.

    PYTHONPATH=$PWD python docs/gen.py

A sentence stands below the field of a setting or message, in a metric's text, in a list of keys.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Annotated, Any, get_args, get_origin

import msgspec
import typer
from prometheus_client.core import CounterMetricFamily

import prefixkv
from prefixkv import DecodeNode, PrefillNode, config, spi, transfer
from prefixkv.cache.eviction.policy import Use
from prefixkv.cli.main import app
from prefixkv.conformance import interface
from prefixkv.decode import request as decode_request
from prefixkv.engines.sglang import transfer_options as sglang
from prefixkv.engines.vllm import options
from prefixkv.engines.vllm import stats as vllm
from prefixkv.memory import kv_layout, state_layout
from prefixkv.pages.requests import PagedRequest
from prefixkv.prefill import request as prefill_request
from prefixkv.protocol import messages as wire
from prefixkv.protocol.ids import KVPoll
from prefixkv.protocol.machine import Table
from prefixkv.protocol.receiver_machine import ReceiverMachine
from prefixkv.protocol.sender_machine import SenderMachine
from prefixkv.runtime import metrics as m
from prefixkv.runtime.node import Node
from prefixkv.serving import config as serving
from prefixkv.serving.router import BoundedAffinityRouter
from prefixkv.settings import Field, fields_of, sentences_of

ROOT = Path(__file__).parents[1]
KEYS = re.compile(r"(?ms)^- ((?:`[^`]+`,?\s+)*`[^`]+`):\s(.*?)(?=\n- |\n\n|\Z)")
ARGS = re.compile(r"(?ms)^    (\w+(?:, \w+)*): (.*?)\n(?=    \w+(?:, \w+)*: |\n|\Z|\S)")
LAWS = re.compile(r"(?ms)^(?:- \*\*(\w+)\.\*\*|(\d+)\.) (.*?)(?=\n(?:- |\d+\.)|\n\n|\Z)")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in cells) + "\n"


def one_line(text: str) -> str:
    return " ".join(text.split())


def codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def about(thing: Any) -> str:
    """The docstring of a module, class or function; "" without one of its own."""
    text = isinstance(thing, type | ModuleType | FunctionType | MethodType) and thing.__doc__
    return inspect.cleandoc(text) if text and not text.startswith(f"{thing.__name__}(") else ""


def first_sentence(thing: Any) -> str:
    return re.split(r"(?<=[.])\s+(?=[A-Z`(])", one_line(about(thing).partition("\n\n")[0]))[0]


def classes_of(module: Any, is_wanted: Callable[[type], bool]) -> list[type]:
    own = [one for one in vars(module).values() if inspect.isclass(one)]
    return [one for one in own if one.__module__ == module.__name__ and is_wanted(one)]


def default_of(field: Field) -> str:
    value = field.default
    if value is dataclasses.MISSING:
        return ""
    if field.table is not None and value is not None:
        return f"`{field.table.__name__}()`"
    if "bytes" in field.name and value:
        return f"{value >> 20} MiB" if value >= 1 << 20 else f"{value >> 10} KiB"
    return f"`{value!r}`".replace("'", '"')


def values_of(field: Field) -> str:
    kinds = [kind.range or ("" if field.classes else kind.words) for kind in field.kinds]
    kinds += [f"`{one.__name__}`" for one in field.classes]
    return "; ".join(dict.fromkeys(filter(None, kinds)))


def settings() -> str:
    parts = [
        "A setting `heartbeat_s` of the table `control` is `[control] heartbeat_s` in a file, "
        "`--control-heartbeat-s` on the command line, `PREFIXKV_CONTROL_HEARTBEAT_S` in the "
        "environment. Times are seconds. A value out of its bounds raises `ConfigError`.\n"
    ]
    known: dict[str, str] = {}  # what two workers share stands with the first
    modules = (config, serving, options, sglang)
    for kind in (kind for one in modules for kind in classes_of(one, dataclasses.is_dataclass)):
        rows = []
        for field in fields_of(kind):
            text = field.sentences or ("" if field.table else known.get(field.name, ""))
            if field.flat and field.table is not None:
                without = f", without {codes(field.but)}" if field.but else ""
                text = f"The settings of `{field.table.__name__}`{without}, by their own names."
            rows.append([f"`{field.name}`", default_of(field), values_of(field), text])
        known |= sentences_of(kind)
        if not any(text for *_, text in rows):  # a record, no settings
            continue
        parts.append(f"## {kind.__name__}\n\n{about(kind)}\n")
        parts.append(table(["setting", "default", "values", "what it is"], rows))
    return "\n".join(parts)


def node_rows() -> Iterator[list[str]]:
    sides: dict[str, tuple[Any, ...]] = {
        "both": m.BOTH + m.HISTOGRAMS, "decode": m.DECODE, "prefill": m.PREFILL
    }  # fmt: skip
    for side, spec in ((side, spec) for side, specs in sides.items() for spec in specs):
        total = "_total" * (getattr(spec, "family", None) is CounterMetricFamily)
        yield [f"`prefixkv_{spec.name}{total}`", side, codes(spec.labels), spec.text]


def served_rows() -> Iterator[list[str]]:
    for path in sorted((ROOT / "prefixkv").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if '"prefixkv_' in source else ():
            family = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if not family.startswith(("Counter", "Gauge", "Histogram")) or len(node.args) < 2:
                continue
            name, text = map(string, node.args[:2])
            if text and name.startswith("prefixkv_"):
                lists = [*node.args[2:], *(x.value for x in node.keywords if x.arg == "labels")]
                labels = ast.literal_eval(lists[0]) if lists else ()
                total = "_total" * family.startswith("Counter")
                yield [f"`{name}{total}`", path.stem, codes(labels), text]


def string(node: ast.expr) -> str:
    """A string of a source; KIND stands for what an f-string puts in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(string(one) or "KIND" for one in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else ""


def metrics() -> str:
    vllms = [[f"`vllm:prefixkv_{name}_total`", text] for name, text in vllm.METRICS.items()]
    vllms += [[f"`vllm:prefixkv_{name}`", text] for name, text in vllm.GAUGES.items()]
    heads = ["metric", "side", "labels", "what it is"]
    return (
        "What to look at: [operate.md](../operate.md#metrics).\n\n## Nodes\n\nEvery metric of a "
        "node has the label `node`. 64 namespaces and 64 peers have labels of their own; further "
        f"ones are `other`.\n\n{table(heads, node_rows())}\n## Servers\n\nKIND is the kind of "
        "process: `front`, `worker` or `proxy`.\n\n"
        f"{table(['metric', 'module', *heads[2:]], sorted(served_rows()))}\n## vLLM's connector\n\n"
        f"With the labels of vLLM's own metrics.\n\n{table(heads[::3], vllms)}"
    )


def keys_table(**sides: Any) -> str:
    """The lists in the docstrings of these functions: "- `key`, `key`: text"."""
    found = ((side, *item) for side, one in sides.items() for item in KEYS.findall(about(one)))
    rows = [[one_line(keys), side, one_line(text)] for side, keys, text in found]
    return table(["key", "side", "what it is"], rows)


def stats() -> str:
    logs = {"decode": decode_request.timeline, "prefill": prefill_request.timeline}
    return (
        "## Stats\n\n`node.stats()` returns a dict of ints, for the engine's own log. Keys of "
        "lost frames and of staging come when it first happens, the others from the start.\n\n"
        + keys_table(both=Node.stats, decode=DecodeNode.stats, prefill=PrefillNode.stats)
        + "\n## The request log\n\n[operate.md](../operate.md#the-request-log) says how to turn it "
        "on. Fields that end in `_s` are seconds since the request arrived, of the first time that "
        "it happened; null: it did not.\n\n" + keys_table(both=PagedRequest.timeline, **logs)
    )


def struct_part(kind: Any, known: dict[str, str]) -> str:
    bases = [base for base in reversed(kind.__mro__) if base.__module__.startswith("prefixkv")]
    types = {name: hint for base in bases for name, hint in base.__annotations__.items()}
    texts = known | {name: text for base in bases for name, text in sentences_of(base).items()}
    names = kind.__struct_fields__
    fields = [[f"`{name}`", f"`{types[name]}`", texts.get(name, "")] for name in names]
    tag = f" (`{kind.__struct_config__.tag}`)" if kind.__struct_config__.tag else ""
    shown = table(["field", "type", "meaning"], fields) if fields else "No fields.\n"
    return f"## {kind.__name__}{tag}\n\n{about(kind)}\n\n{shown}"


def bounds() -> Iterator[list[str]]:
    spaces = [vars(module) for module in (kv_layout, state_layout, wire)]
    for name, kind in {name: kind for space in spaces for name, kind in space.items()}.items():
        if get_origin(kind) is Annotated:
            base, meta = get_args(kind)[:2]
            limits = {key: getattr(meta, key) for key in ("ge", "le", "min_length", "max_length")}
            text = ", ".join(f"{key} {num:,}" for key, num in limits.items() if num is not None)
            yield [f"`{name}`", f"`{(get_origin(base) or base).__name__}`", text]


def messages() -> str:
    parts = [
        f"Wire version {wire.PROTOCOL_VERSION}. Structs travel as msgpack arrays, with their "
        "fields in this order; a body begins with its tag, in brackets here. `KVLayout` and `Slab` "
        "travel as maps. What the messages are for: [protocol.md](../protocol.md).\n"
    ]
    structs = [
        kind
        for module in (wire, kv_layout, state_layout)
        for kind in classes_of(module, lambda one: issubclass(one, msgspec.Struct))
        if kind.__name__[0] != "_" and not kind.__name__.endswith("Body")
    ]
    # A field without a sentence has that of the first field of its name.
    known = {name: text for kind in structs[::-1] for name, text in sentences_of(kind).items()}
    parts += [struct_part(kind, known) for kind in structs]
    parts.append("## Bounds\n\nA frame with a value out of its bounds is malformed.\n")
    parts.append(table(["name", "type", "bounds"], bounds()))
    parts.append(
        "## State machines of a room\n\nAn arrow names the events that may lead along it, a note "
        "the events that the state ignores. An event that a state names in neither must not come: "
        "it raises an InternalError.\n"
    )
    for machine in (ReceiverMachine, SenderMachine):
        parts.append(f"`{machine.__name__}`:\n\n```mermaid\n{diagram(machine.TABLE)}\n```\n")
    return "\n".join(parts)


def diagram(table: Table) -> str:
    """A table of a room machine in mermaid."""
    lines = ["stateDiagram-v2", f"    [*] --> {min(table).name}"]
    for state, row in table.items():
        for after in KVPoll:
            events = [event.__name__ for event, step in row.items() if after in step.next_states]
            if events:
                lines.append(f"    {state.name} --> {after.name} : {', '.join(events)}")
        if state.ended:
            lines.append(f"    {state.name} --> [*]")
        ignored = [event.__name__ for event, step in row.items() if step.method is None]
        if ignored:
            lines.append(f"    note right of {state.name} : ignores {', '.join(ignored)}")
    return "\n".join(lines)


def commands() -> str:
    parts = ["`--help-all` shows [settings](settings.md) that `--help` leaves out.\n"]
    pending: list[tuple[str, Any]] = [("prefixkv", typer.main.get_command(app))]
    while pending:
        name, command = pending.pop(0)
        inner = getattr(command, "commands", {})
        pending[:0] = [(f"{name} {part}", one) for part, one in inner.items()]
        shown = [one for one in command.params if not getattr(one, "hidden", False)]
        rows = [[option_of(one), one_line(getattr(one, "help", "") or "")] for one in shown]
        parts.append(f"## {name}\n\n{inspect.cleandoc(command.help or '')}\n")
        parts += [table(["option", "what it does"], rows)] if rows else []
    return "\n".join(parts)


def option_of(option: Any) -> str:
    is_argument = option.param_type_name == "argument"
    return codes([option.name] if is_argument else [*option.opts, *option.secondary_opts])


def names() -> str:
    parts = []
    for module in (prefixkv, transfer, spi):
        things = {name: getattr(module, name) for name in module.__all__}
        rows = [[f"`{name}`", first_sentence(thing)] for name, thing in things.items()]
        parts.append(f"## {module.__name__}\n\n{first_sentence(module)}\n")
        parts.append(table(["name", "what it is"], rows))
    parts.append(
        "## prefixkv.errors, prefixkv.settings\n\nAll their names without an underscore: every "
        "exception, and checks of values; types, bounds and readers of settings.\n"
    )
    return "\n".join(parts)


CALLS = {
    prefixkv.DecodeNode: """add pop_preallocated pop_transferred pop_failed pop_needs_prefill
        append_many reserve_many finish announce retract abort fail refuse retarget
        give_up_prefill pop_local computed chunk_tokens save_state save_states flush
        take_cache_events fence peers lost_peers on_ended take_log apply_rank_events
        awaited_ranks fence_rank wait fileno drain audit close""",
    prefixkv.PrefillNode: """add pop_bootstrapped send_chunk pop_sent pop_failed abort fail refuse
        save_state flush endpoint fence peers lost_peers take_log apply_rank_events fence_rank
        wait fileno drain audit close""",
    prefixkv.DecodeRequest: "tokens pages row window_pages",
    prefixkv.PrefillRequest: "tokens pages row window_pages",
    prefixkv.KVPool: "create from_tensors with_groups k v latent group read_pages write_pages",
    transfer.DecodeTransfers: """open abort refuse take_events wait fileno move_weights fence peers
        lost_peers num_rooms stats close""",
    transfer.PrefillTransfers: """add send_chunk offer withdraw abort refuse endpoint take_events
        wait fileno move_weights fence peers lost_peers num_rooms stats close""",
    interface.EngineSides: """submit abort step expected restart decode prefill vocabulary close""",
}
RECORDS = (
    prefixkv.Request,
    prefixkv.Hints,
    prefixkv.PrefillAsk,
    Use,
    BoundedAffinityRouter,
    interface.ScenarioSettings,
    interface.Prompt,
)


def calls() -> str:
    """Methods with the first paragraph of their docstring, and the fields of records."""
    parts = ["The docstrings in the code say more: what each call raises, and what it costs.\n"]
    for kind, listed in CALLS.items():
        rows = []
        for name in listed.split():
            member = inspect.getattr_static(kind, name, None)
            function = getattr(kind, name, None)
            shown = name + (signature(function) if callable(function) else "")
            doc = inspect.getdoc(member.__func__ if isinstance(member, classmethod) else member)
            rows.append([f"`{shown}`", one_line((doc or "").partition("\n\n")[0])])
        parts.append(f"## {kind.__name__}\n\n{first_paragraphs(kind)}\n")
        parts.append(table(["call", "what it does"], rows))
    for kind in RECORDS:
        made = inspect.signature(kind).parameters
        rows = [
            [
                codes(names.split(", ")),
                default_shown(made[names.split(", ")[0]].default),
                one_line(text),
            ]
            for names, text in ARGS.findall(about(kind) + "\n")
        ]
        parts.append(f"## {kind.__name__}\n\n{first_paragraphs(kind)}\n")
        parts += [table(["field", "default", "what it is"], rows)] if rows else []
    return "\n".join(parts)


def first_paragraphs(kind: type) -> str:
    """A class's docstring up to its arguments."""
    return re.split(r"\n\n?(?:Args|Attributes|Raises|Returns)\b", about(kind))[0].rstrip()


def signature(function: Any) -> str:
    """The arguments without their types."""
    found = inspect.signature(function)
    arguments = [arg for name, arg in found.parameters.items() if name != "self"]
    bare = [arg.replace(annotation=arg.empty) for arg in arguments]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def default_shown(value: Any) -> str:
    if value is inspect.Parameter.empty or dataclasses.is_dataclass(value):
        return ""
    return f"`{value!r}`".replace("'", '"')


def read_laws() -> dict[str, str]:
    """The laws of docs/architecture.md, by "1", "T1", "order": as mutants name them."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = LAWS.findall(text.partition("\n## The laws\n")[2].partition("\n## ")[0])
    keys = (number or (name if name[-1].isdigit() else name.lower()) for name, number, _ in found)
    return dict(zip(keys, (one_line(law) for _, _, law in found), strict=True))


def laws() -> str:
    path = ROOT / "fuzz" / "twenty_mutants.py"
    spec: Any = importlib.util.spec_from_file_location("twenty_mutants", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows: dict[str, list[list[str]]] = {law: [] for law in read_laws()}
    for mutant in module.MUTANTS:
        test = module.find_test(ROOT, mutant.test)
        rows.setdefault(mutant.law, []).append([mutant.what, f"`{mutant.function}`", f"`{test}`"])
    parts = [
        "Each [law](../architecture.md#the-laws), the mistakes against it that "
        "`fuzz/twenty_mutants.py` makes in the code, and the test that fails with each.\n"
    ]
    for law, text in read_laws().items():
        shown = table(["mistake", "made in", "test"], rows[law])
        linked = text.replace("](#", "](../architecture.md#")
        parts.append(f"## Law {law}\n\n{linked}\n\n{shown}")
    return "\n".join(parts)


if __name__ == "__main__":
    for write in (settings, metrics, stats, messages, commands, calls, names, laws):
        page = ROOT / "docs" / "reference" / f"{write.__name__}.md"
        title = f"# {write.__name__.capitalize()}\n\n"
        page.write_text(f"<!-- Written by docs/gen.py. -->\n\n{title}{write()}", encoding="utf-8")
