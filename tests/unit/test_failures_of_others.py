"""What has hurt users of other systems and is no other module's to test: see also the storm,
`python -m benchmarks chaos`."""

import re
from pathlib import Path
from typing import Any

import pytest

import prefixkv
from prefixkv.decode.request import DecodeState
from prefixkv.errors import OutOfPagesError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.pages.groups import GroupSpec
from prefixkv.transport.base import RankMemory
from tests.support.transport_pools import make_pool
from tests.unit.decode.desk import Desk
from tests.unit.prefill.test_state_checkpoints import Worker


def test_nothing_from_the_network_is_unpickled() -> None:
    """Outside the command line, whose processes speak over pipes of their own, no module unpickles
    anything."""
    root = Path(prefixkv.__file__).parent
    forbidden = re.compile(
        r"\bimport (pickle|marshal|shelve)\b|recv_pyobj|send_pyobj|deserialize_descs|torch\.load"
    )
    found = {
        str(path.relative_to(root)): match.group()
        for path in root.rglob("*.py")
        if (match := forbidden.search(path.read_text()))
    }
    assert not found


def test_those_that_were_retracted_and_wait_do_not_keep_transfers_from_being_polled() -> None:
    desk = Desk(8)
    oldest, small = (
        desk.start("a", 4, max_new=9, outputs=1),
        desk.start("b", 4, max_new=9, outputs=1),
    )
    victim = desk.start("c", 4, max_new=9, outputs=1)
    for _ in range(4):
        desk.token(victim)
    moving = desk.add("m", 4, max_new=1)
    assert desk.admit() == ["m"]
    for _ in range(3):
        desk.token(oldest, small)
    with pytest.raises(OutOfPagesError):
        desk.token(oldest, small)
    desk.retract(victim)
    desk.token(oldest, small)
    assert desk.admit() == [], "there is no room for it"
    assert victim.state is DecodeState.RETRACTED
    desk.succeed(moving.room_key)
    assert desk.transferred() == ["m"]


def test_no_progress_thread_burns_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefixkv.transport.nixl import agent as nixl_agent

    asked: list[dict[str, Any]] = []
    config = nixl_agent.nixl_api.nixl_agent_config

    def noting(**settings: Any) -> Any:
        asked.append(settings)
        return config(**settings)

    monkeypatch.setattr(nixl_agent.nixl_api, "nixl_agent_config", noting)
    layout: KVLayout = make_pool("layer_major", 4).layout
    assert nixl_agent.NixlAgent("alone", RankMemory(layout)).destroy()
    assert [settings["enable_prog_thread"] for settings in asked] == [False]


# --- layers that keep a window or a state ---------------------------------------------------------

WINDOWS = [GroupSpec("last", 6, 24, 40)]


def test_a_look_up_that_stops_a_token_early_does_not_give_the_window_of_the_whole() -> None:
    """Of a prompt of whole pages that is all cached, the last token is computed again: from an
    earlier checkpoint, and not from the one behind that token."""
    worker = Worker(windows=WINDOWS, has_state=False)
    worker.serve("short", [5] * 8)
    worker.serve("long", [5] * 16)
    worker.serve("again", [5] * 16)
    assert worker.resumed["again"] == 8
    worker.serve("more", [5] * 17)
    assert worker.resumed["more"] == 16
