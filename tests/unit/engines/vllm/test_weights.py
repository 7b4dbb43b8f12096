"""vLLM's weight version moves the connector's: KV of other weights is not loaded."""

import importlib
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from prefixkv.engines.vllm.orders import StepOrders
from tests.unit.engines.vllm.conftest import Servers
from tests.unit.engines.vllm.standin import Engine
from tests.unit.engines.vllm.test_transfers import PROMPT, blocks_sent, error_of, offered, opened


def engines(servers: Servers, first: str) -> list[Engine]:
    both = [servers.decode, servers.prefill]
    return both if first == "decode" else both[::-1]


def ask(servers: Servers, rid: str) -> bool:
    """Whether prefill's KV was loaded; if not, vLLM has computed the prompt on decode."""
    load = servers.ask(rid, PROMPT)
    servers.until_ended(rid)
    if load.recomputed:
        assert "weights_version" in error_of(load)
    assert servers.decode.wrong_tokens(load, len(PROMPT)) == 0
    return not load.recomputed


def test_what_former_weights_computed_is_handed_over_before_they_move(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be offered as KV of the new ones."""
    worker, seen = servers.prefill.worker, Mock()
    for name in ("_hand_over", "move_weights"):
        monkeypatch.setattr(worker, name, getattr(seen, name))
    worker.before_forward(StepOrders(weights_version="v2"))
    assert [call[0] for call in seen.mock_calls] == ["_hand_over", "move_weights"]


@pytest.mark.parametrize("first", ["decode", "prefill"])
def test_loads_fail_until_both_servers_have_moved(servers: Servers, first: str) -> None:
    assert ask(servers, "0")
    one, other = engines(servers, first)
    one.scheduler.move_weights("v2")
    servers.settle()
    sent = blocks_sent(servers)
    # The stand-in, as vLLM, keeps its own cache: it is asked for another prompt.
    load = servers.ask("1", [*range(200, 230)])
    servers.until_ended("1")
    assert load.recomputed
    assert "weights_version" in error_of(load)
    assert blocks_sent(servers) == sent, "nothing of the other weights was sent"
    other.scheduler.move_weights("v2")
    servers.settle()
    load = servers.ask("2", [*range(300, 330)])
    servers.until_ended("2")
    assert not load.recomputed


@pytest.mark.parametrize("first", ["decode", "prefill"])
def test_what_is_under_way_at_a_move_is_not_used(servers: Servers, first: str) -> None:
    load = servers.ask("1", PROMPT)
    servers.step()
    engines(servers, first)[0].scheduler.move_weights("v2")
    servers.until_ended("1")
    assert load.recomputed


def test_an_offer_that_was_computed_before_the_move_is_not_opened(servers: Servers) -> None:
    send = offered(servers, "1", PROMPT)
    servers.prefill.scheduler.move_weights("v2")
    load = opened(servers, "1", send)
    assert load.recomputed
    assert blocks_sent(servers) == 0


def test_a_room_that_is_ordered_behind_a_move_is_of_the_new_version(servers: Servers) -> None:
    """Both in one step: the move, and the load."""
    for side in (servers.decode, servers.prefill):
        side.scheduler.move_weights("v2")
        side.scheduler.move_weights("v3")
    assert ask(servers, "1")


def test_the_hook_tells_the_connector_and_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prefixkv.engines.vllm.compat", Mock())  # no vLLM is here
    hooks = importlib.import_module("prefixkv.engines.vllm.hooks")
    monkeypatch.delitem(sys.modules, hooks.__name__)
    said: list[str] = []

    class Core:
        version = "default"

        def __init__(self, is_ours: bool) -> None:
            side = SimpleNamespace(move_weights=said.append)
            connector = SimpleNamespace(is_prefixkv=is_ours, scheduler=side)
            self.scheduler = SimpleNamespace(connector=connector)

        def set_weight_version(self, weight_version: str) -> None:
            self.version = weight_version

    hooks.install(Mock(), Core, Mock())
    for is_ours in (True, False):
        core = Core(is_ours)
        core.set_weight_version("v2")
        assert core.version == "v2"
    assert said == ["v2"]
