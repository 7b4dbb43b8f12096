"""SGLang's manager, sender, receiver and bootstrap server, built on `prefixkv.transfer`.

A prefill rank registers its server's endpoint with SGLang's bootstrap server, beside its own
address. A decode server announces itself by name at each prefill rank's socket, and its ranks
promise pages at the endpoint. All ranks of a tensor-parallel server are one worker
(`rank_group.py`); the two servers may differ in their number of ranks. SGLang makes the polls of a
server's ranks agree. All calls come from its scheduler thread.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import time
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from secrets import token_bytes
from typing import Any, Final, cast
from weakref import WeakValueDictionary

import numpy as np
import zmq

from prefixkv import DecodeConfig, ModelConfig, PrefillConfig, PrefixKVError
from prefixkv.engines.rank_group import decode_transfers, prefill_transfers
from prefixkv.engines.sglang import NAME, ROOMS
from prefixkv.engines.sglang import internals_transfer as sgl
from prefixkv.engines.sglang.fences import FenceFolder
from prefixkv.engines.sglang.memory import (
    NOTHING,
    OPAQUE,
    UNKNOWN,
    Components,
    Rows,
    current_share,
    pool_of,
    state_refusals,
)
from prefixkv.engines.sglang.rooms import (
    ALONE,
    ANNOUNCED,
    SILENT,
    NumberState,
    Receive,
    Receives,
    RoomSend,
    RoomSends,
)
from prefixkv.engines.sglang.transfer_options import (
    OPTION_NAMES,
    VARIABLE,
    TransferOptions,
    reached_at,
)
from prefixkv.errors import ConfigError
from prefixkv.spi import check_environ
from prefixkv.transfer import KVPoll

_log = logging.getLogger("prefixkv.sglang")

TAG: Final = b"PREFIXKV"
"""First frame of the message by which a decode rank announces itself. Then the room, the name, and
the digest of the prompt (empty where it is unknown). If the request has ended before any promise,
two frames follow: the reason, and the state of the number on decode (`rooms.NumberState`)."""
FIELD: Final = "prefixkv"
"""Field of a row of the bootstrap server that holds the rank's endpoint."""
ASK_AGAIN_S: Final = 10.0
"""Seconds between two questions to the bootstrap server about a rank that does not answer. SGLang
asks on its scheduler's thread, and waits up to five seconds where that machine is gone."""

MAX_ASKED: Final = 10_000
"""Limit of remembered addresses, which clients choose."""

MAX_REASON: Final = 500
"""Limit of characters of a reason that is sent to the other server."""

POLLS: Final = {
    KVPoll.BOOTSTRAPPING: sgl.KVPoll.Bootstrapping,
    KVPoll.WAITING_FOR_INPUT: sgl.KVPoll.WaitingForInput,
    KVPoll.TRANSFERRING: sgl.KVPoll.Transferring,
    KVPoll.SUCCESS: sgl.KVPoll.Success,
    KVPoll.FAILED: sgl.KVPoll.Failed,
}


def prompt_of(req: Any) -> tuple[bytes, int]:
    """Return the digest of a request's prompt, 32 bytes, equal on both servers, and its number of
    tokens. It leaves adapters out, since each server draws its own numbers for them."""
    tokens = req.origin_input_ids
    if getattr(req, "pd_rebootstrap_in_progress", False):  # decode asks for its output's KV too
        tokens = [*tokens, *req.output_ids]
    digest = blake2b(np.asarray(tokens, "<i8").tobytes(), digest_size=32)
    digest.update((req.cache_salt or "").encode())
    return digest.digest(), len(tokens)


def why_ended(req: Any, default: str) -> str:
    """Return SGLang's message for a request that has ended or is about to, else `default`."""
    ended = getattr(req, "finished_reason", None) or getattr(req, "to_finish", None)
    return str(getattr(ended, "message", None) or default)[:MAX_REASON]


def refusals(args: sgl.KVArgs, server_args: Any) -> list[str]:
    """Return why this server cannot have the transfer backend, each with what to leave out."""
    # Each would leave KV or state unsent, or change the memory that is registered for transfers.
    parallel = sgl.get_parallel()
    found = {
        "leave out --pp-size": parallel.pp_size > 1,
        "leave out --attn-cp-size": parallel.attn_cp_size > 1,
        "leave out --dcp-size": parallel.attn_dcp_size > 1,
        "leave out --dp-size and --enable-dp-attention, which were not run":
            parallel.num_dp_ranks > 1,
        "leave out --enable-memory-saver": server_args.enable_memory_saver,
        "leave out --enable-kv-cache-sharding": parallel.enable_kv_cache_sharding,
        "leave out --enable-dsa-cache-layer-split": parallel.enable_dsa_cache_layer_split,
        "SGLANG_RUST_SERVER's registry does not tell where a rank listens":
            sgl.envs.SGLANG_RUST_SERVER.get(),
        "SGLANG_DISAGG_STAGING_BUFFER is SGLang's own backends'":
            sgl.envs.SGLANG_DISAGG_STAGING_BUFFER.get(),
    }  # fmt: skip
    reasons = state_refusals(args, current_share().window)
    return reasons + [reason for reason, refused in found.items() if refused]


class PrefixKVManager(sgl.CommonKVManager):  # type: ignore[misc]
    """The transfers of one rank. Owner: the scheduler thread. Raises ConfigError for an unsupported
    server, with the option to leave out."""

    supports_deferred_decode_kv_release = True
    supports_host_destination = False

    def __init__(
        self,
        args: sgl.KVArgs,
        disaggregation_mode: sgl.DisaggregationMode,
        server_args: Any,
        is_mla_backend: bool = False,
    ) -> None:
        # 1. Refuse, and lay the pool out. Before SGLang's own constructor, so that a refusal leaves
        # nothing open.
        for reason in refusals(args, server_args):
            raise ConfigError(f"--disaggregation-transfer-backend {NAME}: {reason}")
        self.sends: RoomSends | None = None
        self.receives: Receives | None = None
        self.rows = Rows(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens)
        self.page_size = args.page_size
        device = sgl.get_device().device
        device = device if device == "cpu" else f"{device}:{args.gpu_id}"
        # A draft may have other heads, and a window's or a state's bytes are known to no one here.
        is_opaque = args.num_draft_entries or args.state_types
        share = self.share = UNKNOWN if is_opaque else current_share()
        # All that the bytes of a page and of a row depend on; part of the model in each handshake.
        self._tag = (
            f"sglang {args.kv_cache_dtype_str} {args.kv_layout or 'plain'}, "
            f"{args.num_draft_entries} of a draft, rows of {[*args.aux_item_lens]}"
        )
        self.components = Components(args, current_share().window, device)
        pool = pool_of(
            args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens,
            page_size=args.page_size, device=device, tag=self._tag, share=share,
        )  # fmt: skip
        parallel = sgl.get_parallel()
        self._pool = self.components.pool_with(pool)
        self._mesh = share.mesh(len(args.kv_data_ptrs), parallel.attn_tp_size)
        self._state = self.components.state_pool(self._mesh, parallel.attn_tp_rank)
        check_environ(os.environ)
        self._options = TransferOptions.of(os.environ.get(VARIABLE, ""))
        self._fences: FenceFolder | None = None
        # 2. State. The live sender or receiver of each room number; weak, so that one that SGLang
        # drops without `clear` does not keep its number.
        self._owners: WeakValueDictionary[int, Any] = WeakValueDictionary()
        # Id of the last request that was given a room or declined; see `plugin._after_request`.
        self.last_handled_rid = ""
        self._uses = itertools.count(1)  # counts requests, equally on all ranks; see `ticket`
        self._private_rooms = itertools.count(-1, -1)  # numbers outside of `ROOMS`
        # Time of the last question, by SGLang's key of a prefill rank or a bootstrap server's
        # address.
        self._asked_s: dict[str, float] = {}
        # 3. SGLang's own part, which knows ranks and addresses; then ours, which needs them.
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        if disaggregation_mode == sgl.DisaggregationMode.DECODE:
            # Pages of a failed request are held until its room is drained, without exception.
            self.enable_deferred_decode_kv_release = True
            self._open_decode()
            self._start_heartbeat_checker_thread()
        if self._options.fence_folder:
            self._fences = FenceFolder(self._options.fence_folder, self.rank_name)
        atexit.register(self.close)

    # --- both sides -------------------------------------------------------------------------------

    def _gather_name(self) -> str:
        """Rank 0 makes the worker's name: ranks may be on several hosts."""
        server = self._options.name or f"{self.local_ip}:{sgl.get_serving().port}"
        replica = f"dp{self.system_dp_rank or self.attn_dp_rank}"
        name = f"{server}-{self.disaggregation_mode.value}-{replica}"
        return str(sgl.gather(name)[0])

    @property
    def rank_name(self) -> str:
        return f"{self.name}-tp{self.attn_tp_rank}"

    def _common(self) -> dict[str, Any]:
        served = self._options.model or str(self.server_args.served_model_name)
        waits_s = (
            sgl.envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get(),
            sgl.envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get(),
        )
        control = self._options.control
        # SGLang's own timeouts end a wait for a live peer, so ours must not be shorter. A row of
        # metadata travels as `aux`, which must be large enough for it.
        control = replace(
            control,
            max_aux_bytes=max(control.max_aux_bytes, self.rows.row_bytes),
            parked_timeout_s=max(control.parked_timeout_s, *waits_s),
            longest_wait_s=max(control.longest_wait_s, sum(waits_s)),
        )
        name = self._options.model or os.path.basename(served.rstrip("/"))
        model = ModelConfig(f"{name} ({self._tag})", option_names=OPTION_NAMES)
        return {"model": model, "control": control, "transport": self._options.transport}

    def pump(self) -> None:
        if self.receives is not None:
            self.receives.pump()
        if self.sends is not None:
            self._read_announcements(self.sends)
            self.sends.pump()
        side = self.sends if self.receives is None else self.receives
        if self._fences is not None and side is not None:
            self._fences.poll(side.transfers)

    prefixkv_pump = pump

    def claim_room(self, room: int, who: Any) -> tuple[int, str]:
        """Claim a number: the room, or a private one with an error if another live object has the
        room. SGLang keeps the states of rooms by number alone, so two requests of one number would
        clear each other's entries, and the first `clear` would end the server."""
        if room not in ROOMS:
            return next(self._private_rooms), f"room {room} is not between 1 and 2**63 - 1"
        if self._owners.setdefault(room, who) is not who:
            return next(self._private_rooms), f"room {room} is another request's"
        return room, ""

    def room_owner(self, room: int) -> Any:
        return self._owners.get(room)

    def release_room(self, who: Any) -> bool:
        """Return whether the number is still its own. SGLang clears some requests twice, and
        meanwhile the number may be another request's."""
        room: int = who.bootstrap_room
        if room >= 0 and self._owners.get(room) is not who:
            return False
        self._owners.pop(room, None)
        return True

    def close(self) -> None:
        for side in (self.sends, self.receives):
            if side is not None and not side.transfers.closed:
                side.transfers.close()

    # --- prefill ----------------------------------------------------------------------------------

    def register_to_bootstrap(self) -> None:
        """Start prefill's transfers and register their endpoint. All ranks call it together, since
        it gathers among them."""
        self.name = self._gather_name()
        bind = self._options.address(self.local_ip)
        config = PrefillConfig(self.name, bind, **self._common())
        rank = self._mesh, self.attn_tp_rank
        reach = partial(reached_at, local_ip=self.local_ip)
        transfers = prefill_transfers(
            self._pool, config, *rank, sgl.gather, reach=reach, state=self._state
        )
        self.sends = RoomSends(transfers, self.page_size)
        own = reach(transfers.endpoint)
        _log.info("prefixkv's transfers: %s listens at %s", self.rank_name, own)
        # Every rank registers rank 0's endpoint; rank 0 passes on those of the others.
        self.endpoint = str(sgl.gather(own)[0])
        super().register_to_bootstrap()

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        super()._register_topology_row(url, {**payload, FIELD: self.endpoint})

    def _read_announcements(self, sends: RoomSends) -> None:
        """Anything that reaches the socket can write there: a message of another form is logged and
        skipped, and never ends the loop."""
        while True:
            try:
                frames = self.server_socket.recv_multipart(zmq.NOBLOCK)
                # Four frames announce a room, six withdraw it.
                if frames[0] != TAG or len(frames) not in (4, 6):
                    raise ValueError(f"{len(frames)} frames, the first {frames[0][:20]!r}")
                room, name, digest = int(frames[1]), frames[2].decode(), frames[3]
                if len(frames) == 4:
                    sends.announce(room, name, digest)
                else:
                    number_state: NumberState = ANNOUNCED if frames[5] == ANNOUNCED else ALONE
                    number_state = SILENT if frames[5] == SILENT else number_state
                    sends.withdraw(room, name, digest, frames[4].decode(), number_state)
            except zmq.Again:
                return
            except ValueError as error:
                _log.warning(
                    "a message was skipped, it is no decode worker's announcement: %s", error
                )

    # --- either side ends a request by itself -----------------------------------------------------

    def decline(self, req: Any) -> None:
        """Tell the other server, which would wait, of a request refused before it had a room."""
        self.last_handled_rid = req.rid
        # 1. Prefill. The prompt may be missing or cut, so its digest is left open.
        if req.bootstrap_room not in ROOMS:
            return  # the other one refuses it too
        if self.sends is not None:
            self.sends.decline(req.bootstrap_room, b"", why_ended(req, "Refused by prefill."))
            return
        # 2. Decode. A receiver for a moment: its abort is what SGLang's protocol offers for this.
        address = f"{req.bootstrap_host}:{req.bootstrap_port}"
        if not self._knows(address):
            _log.warning("prefill at %s could not be informed that %s ended", address, req.rid)
            return
        receiver = PrefixKVReceiver(self, address, req.bootstrap_room)
        receiver.prefixkv_begin(req, has_prompt=False)
        receiver.init(req.disagg_prefill_dp_rank or 0)
        receiver.abort()
        receiver.clear()

    def _knows(self, address: str) -> bool:
        """Return whether the bootstrap server at this address has described prefill. One that does
        not answer is asked again only every `ASK_AGAIN_S`: the scheduler blocks meanwhile."""
        now_s = time.monotonic()
        if now_s - self._asked_s.get(address, -ASK_AGAIN_S) < ASK_AGAIN_S:
            return address in self.prefill_info_table
        try:
            found = bool(self.try_ensure_parallel_info(address))
        except RuntimeError as error:  # it does not fit; the next request to it says so
            _log.warning("prefill at %s: %s", address, error)
            found = False
        if not found:
            # Clients choose the addresses, so the table is bounded; clearing it costs some
            # questions.
            if len(self._asked_s) >= MAX_ASKED:
                self._asked_s.clear()
            self._asked_s[address] = now_s
        return found

    # --- decode -----------------------------------------------------------------------------------

    def _open_decode(self) -> None:
        # All ranks call this together, since it gathers.
        self.name = self._gather_name()
        config = DecodeConfig(self.name, **self._common())
        rank = self._mesh, self.attn_tp_rank
        transfers = decode_transfers(self._pool, config, *rank, sgl.gather, state=self._state)
        self._secret = cast(bytes, sgl.gather(token_bytes(32))[0])
        self.receives = Receives(transfers)
        _log.info("prefixkv's transfers: %s", self.rank_name)

    def ticket(self) -> int:
        """Return the ticket of the next promise: unguessable, unique, and equal on every rank,
        since all get the same requests in one order and share a secret."""
        drawn = blake2b(f"{next(self._uses)}".encode(), key=self._secret, digest_size=8)
        return int.from_bytes(drawn.digest(), "big") >> 1 or 1

    def forget_lost(self, bootstrap_addr: str) -> None:
        """Forget the cached rows of prefill ranks that do not answer, which SGLang keeps for a
        while: such a rank may be another process by now, at another endpoint."""
        assert self.receives is not None
        now_s = time.monotonic()
        with self.connection_lock:  # SGLang's heartbeat thread changes the pool too
            for key, infos in [*self.connection_pool.items()]:
                if not key.startswith(f"{bootstrap_addr}_"):
                    continue
                answers = all(self.receives.answers(info[FIELD]) for info in infos)
                if not answers and now_s - self._asked_s.get(key, -ASK_AGAIN_S) >= ASK_AGAIN_S:
                    self._asked_s[key] = now_s
                    del self.connection_pool[key]

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """SGLang asks this before it frees the room's pages."""
        assert self.receives is not None
        self.pump()
        return not self.receives.is_held(bootstrap_room)


class PrefixKVSender(sgl.CommonKVSender):  # type: ignore[misc]
    """The room of a prefill request."""

    kv_mgr: PrefixKVManager
    _early_send_wait_event: Any

    def __init__(
        self,
        mgr: PrefixKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        *more: Any,
        **named: Any,
    ) -> None:
        self._send: RoomSend | None = None
        own, self._refusal = mgr.claim_room(bootstrap_room, self)
        super().__init__(mgr, bootstrap_addr, own, *more, **named)
        if self._refusal:
            mgr.record_failure(own, self._refusal)
            self.conclude_state = sgl.KVPoll.Failed
        elif self.kv_mgr.request_status.get(self.bootstrap_room) == sgl.KVPoll.Failed:
            self.conclude_state = sgl.KVPoll.Failed  # another rank has reported it already

    @property
    def sends(self) -> RoomSends:
        assert self.kv_mgr.sends is not None
        return self.kv_mgr.sends

    def prefixkv_begin(self, req: Any) -> None:
        """A hook calls this before any other method."""
        self.kv_mgr.last_handled_rid = req.rid
        # First take in events: the room that had this number before may be over by now.
        self.kv_mgr.pump()
        digest, num_tokens = prompt_of(req)
        if self.conclude_state is None:
            self._send = self.sends.begin(self.bootstrap_room, digest, num_tokens)
        elif self._refusal and req.bootstrap_room in ROOMS:
            self.sends.decline(req.bootstrap_room, digest, self._refusal)

    def pop_decode_prefix_len(self) -> int:
        """Return the tokens that decode has already, which are not sent."""
        return 0 if self._send is None else self._send.prefix_pages * self.kv_mgr.page_size

    def send(
        self,
        kv_indices: Any,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: object | None = None,
    ) -> None:
        """With the last chunk go the metadata row, and windows and state of the request."""
        # SGLang leaves here the event after which the pages hold their KV; it is for one call.
        ready, self._early_send_wait_event = self._early_send_wait_event, None
        if self.conclude_state is not None or self._send is None:
            return
        self.curr_idx += len(kv_indices)
        # SGLang fills the row before it sends the last chunk: it is read here and not earlier.
        last = self.curr_idx == self.num_kv_indices
        aux = self.kv_mgr.rows.read(self.aux_index) if last else b""
        windows, slot = NOTHING
        try:
            if last:
                pages = [*self._send.pages, *kv_indices]
                windows, slot = self.kv_mgr.components.of_request(state_indices, pages)
        except PrefixKVError as error:
            self.sends.abort(self._send, str(error))
            return
        self.sends.send(
            self._send, kv_indices, last=last, aux=aux, ready=ready, windows=windows,
            state_slot=slot,
        )  # fmt: skip
        self._record_transfer_indices(kv_indices, state_indices if last else None)

    def poll(self) -> int:
        """A final state is kept, and never changes."""
        self.kv_mgr.pump()
        send = self._send
        if self.conclude_state is not None:
            return int(self.conclude_state)
        if send is None:
            return int(sgl.KVPoll.Bootstrapping)
        # SGLang's own timeout, for a request that decode never announces. It has recorded the
        # reason.
        status: int = POLLS[send.poll]
        if status == sgl.KVPoll.Bootstrapping and self._check_bootstrap_timeout() is not None:
            self.sends.abort(send, self.kv_mgr.failure_records[self.bootstrap_room])
            status = POLLS[send.poll]
        if status == sgl.KVPoll.Failed:
            self.kv_mgr.record_failure(self.bootstrap_room, send.error)
        if status in (sgl.KVPoll.Failed, sgl.KVPoll.Success):
            self.conclude_state = status
        return status

    poll_pp_consensus = poll

    def abort(self) -> None:
        """It polls Failed once no write reads the request's pages."""
        if self._send is not None:
            self.sends.abort(self._send, "Aborted by AbortReq.")

    def clear(self) -> None:
        if self.kv_mgr.release_room(self):
            super().clear()


class PrefixKVReceiver(sgl.CommonKVReceiver):  # type: ignore[misc]
    """The room of a decode request."""

    kv_mgr: PrefixKVManager

    def __init__(
        self,
        mgr: PrefixKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        *more: Any,
        **named: Any,
    ) -> None:
        # The prefill ranks' rows; None before they are known, or where nothing may be sent to them.
        self.bootstrap_infos: list[dict[str, Any]] | None = None
        self._receive: Receive | None = None  # set once pages were promised
        self._aux_index = -1
        self._reason = "Aborted by decode."  # why it failed here, for prefill
        self._req: Any = None
        self._has_prompt = False
        self._ticket = 0
        own, self._refusal = mgr.claim_room(bootstrap_room, self)
        super().__init__(mgr, bootstrap_addr, own, *more, **named)
        if self._refusal:
            self._fail(self._refusal)

    @property
    def receives(self) -> Receives:
        assert self.kv_mgr.receives is not None
        return self.kv_mgr.receives

    def prefixkv_begin(self, req: Any, has_prompt: bool = True) -> None:
        """A hook calls this before any other method. `has_prompt`: False where SGLang may have put
        a stub in the place of the prompt."""
        self._req, self._has_prompt = req, has_prompt
        self.kv_mgr.last_handled_rid = req.rid
        # First take in events: the room that had this number before may be over by now.
        self.kv_mgr.pump()
        self._ticket = self.kv_mgr.ticket() if has_prompt else 0
        if self._refusal and has_prompt:
            self._withdraw_second(req)

    def _withdraw_second(self, req: Any) -> None:
        """Withdraw a request whose number another one on this server has: its other half may be
        alone with the number on prefill, where it would wait."""
        # Only if both name the same prefill server: there the number could be mistaken. The rows
        # of the first receiver are borrowed, since this one never connects.
        first = self.kv_mgr.room_owner(req.bootstrap_room)
        if first is None or first.bootstrap_addr != self.bootstrap_addr:
            return
        self.bootstrap_infos = first.bootstrap_infos
        if self.bootstrap_infos:
            self.prefill_info = first.prefill_info
            try:
                self._announce(self._refusal, SILENT if first._receive is None else ANNOUNCED)
            except zmq.ZMQError as error:
                _log.warning("prefill at %s could not be informed: %s", self.bootstrap_addr, error)
        self.bootstrap_infos = None  # given back, so that `clear` withdraws nothing more

    def _fail(self, reason: str) -> None:
        self._reason = reason
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, sgl.KVPoll.Failed)
        self.conclude_state = sgl.KVPoll.Failed

    def _setup_bootstrap_infos(self) -> None:
        # Before SGLang looks into its cache, where an endpoint of a dead process may stand.
        self.kv_mgr.forget_lost(self.bootstrap_addr)
        super()._setup_bootstrap_infos()

    def _register_kv_args(self) -> bool:
        """Return whether this receiver fits the prefill server that was found; if not, the room has
        failed, and nothing was announced."""
        info, size = self.prefill_info, self.kv_mgr.attn_tp_size
        infos = self.bootstrap_infos or []
        # With known heads each rank of the smaller server pairs with whole ranks of the larger one.
        # Opaque pages cannot be cut, so the ranks must be equal in number.
        pairs = max(info.attn_tp_size, size) % min(info.attn_tp_size, size) == 0
        if self.kv_mgr.share.kind != OPAQUE:
            needs = f"a TP that divides decode's, {size}, or is divided by it"
        else:
            pairs = info.attn_tp_size == size
            needs = f"the TP of decode, {size}, for KV whose layout it does not know"
        if (info.attn_cp_size, info.pp_size) != (1, 1) or not pairs:
            self._fail(
                f"prefill has attention TP {info.attn_tp_size}, CP {info.attn_cp_size} and PP "
                f"{info.pp_size}: the transfer backend {NAME} needs {needs}, and 1"
            )
        elif not infos or not all(row.get(FIELD) for row in infos):
            self._fail(f"prefill at {self.bootstrap_addr} has not the transfer backend {NAME}")
        if self.conclude_state is not None:
            self.bootstrap_infos = None  # that server would not understand an announcement
        return self.conclude_state is None

    def _announce(self, refusal: str = "", number_state: NumberState = ALONE) -> str:
        """Announce the room to prefill's ranks, or withdraw it with a `refusal`. Returns the
        endpoint of prefill's transfers.

        Each prefill rank gets the message from one decode rank. Raises zmq.ZMQError where prefill
        does not read, and too much waits there: the scheduler must not block on it.
        """
        assert self.bootstrap_infos, "`_register_kv_args` has seen it"
        manager = self.kv_mgr
        # Where several decode ranks share a prefill rank, only the first of them sends.
        shared_by = max(1, manager.attn_tp_size // self.prefill_info.attn_tp_size)
        digest = prompt_of(self._req)[0] if self._has_prompt else b""
        message = [TAG, str(self._req.bootstrap_room).encode(), manager.name.encode(), digest]
        message += [refusal.encode(), number_state] if refusal else []
        if manager.attn_tp_rank % shared_by == 0:
            for info in self.bootstrap_infos:
                socket, lock = self._connect_to_bootstrap_server(info)
                with lock:
                    socket.send_multipart(message, zmq.NOBLOCK)
        return str(self.bootstrap_infos[0][FIELD])

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = sgl.KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        if self.conclude_state is not None:
            return
        digest, num_tokens = prompt_of(self._req)
        self._aux_index = -1 if aux_index is None else aux_index
        try:
            windows, slot = self.kv_mgr.components.of_request(state_indices, kv_indices)
        except PrefixKVError as error:  # nothing is announced: `clear` withdraws the request
            self._fail(str(error))
            return
        # Announced first: prefill adds the room for the worker that announced itself. If this
        # fails, no pages were promised, and nothing has to be held.
        try:
            prefill = self._announce()
        except zmq.ZMQError as error:
            self._fail(f"prefill at {self.bootstrap_addr} takes no announcement: {error}")
            return
        pages = np.asarray(kv_indices, np.int32)
        prefix_len = decode_prefix_len or 0
        self._receive = self.receives.open(
            self.bootstrap_room, prefill, num_tokens, prefix_len, pages, digest, self._ticket,
            windows, slot,
        )  # fmt: skip
        self.init_time = time.time()  # SGLang's own timeout begins

    def poll(self) -> int:
        """The receiver has its own timeouts."""
        if self.conclude_state is None:
            self.kv_mgr.pump()
            self._conclude()
        status: int = super().poll()
        return status

    def _conclude(self) -> None:
        receive = self._receive
        if receive is None or receive.outcome is None:
            return
        # The row is written before SGLang sees Success, since it reads the row next. A peer's row
        # of a wrong size fails this request alone.
        if receive.outcome is KVPoll.SUCCESS:
            try:
                self.kv_mgr.rows.write(self._aux_index, receive.aux)
            except PrefixKVError as error:
                self._fail(str(error))
                return
            self.kv_mgr.update_status(self.bootstrap_room, sgl.KVPoll.Success)
        else:
            self._fail(receive.error)
            # Prefill may be another process by now, at another endpoint: the next request asks.
            self.invalidate_cached_bootstrap_infos()

    def clear(self) -> None:
        # Over without a promise, for instance by SGLang's timeout: prefill still waits for one.
        if self._receive is None and self.bootstrap_infos and self.conclude_state is not None:
            self.ensure_abort_notified()
        if self.kv_mgr.release_room(self):
            super().clear()

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        """End the room, or withdraw it where nothing was promised. SGLang calls this once."""
        reason = why_ended(self._req, self._reason)
        if self._receive is not None:
            self.receives.abort(self._receive, reason)
        elif self.bootstrap_infos:
            try:
                self._announce(reason)
            except zmq.ZMQError as error:
                _log.warning("prefill at %s could not be informed: %s", self.bootstrap_addr, error)


class PrefixKVBootstrapServer(sgl.CommonKVBootstrapServer):  # type: ignore[misc]
    """SGLang's registry of prefill ranks, with an endpoint in each row."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self._endpoints: dict[tuple[int, ...], str] = {}
        super().__init__(*args, **named)

    async def _handle_route_put(self, request: sgl.web.Request) -> sgl.web.Response:
        """Keep the endpoint of a rank, only if SGLang accepted the row."""
        answer: sgl.web.Response = await super()._handle_route_put(request)
        row = await request.json()
        if answer.status == 200 and FIELD in row:
            dp_rank = "attn_dp_rank" if row["system_dp_size"] == 1 else "system_dp_rank"
            keys = dp_rank, "attn_cp_rank", "attn_tp_rank", "pp_rank"
            self._endpoints[tuple(int(row[key]) for key in keys)] = str(row[FIELD])
        return answer

    async def _handle_route_get(self, request: sgl.web.Request) -> sgl.web.Response:
        answer: sgl.web.Response = await super()._handle_route_get(request)
        if answer.status != 200:
            return answer
        keys = "prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"
        endpoint = self._endpoints.get(tuple(int(request.query[key]) for key in keys))
        if endpoint is None:
            return answer
        return sgl.web.json_response({**json.loads(answer.text or "{}"), FIELD: endpoint})


CLASSES: Final = {
    sgl.KVClassType.KVARGS: sgl.KVArgs,
    sgl.KVClassType.MANAGER: PrefixKVManager,
    sgl.KVClassType.SENDER: PrefixKVSender,
    sgl.KVClassType.RECEIVER: PrefixKVReceiver,
    sgl.KVClassType.BOOTSTRAP_SERVER: PrefixKVBootstrapServer,
}
