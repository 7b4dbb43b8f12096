"""Invariant tested: each of these mistakes against the laws is noticed, before and after a change.
Each law has at least one (docs/reference/laws.md).

Run it before a refactoring and after it. A mutant is one edit of one function; a law is broken by
it (numbers as in docs/architecture.md), and one test has to fail. Functions are found by their
qualified name, and tests by theirs. The tests are first run without any mutant. At most ten minutes
on 2 cores:

    python fuzz/twenty_mutants.py [--only 7] [--processes 2]
"""

from __future__ import annotations

import argparse
import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
PATIENCE_S = 120.0  # for a test; one that hangs has noticed the mutant
COPIED = ("prefixkv", "tests", "docs", "fuzz", "benchmarks", "pyproject.toml", "README.md")


class Mutant(NamedTuple):
    """In the source of `function`, `old`, which it has once, becomes `new`; then `test` fails: its
    name, or a file below `tests/`."""

    law: str
    what: str
    function: str
    old: str
    new: str
    test: str


MUTANTS = (
    Mutant(
        "1", "held pages are counted as owned", "PageAllocator.hold",
        "self._set(ascending, len(ascending), _OWNED, _HELD)", "pass",
        "test_what_is_held_comes_back_by_release_only",
    ),
    Mutant(
        "1", "a deadline frees the pages of a room", "PageManager.quarantine",
        "return self.allocator.quarantine(owner)", "return self.allocator.release(owner)",
        "test_what_is_held_comes_back_by_release_only",
    ),
    Mutant(
        "2", "the end of a lock leaves its pages protected", "RadixTree._release",
        "self.protected_pages -= num_pages", "pass",
        "test_a_conversation_is_one_node_until_something_branches_off",
    ),
    Mutant(
        "2", "a request that ends keeps its lock", "PageManager._close", "self._unlock(pages.lock)",
        "pass", "test_whole_pages_become_the_trees_and_the_tail_stays",
    ),
    Mutant(
        "3", "the end of a lock leaves a chain that could be merged", "RadixCache.unlock",
        "self._merge_if_idle(node)", "pass",
        "test_a_conversation_is_one_node_until_something_branches_off",
    ),
    Mutant(
        "3", "an eviction leaves chains that could be merged", "RadixCache.evict",
        "self._merge_if_idle(node)", "pass", "unit/cache/test_radix_machine.py",
    ),
    Mutant(
        "4", "a leaf that is locked is evicted", "LeafHeap.first", " and not node.lock_ref", "",
        "test_no_eviction_takes_a_leaf_that_is_locked",
    ),
    Mutant(
        "4", "a match is locked after its pages were evicted for it", "PageManager.open",
        "lock = self.cache.lock_at(match, place, now_s, visit)",
        ("self.allocator.free(self._take(num_new_pages, now_s)); "
         "lock = self.cache.lock_at(match, self.cache.locate(match), now_s, visit)"),
        "test_a_match_is_locked_before_pages_are_evicted_for_what_it_lacks",
    ),
    Mutant(
        "5", "a chunk that was posted is posted again", "SenderMachine._on_chunk",
        " or start != self._units_written", "",
        "test_a_chunk_that_is_left_out_or_comes_twice_fails_the_room_however_it_is_kept",
    ),
    Mutant(
        "5", "a page of a group that was posted is posted again", "SenderMachine._on_chunk",
        "if first != begin or end > most:", "if end > most:",
        "test_a_chunk_that_is_not_the_next_one_fails_the_room",
    ),
    Mutant(
        "6", "prefill begins before what decode has", "SendPlan.__init__",
        "decode_prefix_len // page_size", "0",
        "test_decode_gets_each_page_it_lacks_once_from_the_pages_the_engine_computed",
    ),
    Mutant(
        "6", "a flight of another prompt is joined", "Starts.at",
        "if key.data.startswith(memoryview(other.data)[: (page + 1) * self._page_bytes]):",
        "if True:",
        "test_the_whole_prefix_has_to_be_equal_not_the_page_where_it_begins_alone",
    ),
    Mutant(
        "7", "decode succeeds with one rank's outcome", "ReceiverMachine._maybe_success",
        "not self._all_reported", "not self._outcomes",
        "test_success_waits_for_every_rank_and_aux_is_the_first_ranks",
    ),
    Mutant(
        "7", "a room on prefill has no deadline", "SenderMachine._tick_open",
        "if now_s < self._wait.due_s:", "if True:",
        "test_each_waiting_state_has_its_deadline",
    ),
    Mutant(
        "8", "success does not wait for notifications", "ReceiverMachine._maybe_success",
        "if landed.num_units == outcome.num_units:", "if True:",
        "test_success_waits_for_the_notifications_of_all_that_was_written",
    ),
    Mutant(
        "8", "KV of old weights is cached", "PageManager.cache_unfinished",
        " and pages.epoch == self.epoch", "",
        "test_after_a_flush_those_that_run_cache_nothing_and_their_pages_come_back",
    ),
    Mutant(
        "8", "a flight is committed before the one it joined", "Flights.arrived",
        "if flight.joined is None:", "if True:",
        "test_rooms_may_succeed_in_any_order_and_none_runs_before_all_its_pages_are_there",
    ),
    Mutant(
        "10", "what prefill's engine has aborted is cached", "PrefillScheduler._cut_short",
        "self._computed.pop(req, None)", "pass",
        "test_only_what_was_cached_before_stays",
    ),
    Mutant(
        "10", "what decode's engine has aborted goes on for others", "Ending.leave",
        "or not flight.source.outlives_request",
        "or (flight.is_open and not flight.source.outlives_request)",
        "test_what_is_computed_here_goes_to_no_tree_and_to_none_that_joined",
    ),
    Mutant(
        "11", "a leaf that was spared keeps the place that its namespace has paid for",
        "HintedQueue._take", "last.stands_for += num_pages", "return None",
        "test_hints_change_nothing_of_whose_turn_it_is",
    ),
    Mutant(
        "11", "what a false hint has sent off comes back for nothing", "HintedQueue.came",
        "self._owed.append((place, here))", "pass",
        "test_a_tenant_that_lies_takes_no_hit_of_another",
    ),
    Mutant(
        "12", "a chunk has landed before its pages are looked at", "PageLooks.on_landed",
        "LookAt(look_id, checked.plans[tag.rank], spans, tag.what)", "PagesLookedAt(look_id)",
        "test_a_bit_that_flips_in_memory_is_found",
    ),
    Mutant(
        "12", "a page has two checksums, and another none", "PageLooks._spans",
        "if summed.any():", "if False:",
        "test_each_page_has_one_checksum_of_each_writer",
    ),
    Mutant(
        "12", "what was scattered is not looked at", "StagingCopies.scatter",
        "if effect.plan.checksum:", "if False:",
        "test_so_is_a_scatter_that_goes_wrong",
    ),
    Mutant(
        "proof", "a room is drained while a write is under way", "SenderMachine.drained",
        " and not self.in_flight", "",
        "test_no_acknowledgement_before_the_last_write_has_ended",
    ),
    Mutant(
        "proof", "a closed room's leases are free at once", "LeaseTable.close",
        "lease.state = LeaseState.HELD", "self._free(lease)",
        "test_a_closed_room_waits_no_more_and_its_leases_are_held_until_drained",
    ),
    Mutant(
        "order", "pages that come back wake no request", "Admission._version",
        "return pages + budget", "return budget",
        "test_whatever_makes_room_lets_the_head_be_looked_at_again",
    ),
    Mutant(
        "trust", "a repeated frame is taken", "PeerClock.take", "frame.seq <= self.in_seq", "False",
        "test_a_frame_that_is_overtaken_or_repeated_is_dropped",
    ),
    Mutant(
        "T1", "host pages are used before they are ready", "HostTier.__init__",
        "self.allocator.alloc(num_pages)", "pass",
        "test_host_pages_are_used_once_they_are_ready",
    ),
    Mutant(
        "T2", "a load lets go of what it reads", "HostTier.load",
        "src = host_lock.pages[-num_pages:]",
        ("src = host_lock.pages[-num_pages:]; self.cache.unlock(host_lock); "
         "host_lock = self.cache.pin(self.cache.match_prefix(key.prefix(0)), now_s)"),
        "test_what_comes_from_host_memory_is_what_was_written",
    ),
    Mutant(
        "T2", "pages of an aborted load are free before its copy ends", "HostSource.give_up",
        "return Release.HOLD", "return Release.DROP",
        "test_an_aborted_load_keeps_its_pages_until_the_copy_has_ended",
    ),
    Mutant(
        "T2", "a write does not wait for the device", "Ending.release_after",
        "if after is not None:", "if after is not None and not self._ledger.organs:",
        "test_a_write_waits_for_the_device",
    ),
    Mutant(
        "T3", "a copy of old weights goes to the tree", "HostTier.ended",
        " and copy.epoch == self.pages.epoch", "",
        "test_a_flush_between_order_and_end_of_a_write",
    ),
    Mutant(
        "T4", "what two need is loaded twice", "Planner.take", "shareable=True", "shareable=False",
        "test_what_two_need_is_loaded_once",
    ),
    Mutant(
        "T5", "a request is committed before its load", "HostSource.begin",
        "self._open[flight.room_key] = flight", "self._ledger.flights.arrived(flight)",
        "test_what_the_pool_forgets_is_loaded_again",
    ),
    Mutant(
        "T3", "one rank's good end is that of all", "RankLeader._end_copy",
        "next(iter(errors), None)", "ends[0].error",
        "test_a_second_rank_that_failed_ends_the_load",
    ),
    Mutant(
        "9", "what was computed here is free before the device is done", "ComputeSource.give_up",
        "return Release.AFTER_DEVICE if", "return Release.DROP if",
        "test_an_abort_frees_its_pages_once_the_device_is_done",
    ),
    Mutant(
        "T6", "the end of a load leaves its path locked in host memory", "HostTier.ended",
        "self._free(self.cache.unlock(copy.host_lock))", "pass",
        "test_what_the_pool_forgets_is_loaded_again",
    ),
    Mutant(
        "T7", "what a write reads may be evicted", "HostTier._begin_write",
        "device_lock = self.pages.pin_key(key, now_s)",
        "device_lock = self.pages.pin_key(key, now_s); self.pages.unpin(device_lock)",
        "test_no_eviction_takes_what_a_copy_reads",
    ),
    Mutant(
        "T8", "pages of a write that failed can be promised", "HostTier._wrote",
        "if is_good:\n            # The", "if True:\n            # The",
        "test_a_write_that_fails_leaves_nothing_in_host_memory",
    ),
    Mutant(
        "H9", "a checkpoint outlives its page", "Checkpoints.dropped",
        "self._remove(self._at[page])", "pass",
        "test_it_goes_with_its_page",
    ),
    Mutant(
        "H10", "window pages that nothing has any more are kept", "TailGroup.add_counts",
        "(gone := ids[self.refs[ids] == 0])", "(gone := ids[:0])",
        "test_no_page_of_another_path_depth_or_request_is_ever_read",
    ),
    Mutant(
        "H11", "a row that moves on loses the pages that it has passed", "TailGroup.slide",
        "moved = np.concatenate([ids[passed:], out[~is_shared]])", "moved = ids[passed:].copy()",
        "test_no_page_of_another_path_depth_or_request_is_ever_read",
    ),
    Mutant(
        "H12", "a second state at a page keeps its slot", "Checkpoints.save",
        "self.give_back(slot)", "pass",
        "test_a_second_one_at_a_page_gives_its_slot_back",
    ),
    Mutant(
        "H13", "a checkpoint that is locked is evicted", "Checkpoints._evict_one",
        "for one in self._at.values() if not one.locks", "for one in self._at.values()",
        "test_a_locked_one_stays",
    ),
    Mutant(
        "H14", "prefill goes on behind pages without a state", "RequestCheckpoints.find",
        "0 if found is None else found.depth * self._page_size", "match.prefix_len",
        "test_pages_without_a_state_are_not_gone_on_from",
    ),
    Mutant(
        "ranks", "a row that was overwritten is not told", "RankLog.take",
        "goes_on = was_in_use & (now[1] == told[1])", "goes_on = was_in_use",
        "test_a_row_that_is_overwritten_is_told",
    ),
    Mutant(
        "ranks", "a row that has ended is not told", "RankLog.take",
        "np.flatnonzero(was_in_use & ~in_use).tolist()", "[]",
        "test_after_any_pass_of_a_storm_the_rows_are_equal",
    ),
    Mutant(
        "ranks", "a message that was left out is not missed", "RowFollower.apply",
        "check_next(message.number, self.num_batches)", "pass",
        "test_messages_are_read_once_each_and_in_order",
    ),
    Mutant(
        "ranks", "commands come in another order", "RowFollower.apply",
        "for one in message.commands]", "for one in reversed(message.commands)]",
        "test_all_commands_of_schedulers_travel_in_order_and_no_other",
    ),
    Mutant(
        "1", "what the engine gave up leaves pages to nobody", "PrefillScheduler._maybe_release",
        "self.pages.drop(req.pages_held)", "pass",
        "test_only_what_was_cached_before_stays",
    ),
    Mutant(
        "2", "a flight without a request keeps its lock", "Ledger.commit",
        "pages.drop(flight.pages)", "pass",
        "test_an_aborted_owner_ends_at_once_and_its_room_goes_on_for_the_others",
    ),
    Mutant(
        "4", "pages are free before what kernels hold has landed", "DecodeControl._take_drained",
        "drained.settle and room.poll.ended", "False",
        "test_a_drained_that_took_the_end_of_an_agent_waits_likewise",
    ),
    Mutant(
        "proof", "a room that is opened twice is said to be drained", "DecodeControl._enter",
        "known is not None:", "known is not None:\n            self.say(RoomDrained(promise.key))",
        "test_a_number_whose_pages_may_still_be_written_is_not_promised_again",
    ),
    Mutant(
        "proof", "a promise that is refused drains what has to settle",
        "PrefillControl._refuse_promise", "drained = not self._rooms.may_need_settle",
        "drained = True",
        "test_a_write_that_proves_nothing_is_not_acknowledged_before_its_agent_is_destroyed",
    ),
    Mutant(
        "trust", "a repeat of a promise that is over opens a room", "PrefillControl._take_promise",
        "self._check_over(self._tombs.over((key, peer.id, ticket)))", "pass",
        "test_a_repeat_of_the_promise_before_is_not_the_next_ones",
    ),
    Mutant(
        "H9", "after a flush a state is entered at a page of before", "RequestCheckpoints.enter",
        " or held.epoch != self._pages.epoch", "",
        "test_what_was_kept_before_a_flush_is_forgotten",
    ),
    Mutant(
        "H12", "decode goes on from another depth's state", "CheckpointedCompute._go_on_from_sent",
        "req.prefix_len, req.checkpoint_slot = at, req.state_slot", "req.prefix_len = at",
        "test_what_was_sent_leaves_a_checkpoint_before_the_end_is_computed",
    ),
    Mutant(
        "H13", "a checkpoint stays locked on a path that is not", "PrefillScheduler._maybe_release",
        "part.dropped(req)", "pass",
        "test_no_window_of_another_path_or_depth_is_ever_gone_on_from",
    ),
)  # fmt: skip


# --- what is where in a tree ----------------------------------------------------------------------


def mutated(tree: pathlib.Path, mutant: Mutant) -> tuple[pathlib.Path, str]:
    """Return the file that a mutant is in, and its text with the mutant.

    Raises LookupError unless exactly one function of this name has `old` once in its source.
    """
    found = []
    for path in sorted((tree / "prefixkv").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if mutant.old not in text:
            continue
        lines = text.splitlines(keepends=True)
        for name, first, end in functions(ast.parse(text)):
            source = "".join(lines[first:end])
            if name == mutant.function and source.count(mutant.old) == 1:
                source = source.replace(mutant.old, mutant.new)
                found.append((path, "".join([*lines[:first], source, *lines[end:]])))
    if len(found) != 1:
        raise LookupError(f"{len(found)} functions {mutant.function} have {mutant.old!r} once")
    return found[0]


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """Yield the qualified name of each function, and the range of its lines, from 0 on."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child.lineno - 1, child.end_lineno or 0
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{prefix}{child.name}.")


def find_test(tree: pathlib.Path, test: str) -> str:
    """Return what pytest is to run: the file, or the one test of this name."""
    if "/" in test:
        return f"tests/{test}"
    has_it = re.compile(rf"^(async )?def {test}\(", re.MULTILINE)
    for path in sorted((tree / "tests").rglob("test_*.py")):
        if has_it.search(path.read_text("utf-8")):
            return f"{path.relative_to(tree)}::{test}"
    raise LookupError(f"there is no test {test}")


# --- running --------------------------------------------------------------------------------------


def pytest(tree: pathlib.Path, tests: list[str], patience_s: float) -> tuple[int | None, str]:
    """Run tests of a tree; return the exit status, None if they hang, and what was printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "slow or not slow", *tests]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        ended = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, text=True, timeout=patience_s,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, "it hangs"
    return ended.returncode, ended.stdout + ended.stderr


def found_by_test(whole: pathlib.Path, mutant: Mutant) -> str:
    """Return "" if the test fails with the mutant in a copy of a tree; else what happened."""
    try:
        test = find_test(whole, mutant.test)
        path, text = mutated(whole, mutant)
    except LookupError as error:
        return f"NOT TRIED: {error}"
    with tempfile.TemporaryDirectory(prefix="prefixkv-mutant-") as folder:
        tree = copy_of(whole, pathlib.Path(folder))
        (tree / path.relative_to(whole)).write_text(text, encoding="utf-8")
        status, said = pytest(tree, [test], PATIENCE_S)
    if status in (1, None):
        return ""
    if status == 0:
        return f"SURVIVES {test}"
    return f"NOT TRIED: pytest ended with {status}\n{said[-1000:]}"


def copy_of(tree: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Copy what tests need of a tree, compiled files too: Python takes one for the present one by
    the time and size of its source, and a mutant has another time."""
    for name in COPIED:
        copy = shutil.copytree if (tree / name).is_dir() else shutil.copy2
        copy(tree / name, folder / name)
    return folder


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument(
        "--only", type=int, action="append", choices=range(1, len(MUTANTS) + 1), metavar="NUMBER",
        help="of a mutant; repeatable",
    )  # fmt: skip
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    numbered = dict(enumerate(MUTANTS, 1))
    chosen = {number: numbered[number] for number in args.only or numbered}
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="prefixkv-mutants-") as folder:
        whole = copy_of(ROOT, pathlib.Path(folder))
        tests = set()
        for mutant in chosen.values():
            with suppress(LookupError):  # said with the mutant
                tests.add(find_test(whole, mutant.test))
        status, said = pytest(whole, sorted(tests), 10 * PATIENCE_S)
        if status != 0:
            print(f"without any mutant the tests fail ({status})\n{said[-3000:]}")
            return 2
        with ThreadPoolExecutor(args.processes) as pool:
            missed = 0
            ends = pool.map(partial(found_by_test, whole), chosen.values())
            for (number, mutant), end in zip(chosen.items(), ends, strict=True):
                missed += bool(end)
                print(f"{number:>2}  {mutant.law:<6}{mutant.what:<56}{end or 'found'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found in {time.monotonic() - began_s:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
