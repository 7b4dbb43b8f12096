"""Hints in an engine's envelope, and beside it."""

from types import SimpleNamespace
from typing import Any

import pytest

from prefixkv import Hints
from prefixkv.engines.envelope import hints_of
from prefixkv.errors import RequestError


def action(kind: str, payload: Any = None, version: str = "1.0") -> SimpleNamespace:
    return SimpleNamespace(action_type=kind, action_version=version, payload=payload)


RETAIN = {"directives": [{"start": 0, "end": 64, "priority": 80, "duration": 60.0},
                         {"covers_output": True, "priority": 50}]}  # fmt: skip


@pytest.mark.parametrize(
    ("actions", "fields"),
    [
        ([], {}),
        ([action("prefixkv-hints", {"returns_after": 30, "later": 1})], {"returns_after": 30}),
        ([action("kv.retain", RETAIN), action("kv.fetch", {"keys": [1]})], {"returns_after": 120}),
        ([action("kv.retain", {"directives": [{"duration": 9e9}]})], {"returns_after": 600}),
        ([action("kv.retain", {"directives": [{"duration": None}]})], {}),
        ([action("kv.retain", RETAIN), action("kv.deref")], {"ends": True}),
        ([action("kv.deref"), action("kv.retain", RETAIN)], {"returns_after": 120}),
        ([action("kv.deref", {}, "2.0")], {}),
        ([action("kv.deref"), action("prefixkv-hints", {"returns_after": 30, "shared": True})],
         {"returns_after": 30, "shared": True}),
        ([action("kv.retain", RETAIN), action("prefixkv-hints", {"ends": True})], {"ends": True}),
        ([action("kv.deref"), action("prefixkv-hints", {"shared": True})],
         {"ends": True, "shared": True}),
    ],
)  # fmt: skip
def test_an_envelope_says_what_its_known_actions_say(
    actions: list[Any], fields: dict[str, Any]
) -> None:
    assert hints_of(actions, "s") == Hints(session="s", **fields)


def test_what_came_beside_the_envelope_counts_more() -> None:
    found = hints_of([action("prefixkv-hints", {"returns_after": 30})], "s", {"session": "mine"})
    assert found == Hints(session="mine", returns_after=30)
    assert hints_of([action("kv.deref")], "s", {"returns_after": 30}).continues == 30


@pytest.mark.parametrize(
    "wrong",
    [
        action("prefixkv-hints", {"ends": 1}), action("kv.retain", {"directives": 3}),
        action("kv.retain", {"directives": [{"duration": "1h"}]}), action("prefixkv-hints", [1]),
    ],
)  # fmt: skip
def test_a_payload_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match="hints"):
        hints_of([wrong])
