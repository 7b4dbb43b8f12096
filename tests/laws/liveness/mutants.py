"""The order law broken, and words that are not heeded: liveness finds each."""

from prefixkv.control.prefill.control import PrefillControl
from prefixkv.decode.admission import Admission
from prefixkv.decode.flights import Flights
from prefixkv.decode.rooms import Rooms
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.prefill.bootstrap_queue import PrefillBootstrapQueue, SharedPrefixes
from prefixkv.prefill.scheduler import PrefillScheduler
from tests.laws.liveness.world import Prefill
from tests.laws.mutants import Mutant

_HEAD_WAITS = """
    head = next((r for r in self.requests.values() if r.state.value.startswith("boot")), None)
    if head is not None and head.state is PrefillState.BOOTSTRAPPING:
        self.bootstrapped._look_due = False  # a promise that comes is heard of
        popped = []
    else:
        popped = self.bootstrapped.pop_bootstrapped(now_s, limit)
"""
_LOCKED = """
    locks = self.__dict__.setdefault("locks", {})
    if plan is not None and waiter in locks:
        pages.cache.unlock(locks.pop(waiter))
    elif plan is None and waiter not in locks and waiter.look.match is not None:
        locks[waiter] = pages.cache.lock(waiter.look.match)
    if plan is None:
"""
MUTANTS = (
    Mutant(
        "prefill computes at once, and holds the pages until decode asks",
        (PrefillScheduler.add, "return req", "self.bootstrapped.add(req, 0)\n    return req"),
        (Prefill.tell, "inbox.append(command)", "inbox.append(clipped(command))"),
        (Prefill.offer, "req = self.add(request)", "return self.add(request)"),
    ),
    Mutant(
        "prefill starts no prompt before those that came earlier, promised or not",
        (
            PrefillScheduler.pop_bootstrapped,
            "\n    popped = self.bootstrapped.pop_bootstrapped(now_s, limit)\n",
            _HEAD_WAITS,
        ),
    ),
    Mutant(
        "a request of decode's queue locks what is cached of it while it lacks pages for the rest",
        (Admission._plan, "\n    if plan is None:\n", _LOCKED),
    ),
    Mutant(
        "what did not fit on prefill is not looked at again when pages have come back",
        (
            PrefillBootstrapQueue.pop_bootstrapped,
            "self._blocked_at = self._pages.version",
            "del self._due[number]",
        ),
    ),
    Mutant("sent pages stay", (PrefillScheduler.hear, "req.source_free = True", "pass")),
    Mutant("held pages stay", (DecodeScheduler.room_drained, "self.pages.release(key)", "pass")),
    Mutant(
        "a flight that came before the one that it joined is not complete when that one is",
        (Flights.arrived, "flight.is_open = False", "flight.is_open = flight.joined is not None"),
    ),
    Mutant(
        "a prompt that waits for a prefix on prefill is not told that it is there",
        (SharedPrefixes.to_look_at, "return found", "return []"),
    ),
    Mutant(
        "decode's queue does not look again when pages have come back",
        (Admission._version, "pages + budget + self._num_changes + self._workers.version", "0"),
    ),
    Mutant("decode's refusals are lost", (Rooms.refuse, "self.commands.append(command)", "pass")),
    Mutant(
        "prefill's refusals are lost",
        (PrefillScheduler._decline, "self._commands.append(command)", "pass"),
    ),
    Mutant("aborts are lost", (PrefillControl._abort, "error = command.error", "return")),
    Mutant(
        "what prefill offers is kept while a promised prompt lacks its pages",
        (Prefill.owes, "return bool(waits and self.open)", "return False"),
    ),
    Mutant(
        "a decode worker that comes for an offer that was withdrawn hears nothing",
        (
            PrefillControl._close_offer,
            "self._forget_offer(key.numbers, offer, str(error), now_s)",
            "self._rooms.set_offer(key.numbers, None)",
        ),
    ),
)
