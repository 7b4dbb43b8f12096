"""A request on the prefill side."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from prefixkv.errors import InternalError
from prefixkv.paging import Pages
from prefixkv.prefill.send_plan import SendPlan
from prefixkv.protocol.ids import RoomKey
from prefixkv.request import Request

if TYPE_CHECKING:
    from prefixkv.pages.manager import PageBooks, RequestPages


class PrefillState(enum.Enum):
    """Where a request is. The last two are terminal."""

    BOOTSTRAPPING = "bootstrapping"  # decode has not promised pages yet
    BOOTSTRAPPED = "bootstrapped"  # promised; waits for pages of its own
    COMPUTING = "computing"  # with the engine
    SENDING = "sending"  # the last chunk is handed over
    SENT = "sent"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (PrefillState.SENT, PrefillState.FAILED)


class PrefillRequest:
    """One request on a prefill worker. Made by `add`; its fields are for the engine to read.

    `decode_prefix_len` tokens are on the decode worker already; `prefix_len` tokens have their KV
    in `pages` already (this worker's own cache), so the engine computes from there.
    """

    __slots__ = (
        "_books", "arrived_s", "computed_s", "decode_prefix_len", "ended_s", "error", "key",
        "num_chunks", "pages_held", "peer", "plan", "popped", "prefix_len", "promised_s", "request",
        "rid", "sent_pages", "source_free", "started_s", "state", "state_slot",
    )  # fmt: skip

    TRANSITIONS: ClassVar[dict[PrefillState, frozenset[PrefillState]]] = {
        PrefillState.BOOTSTRAPPING: frozenset({PrefillState.BOOTSTRAPPED, PrefillState.FAILED}),
        PrefillState.BOOTSTRAPPED: frozenset({PrefillState.COMPUTING, PrefillState.FAILED}),
        PrefillState.COMPUTING: frozenset({PrefillState.SENDING, PrefillState.FAILED}),
        PrefillState.SENDING: frozenset({PrefillState.SENT, PrefillState.FAILED}),
        PrefillState.SENT: frozenset(),
        PrefillState.FAILED: frozenset(),
    }

    def __init__(self, request: Request, books: PageBooks, now_s: float) -> None:
        self.request = request
        self.rid = request.rid
        self.key = request.key
        self.state = PrefillState.BOOTSTRAPPING
        self.error: Exception | None = None
        self.decode_prefix_len = 0
        self.prefix_len = 0
        self.plan: SendPlan | None = None
        self.pages_held: RequestPages | None = None
        self.source_free = False  # no write reads its pages, and its state, any more
        self.state_slot = -1  # of the engine's, that it handed over
        self.popped = False  # the engine has seen its end
        # Its journal (journal.py): when each of these happened, and what was sent.
        self.arrived_s = now_s
        self.promised_s: float | None = None
        self.started_s: float | None = None
        self.computed_s: float | None = None
        self.ended_s: float | None = None
        self.peer = ""  # the decode worker
        self.num_chunks = self.sent_pages = 0
        self._books = books

    def become(self, state: PrefillState) -> None:
        """Move to another state. Raises InternalError if the table does not allow it."""
        if state not in self.TRANSITIONS[self.state]:
            raise InternalError(
                f"request {self.rid!r} cannot go from {self.state.value} to {state.value}"
            )
        self.state = state

    @property
    def room_key(self) -> RoomKey:
        return RoomKey(self.request.room, self.request.generation)

    @property
    def room(self) -> int:
        return self.request.room

    @property
    def num_tokens(self) -> int:
        return len(self.key)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The prompt, int32, the caller's."""
        return self.key.tokens()

    @property
    def pages(self) -> Pages:
        """Ids of all its pages in order, int32, a read-only view that is valid until the next call
        on the node."""
        if self.pages_held is None:
            return np.empty(0, dtype=np.int32)
        return self._books.pages(self.pages_held)

    @property
    def row(self) -> int:
        """Its row of the page table, -1 while it holds no pages."""
        return -1 if self.pages_held is None else self.pages_held.row

    def __repr__(self) -> str:
        return f"PrefillRequest({self.rid!r}, {self.state.value}, {self.num_tokens} tokens)"
