"""What docs/gen.py takes its sentences from is whole: CI compares the pages themselves."""

import dataclasses
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

import prefixkv
from prefixkv import DecodeNode, DecodeRequest, PrefillNode, PrefillRequest, Request, config
from prefixkv.decode import request as decode_request
from prefixkv.pages.manager import PageManager
from prefixkv.pages.requests import PagedRequest
from prefixkv.prefill import request as prefill_request
from prefixkv.protocol import messages
from prefixkv.runtime.node import Node
from prefixkv.settings import fields_of, sentences_of
from tests.support.node_pair import make_pool

GEN = Path(__file__).parents[2] / "docs" / "gen.py"


def gen() -> Any:
    spec: Any = importlib.util.spec_from_file_location("gen", GEN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keys_of(*functions: Any) -> set[str]:
    """The keys that the lists of these docstrings have."""
    module = gen()
    lists = [keys for one in functions for keys, _ in module.KEYS.findall(module.about(one))]
    return {key for keys in lists for key in re.findall(r"`([^`]+)`", keys)}


def test_each_setting_of_the_library_has_a_sentence() -> None:
    known: set[str] = set()
    for kind in (value for value in vars(config).values() if dataclasses.is_dataclass(value)):
        known |= sentences_of(kind).keys()  # type: ignore[arg-type]
        for field in fields_of(kind):  # type: ignore[arg-type]
            assert field.sentences or field.table or field.name in known, (kind, field.name)


def test_each_field_of_a_message_has_a_sentence() -> None:
    bodies = get_args(messages.AnyBody)
    known = {name for body in bodies for name in sentences_of(body)}
    for body in bodies:
        rooms = sentences_of(messages.RoomBody) if issubclass(body, messages.RoomBody) else {}
        assert set(body.__struct_fields__) <= known | set(rooms), body


@pytest.mark.parametrize("node", [DecodeNode, PrefillNode])
def test_each_key_of_the_stats_has_a_sentence(node: Callable[[Any], Node[Any, Any, Any]]) -> None:
    with node(make_pool()) as made:
        assert made.stats().keys() <= keys_of(Node.stats, node.stats)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("node", "source"), [(DecodeNode, "receiver"), (PrefillNode, "sender")])
def test_each_counter_of_staging_has_a_sentence(node: type, source: str) -> None:
    """They come into the stats when they are first counted."""
    path = Path(prefixkv.__file__).parent / "staging" / f"{source}.py"
    counted = re.findall(r'counters\["(\w+)"\]', path.read_text(encoding="utf-8"))
    assert {f"staging_{name}" for name in counted} <= keys_of(Node.stats, node.stats)  # type: ignore[attr-defined]


def test_each_field_of_the_request_log_has_a_sentence() -> None:
    pages = PageManager(8, 4, 4)
    request = Request("r1", [1, 2, 3], room=7, prefill="tcp://127.0.0.1:1")
    decode = decode_request.timeline(DecodeRequest(request, pages, 0.0), 1, 1)
    prefill = prefill_request.timeline(PrefillRequest(request, pages, 0.0), 1, 1)
    both = PagedRequest.timeline
    assert decode.keys() <= keys_of(both, decode_request.timeline)
    assert prefill.keys() <= keys_of(both, prefill_request.timeline)
