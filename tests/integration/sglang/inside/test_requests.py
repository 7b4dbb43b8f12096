"""Requests on SGLang's own pools and functions, over its tree and over ours."""

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from tests.integration.sglang.inside.desk import Desk, Request

OURS, RUST = "prefixkv", "unified-rust"


def request(rid: str, tokens: Any, **named: Any) -> Request:
    return Request(rid, array("q", tokens), **named)


def served(desk: Desk, rid: str, tokens: Any, outputs: Any = (), **named: Any) -> Request:
    """A request from its arrival to its end."""
    req = request(rid, tokens, **named)
    assert desk.admit(req)
    desk.checkpoint(req)
    for token in outputs:
        assert desk.decode(req, token)
    desk.finish(req)
    desk.check()
    return req


@pytest.mark.parametrize("kind", [OURS, RUST])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("eagle", [False, True])
def test_a_conversation_is_found_again_and_the_partial_page_is_not(
    kind: str, page_size: int, eagle: bool
) -> None:
    desk = Desk(kind, page_size, 1024, eagle=eagle)
    first = list(range(100, 170))
    served(desk, "a", first, outputs=range(7))
    again = request("b", [*first, *range(7), 900, 901])
    # The last output has its KV; as a pair it needs the token behind it, which was unknown.
    known = 77 - eagle
    assert desk.match(again) == known // page_size * page_size
    assert desk.match(request("c", [*first[:50], 5])) == (50 - eagle) // page_size * page_size
    desk.check()


@pytest.mark.parametrize("kind", [OURS, RUST])
def test_extra_keys_and_salts_keep_equal_tokens_apart(kind: str) -> None:
    desk = Desk(kind, 4, 512)
    names = [(None, None), ("lora", None), (None, "tenant"), ("lora", "tenant"), (None, "")]
    for number, (extra_key, salt) in enumerate(names[:4]):
        req = request(f"m{number}", range(20), extra_key=extra_key, cache_salt=salt)
        assert desk.match(req) == 0
        served(desk, f"s{number}", range(20), extra_key=extra_key, cache_salt=salt)
    for number, (extra_key, salt) in enumerate(names):
        req = request(f"n{number}", range(20), extra_key=extra_key, cache_salt=salt)
        assert desk.match(req) == 16


def test_a_blocked_head_is_one_visit_however_often_it_is_looked_at() -> None:
    """`lfu` counts visits: a prefix that one request asked for 50 times goes before one that two
    asked for."""
    desk = Desk(OURS, 4, 256, policy="lfu")
    served(desk, "a", range(16))
    served(desk, "b", range(100, 116))
    waiting = request("c", range(17))
    for _ in range(50):
        desk.blocked(waiting)
    for rid in "de":
        other = request(rid, range(100, 117))
        desk.match(other)
        desk.cache.unlock(desk.cache.lock(other.last_node))
    assert desk.evict(16) == 16
    assert desk.match(request("f", range(17))) == 0
    assert desk.match(request("g", range(100, 117))) == 16


@pytest.mark.parametrize("eagle", [False, True])
def test_what_an_envelope_says_of_a_session_is_heeded_at_its_end(eagle: bool) -> None:
    desk = Desk(OURS, 4, 256, eagle=eagle)
    paths = {rid: range(100 * at, 100 * at + 20) for at, rid in enumerate("abcd")}
    ends, odd = (KvHintAction(action_id="1", action_type="prefixkv-hints", action_version="1",
                              payload={"ends": said}) for said in (True, "yes"))  # fmt: skip
    for rid, actions in (("a", []), ("b", [odd]), ("d", [ends]), ("c", [ends])):
        envelope = KvHintsEnvelope(protocol_version="0.1", message_id=rid, actions=actions)
        req = request(rid, paths[rid], kv_hints=envelope)
        assert desk.admit(req)
        desk.checkpoint(req)
        end = desk.abort if rid == "d" else desk.finish
        end(req)
    assert desk.evict(16) == 16
    left = {rid: desk.match(request(rid, [*path, 7])) for rid, path in paths.items()}
    assert left.pop("c") <= 4 < 16 <= min(left.values())


@pytest.mark.parametrize("kind", [OURS, RUST])
def test_a_flush_empties_everything(kind: str) -> None:
    desk = Desk(kind, 4, 256)
    served(desk, "a", range(40))
    desk.flush()
    assert desk.cache.evictable_size() == desk.cache.protected_size() == 0
    assert desk.allocator.available_size() == 256
    served(desk, "b", range(40))
    desk.check()


def test_a_flush_under_locks_makes_them_void() -> None:
    """SGLang forgets requests that hold locks where it gives its memory up. What they give back
    later does nothing, and what they hand over is not taken."""
    desk = Desk(OURS, 4, 256)
    running = request("a", range(40))
    assert desk.admit(running)
    desk.checkpoint(running)
    waiting = request("b", range(30))
    desk.match(waiting)
    waiting.lock = desk.cache.lock(waiting.last_node)
    desk.cache.inc_lock_ref(waiting.last_node)
    desk.running.clear()
    desk.flush()
    desk.check()
    served(desk, "c", range(40))
    desk.cache.unlock(waiting.lock)
    desk.cache.checkpoint(running, up_to=40)
    desk.cache.unlock(running.lock)
    assert desk.cache.protected_size() == 0
    desk.check()


def test_locks_by_node_are_counted_and_found_by_any_handle_of_the_place() -> None:
    desk = Desk(OURS, 4, 256)
    served(desk, "a", range(40))
    req = request("b", range(21))
    desk.match(req)
    first = req.last_node
    assert desk.cache.inc_lock_ref(first).delta == -20
    assert desk.cache.inc_lock_ref(first).delta == 0
    desk.match(req)
    assert desk.cache.dec_lock_ref(req.last_node).delta == 0
    assert desk.cache.protected_size() == 20
    assert desk.cache.dec_lock_ref(first).delta == 20
    with pytest.raises(Exception, match="not held by inc_lock_ref"):
        desk.cache.dec_lock_ref(first)
    desk.check()


def test_requests_are_ordered_by_the_weight_of_what_they_share() -> None:
    desk, stock = Desk(OURS, 1, 4096), Desk(RUST, 1, 4096)
    rng = random.Random(5)
    trunks = [[base, base + 1, base + 2] for base in (10, 20, 30)]
    handles: dict[Desk, list[Any]] = {desk: [], stock: []}
    prompts = [[*rng.choice(trunks), rng.randrange(3), rng.randrange(100)] for _ in range(40)]
    for number, prompt in enumerate(prompts):
        for one in (desk, stock):
            served(one, f"r{number}", prompt)
    for prompt in prompts:
        for one in (desk, stock):
            found = one.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt))))
            handles[one].append(found.last_device_node)
    ours = desk.cache.dfs_weight_order(handles[desk])
    theirs = stock.cache.dfs_weight_order(handles[stock])
    assert sorted(ours) == list(range(40))
    trunk_of = [prompt[0] for prompt in prompts]
    assert [trunk_of[place] for place in ours] == [trunk_of[place] for place in theirs]


def test_what_an_operator_reads(capsys: pytest.CaptureFixture[str]) -> None:
    desk = Desk(OURS, 4, 256)
    served(desk, "a", range(40))
    desk.match(request("b", range(41)))
    desk.cache.pretty_print()
    told = capsys.readouterr().out
    assert "40 tokens" in told
    assert "'matched_tokens': 40" in told


class Thinker(Request):
    """A request of a server with `--strip-thinking-cache`: at its end SGLang says that only the
    prompt is its own, and frees the rest behind the cache's back."""

    reasoning_tokens = 0

    def owned_kv_len(self) -> int:
        own = self.kv.kv_committed_len
        return min(own, len(self.origin_input_ids)) if self.reasoning_tokens else own


@pytest.mark.parametrize("kind", [OURS, RUST])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("thinks", [True, False])
def test_what_a_model_has_thought_is_left_out_where_sglang_is_told_so(
    kind: str, page_size: int, thinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = SimpleNamespace(strip_thinking_cache=True)
    monkeypatch.setattr(common, "get_serving", lambda: told)
    desk = Desk(kind, page_size, 1024)
    prompt = list(range(100, 170))
    for rid in ("a", "again"):  # the second time its prompt is locked already
        req = Thinker(rid, array("q", prompt))
        req.reasoning_tokens = 5 if thinks else 0
        assert desk.admit(req)
        desk.checkpoint(req)
        for token in range(30):
            assert desk.decode(req, token)
        desk.finish(req)
        desk.check()
        kept = 70 if thinks else 100
        found = desk.match(request("next", [*prompt, *range(30), 7]))
        assert found == kept // page_size * page_size


@pytest.mark.parametrize("eagle", [False, True])
def test_policies_count_tokens_whatever_a_key_takes_for_each(eagle: bool) -> None:
    desk = Desk("prefixkv", 16, 4096, eagle=eagle, policy="adaptive")
    assert desk.cache.tree.policy.evicted_every_pages == 512 // 16
    desk.check()


@pytest.mark.parametrize("more", [1 << 31, 1 << 32, -(1 << 32), 1 << 62])
def test_tokens_of_eight_bytes_are_told_apart(more: int) -> None:
    """SGLang's arrays can hold them; the tree's words have four bytes."""
    desk = Desk("prefixkv", 4, 256)
    prompt = [*range(100, 117)]
    served(desk, "a", prompt)
    for place in (0, 7):
        other = [*prompt]
        other[place] += more
        assert matched(desk, other) == place // 4 * 4
    assert matched(desk, prompt) == 16
    desk.check()


def matched(desk: Desk, tokens: list[int]) -> int:
    key = RadixKey(array("q", tokens))
    found: int = desk.cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
    return found


def test_a_request_whose_tokens_stand_in_another_array_is_looked_at_anew() -> None:
    cache = Desk("prefixkv", 4, 256).cache
    req = Request("a", array("q", range(16)))
    key = cache.key_of_waiting(req)
    assert len(key) == 32
    assert cache.key_of_waiting(req) is key
    req.origin_input_ids = array("q", range(16))
    assert cache.key_of_waiting(req) is key
    req.origin_input_ids.append(16)
    assert cache.key_of_waiting(req).data == array("q", range(17)).tobytes()
    req.origin_input_ids = array("q", [*range(16), 99])
    assert cache.key_of_waiting(req).data == req.origin_input_ids.tobytes()
    req.origin_input_ids = array("q", [*range(15), 99])
    assert cache.key_of_waiting(req).data == array("q", [*range(15), 99]).tobytes()


@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("num_output", "kept"), [(0, 0), (1, 64), (40, 64)])
def test_an_aborted_request_leaves_its_prompt_at_most(
    page_size: int, num_output: int, kept: int, eagle: bool
) -> None:
    """And that where a token has come of it; with what the tree had before."""
    desk = Desk(OURS, page_size, 1024, eagle=eagle)
    served(desk, "a", range(32))
    req = request("b", range(64))
    assert desk.admit(req)
    if num_output > 1:
        desk.checkpoint(req)
    if num_output:
        req.output_ids.append(900)
    for token in range(num_output - 1):
        assert desk.decode(req, token)
    desk.abort(req)
    desk.check()
    again = request("c", [*req.tokens, 901])
    assert desk.match(again) == (max(kept, 32) - eagle) // page_size * page_size
    assert desk.cache.protected_size() == 0
    free = desk.allocator.available_size() + desk.cache.evictable_size()
    assert free == desk.allocator.size


@pytest.mark.parametrize(("num_output", "kept"), [(1, 0), (2, 64), (40, 64)])
def test_a_token_that_is_none_leaves_what_was_finite(num_output: int, kept: int) -> None:
    """It is the last one. SGLang ends such a request as if it had met a stop string."""
    desk = Desk(OURS, 4, 1024)
    req = request("a", range(64))
    assert desk.admit(req)
    req.output_ids.append(900)
    for token in range(num_output - 1):
        assert desk.decode(req, token)
    desk.abort(req, SimpleNamespace(matched="NaN happened"))
    desk.check()
    assert desk.match(request("b", [*req.tokens, 901])) == kept


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_was_handed_over_before_an_abort_stays(page_size: int) -> None:
    """A retraction is a commit: the output is the prompt of what goes on."""
    desk = Desk(OURS, page_size, 1024)
    req = request("a", range(32))
    assert desk.admit(req)
    desk.checkpoint(req)
    for token in range(9):
        assert desk.decode(req, token)
    desk.cache.checkpoint(req, up_to=40)
    for token in range(9, 20):
        assert desk.decode(req, token)
    desk.abort(req)
    desk.check()
    assert desk.match(request("b", [*req.tokens, 901])) == 40
