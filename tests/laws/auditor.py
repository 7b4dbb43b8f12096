"""One auditor for the laws that hold between structures (docs/architecture.md). Called after every
step of the pair test.

Each structure checks itself (`check_invariants`); here they are held against each other.
"""

from typing import Any

from prefixkv.control.decode.control import DecodeControl
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.pages.allocator import PageState
from prefixkv.paging import pages_for
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol.ids import KVPoll
from prefixkv.protocol.receiver_machine import ReceiverMachine
from tests.support.schedulers import host_of


def audit_decode(scheduler: DecodeScheduler, control: DecodeControl) -> None:
    """Laws 1 to 6 on the decode side."""
    scheduler.check_invariants()
    pages = scheduler.pages
    allocator = pages.allocator
    total = (
        allocator.free_pages + allocator.owned_pages + allocator.cached_pages
        + allocator.held_pages + allocator.quarantined_pages
    )  # fmt: skip
    assert total == pages.num_pages, "law 1: every page is in one state"

    writable: dict[int, object] = {}
    of_groups: dict[tuple[str, int], object] = {}
    written = 0
    for machine in control.rooms():
        written += machine.is_written
        if machine.drained:
            continue
        flight = scheduler.prefill.open.get(machine.key)
        mine = set(machine.promise.page_ids().tolist())
        _audit_groups(scheduler, machine, of_groups)
        if flight is not None:
            num_shared = flight.pages.num_shared
            own = set(pages.pages(flight.pages)[num_shared:].tolist())
            assert machine.promise.prefix_len == num_shared * pages.page_size, (
                "law 6: what is promised is there or comes"
            )
            if flight.owner is not None:
                assert flight.owner.prefix_len == machine.promise.prefix_len, (
                    "law 6: the promise stands"
                )
        elif pages.allocator.holds(machine.key):
            own = set(allocator.held_by(machine.key).tolist())
        else:
            # The scheduler may not have read yet that the room succeeded; nothing else excuses a
            # room without pages.
            assert not mine or machine.poll is KVPoll.SUCCESS, (
                f"law 4: pages of {machine.key} are nobody's"
            )
            own = mine
        assert mine <= own, f"law 4: {sorted(mine - own)} may be written, but are not the room's"
        for page in mine:
            assert page not in writable, (
                f"law 5: page {page} is writable by {machine.key} and {writable[page]}"
            )
            assert allocator.state(page) in (
                PageState.OWNED,
                PageState.HELD,
                PageState.QUARANTINED,
            ), "law 4"
            writable[page] = machine.key
    assert written == control._rooms.num_expected, (
        "the control counts the rooms that may be written"
    )
    computed = [one for one in scheduler.flights if one.source.name == "computed" and one.is_open]
    for flight in computed:
        mine = set(pages.pages(flight.pages)[flight.pages.num_shared :].tolist())
        assert not mine & writable.keys(), f"law 9: a peer may write what {flight} computes"
        assert flight.owner is not None, "law 9: nothing computes it"
        states = {allocator.state(page) for page in mine}
        assert states <= {PageState.OWNED}, f"law 9: pages of {flight} are {states}"


def _audit_groups(
    scheduler: DecodeScheduler, machine: ReceiverMachine, writable: dict[tuple[str, int], object]
) -> None:
    """Laws 4 and 5 of the pages of groups that an undrained room may write; H14: they are of the
    end of what is filled, whatever the prefix is."""
    pages, key, promise = scheduler.pages, machine.key, machine.promise
    promised = promise.group_ids()
    assert len(promised) == len(pages.groups), "each group is promised"
    flight = scheduler.prefill.open.get(key)
    for group, ids in zip(pages.groups, promised, strict=True):
        first = group.first_page(promise.fill_len)
        assert len(ids) == pages_for(promise.fill_len, group.page_size) - first, "H14"
        if flight is not None:
            own = group.row(flight.pages.row).ids
            assert ids.tolist() == own[: len(ids)].tolist(), "the promise stands"
            states = {PageState.OWNED}
        elif pages.allocator.holds(key):
            own = group.allocator.held_by(key)
            states = {PageState.HELD, PageState.QUARANTINED}
        else:
            assert machine.poll is KVPoll.SUCCESS, f"law 4: pages of {key} are nobody's"
            own, states = ids, {PageState.OWNED}
        assert set(ids.tolist()) <= set(own.tolist()), f"law 4: pages of {key} in {group.name}"
        for page in ids.tolist():
            where = group.name, page
            assert where not in writable, f"law 5: {where} is writable by {key}, {writable[where]}"
            assert group.allocator.state(page) in states, "law 4"
            writable[where] = key


def audit_prefill(scheduler: PrefillScheduler) -> None:
    """Laws on the prefill side: what is being read stays, and each request's pages cover its
    tokens."""
    scheduler.check_invariants()
    for req in scheduler.requests.values():
        if req.pages_held is not None:
            assert len(req.pages) == pages_for(req.num_tokens, scheduler.pages.page_size)


def assert_at_rest(scheduler: DecodeScheduler | PrefillScheduler) -> None:
    """Laws 2 and 7 at the end: nothing lives, so nothing is locked, owned or held."""
    pages = scheduler.pages
    pages.check_invariants()
    assert not scheduler.requests, f"requests left: {scheduler.requests}"
    if isinstance(scheduler, DecodeScheduler):
        assert not len(scheduler.flights), f"flights left: {list(scheduler.flights)}"
        if (host := host_of(scheduler)) is not None:
            host.check_invariants()
            assert not len(host), "T6: copies are under way"
            assert host.cache.protected_pages == host.allocator.owned_pages == 0, "T6"
    assert pages.cache.protected_pages == 0
    assert pages.cache.num_locks == 0
    assert pages.allocator.owned_pages == 0
    assert pages.allocator.held_pages == 0
    assert pages.allocator.quarantined_pages == 0
    saves: Any = pages.saves
    if saves.num_slots:
        assert not saves.num_locks, "H13: nothing is locked"
        assert not saves.taken, "H12: each slot is a checkpoint's, or free"
    for group in pages.groups:
        states = group.allocator
        assert states.free_pages + states.cached_pages == states.num_pages, f"H11: {group.name}"
        assert not group.pins.any(), "nothing is pinned"
        assert saves.num_slots or not states.cached_pages
    assert pages.table.free_rows + pages.table.free_spare_rows == len(pages.table.array)
    assert pages.cache.num_pages == pages.allocator.cached_pages
