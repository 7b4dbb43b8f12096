"""What `send_chunk` costs the engine's thread on prefill, for the benchmark `sched`: an inner chunk
and the last one, beside the least that a chunk is made of. Decode is played by hand."""

from __future__ import annotations

from itertools import count

import numpy as np
import numpy.typing as npt

from benchmarks.samples import Samples
from prefixkv.pages.manager import PageManager
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol.commands import SendChunk
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.request import Request

CHUNK_TOKENS = 512
NUM_PAGES = 1 << 15
MOST_ROWS = 64


def chunks(
    prompt: npt.NDArray[np.int32], decode_tokens: int, page_size: int, rounds: int
) -> dict[str, Samples]:
    """Times of `inner` and `last` chunks, and of the `floor` at the same point.

    Args:
        prompt: of the first request; the others have other tokens.
        decode_tokens: of the prompt, that decode has.
        rounds: requests.
    """
    scheduler = PrefillScheduler(PageManager(NUM_PAGES, page_size, MOST_ROWS), max_aux_bytes=64)
    times = {name: Samples() for name in ("inner", "last", "floor")}
    least = _LeastChunk(page_size)
    for room in range(1, rounds + 1):
        tokens = (prompt + room) % (1 << 30)
        req = scheduler.add(Request(f"r{room}", tokens, room=room, decode="d"), 0.0)
        scheduler.room_bootstrapped(req.room_key, decode_tokens, "", 0.0)
        assert scheduler.pop_bootstrapped(0.0) == [req]
        for end in range(decode_tokens + CHUNK_TOKENS, len(prompt) + 1, CHUNK_TOKENS):
            times["floor"].take(least.make)
            if end < len(prompt):
                sent = times["inner"].take(scheduler.send_chunk, req, end, 0.0)
            else:
                sent = times["last"].take(
                    scheduler.send_chunk, req, end, 0.0, last=True, aux=b"token"
                )
            assert sent == CHUNK_TOKENS // page_size
            scheduler.take_commands()
            scheduler.pop_bootstrapped(0.0)  # what was computed goes to the tree
        scheduler.room_ended(req.room_key, KVPoll.SUCCESS, None, 0.0)
        scheduler.source_free(req.room_key, 0.0)
        assert scheduler.pop_sent(0.0) == [req]
    return times


class _LeastChunk:
    """Page ids copied out of a row, a command made of them and queued: no more."""

    def __init__(self, page_size: int) -> None:
        self._row = np.arange(CHUNK_TOKENS // page_size * 16, dtype=np.int32)
        self._num_pages = CHUNK_TOKENS // page_size
        self._key = RoomKey(1, 0, "d")
        self._at = count()
        self._commands: list[SendChunk] = []

    def make(self) -> None:
        first = next(self._at) % 8 * self._num_pages
        pages = self._row[first : first + self._num_pages].copy()
        self._commands.append(SendChunk(self._key, first, pages, False, b"", None, -1))
