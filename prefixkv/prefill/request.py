"""A request on the prefill side."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from prefixkv.pages.manager import PageManager
from prefixkv.pages.requests import PagedRequest
from prefixkv.prefill.send_plan import SendPlan, WindowPlan
from prefixkv.protocol.ids import RoomKey
from prefixkv.request import Request


class PrefillState(enum.Enum):
    """The state of a request. The last two are terminal."""

    BOOTSTRAPPING = "bootstrapping"  # decode has not promised pages yet
    BOOTSTRAPPED = "bootstrapped"  # promised; waits for pages of its own
    COMPUTING = "computing"  # with the engine
    SENDING = "sending"  # the last chunk is handed over
    SENT = "sent"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (PrefillState.SENT, PrefillState.FAILED)


class PrefillRequest(PagedRequest[PrefillState]):
    """One request on a prefill worker. Made by `add`; its fields are for the engine to read.

    `decode_prefix_len` tokens are on the decode worker. `prefix_len` tokens have their KV in
    `pages` already, so the engine computes from there. With checkpoints it copies the state in
    `checkpoint_slot` (-1 where `prefix_len` is 0) before the first chunk, ends chunks at `stops`
    (tokens, ascending; more may come), and asks `save_state` there where the state goes. In window
    groups it has pages for the window behind `prefix_len` and for the next chunk (`window_pages`),
    of at most `step_tokens`. Without extra state it only ends chunks at `stops`.
    """

    __slots__ = (
        "computed_s", "decode_prefix_len", "dense_pages", "given_up", "key", "num_chunks",
        "num_tokens", "peer", "plan", "popped", "promised_s", "sent_pages", "source_free",
        "started_s", "state_slot", "window_plans",
    )  # fmt: skip

    TRANSITIONS = {
        PrefillState.BOOTSTRAPPING: {PrefillState.BOOTSTRAPPED, PrefillState.FAILED},
        PrefillState.BOOTSTRAPPED: {PrefillState.COMPUTING, PrefillState.FAILED},
        PrefillState.COMPUTING: {PrefillState.SENDING, PrefillState.FAILED},
        PrefillState.SENDING: {PrefillState.SENT, PrefillState.FAILED},
        PrefillState.SENT: set(),
        PrefillState.FAILED: set(),
    }
    TIMES = ("promised_s", "started_s", "computed_s", "ended_s")

    def __init__(self, request: Request, pages: PageManager, now_s: float) -> None:
        super().__init__(request, pages, PrefillState.BOOTSTRAPPING, now_s)
        self.key = request.key
        self.num_tokens = len(request.key)
        self.decode_prefix_len = 0
        self.plan: SendPlan | None = None
        self.window_plans: tuple[WindowPlan, ...] = ()  # by window group
        # Its pages are released when all three are true: it has ended, `source_free`, `popped`.
        self.source_free = False  # no write reads its pages, and its state, any more
        self.state_slot = -1  # slot of extra state that the engine handed over
        self.popped = False  # the engine has seen its end
        # The error with which the engine has failed or aborted it: nothing more of it is cached.
        self.given_up: Exception | None = None
        self.dense_pages = 0  # of its path, that were cached when it was looked at
        # Its journal (journal.py): when each of these happened, and what was sent.
        self.promised_s: float | None = None
        self.started_s: float | None = None
        self.computed_s: float | None = None
        self.peer = ""  # the decode worker
        self.num_chunks = self.sent_pages = 0

    @property
    def room_key(self) -> RoomKey:
        """With the decode worker's name."""
        return RoomKey(self.request.room, self.generation, self.request.decode)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The prompt, int32, the caller's."""
        return self.key.tokens()

    def __repr__(self) -> str:
        return f"PrefillRequest({self.rid!r}, {self.state.value}, {self.num_tokens} tokens)"
