"""The workers as a front sees them: which exist, where a request goes, and what comes back.

What has started the workers (`launch`, a cluster's scheduler) adds and removes them, not a
time-out. For each kind of worker a `BoundedAffinityRouter`, which follows the cache events of each,
chooses one. The stream of these events is also the worker's sign of life: while it is silent,
requests go elsewhere; where there is no other, they wait for it until it is given up. Where a role
has no worker, requests wait as long as one is being started. Used on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from typing import Any, Final

import aiohttp
import msgspec
from msgspec.structs import replace

from prefixkv.errors import ConfigError, HandshakeError, ProtocolError
from prefixkv.serving.api import ApiError, answer_ended, failed, is_inner, is_not_finite
from prefixkv.serving.client import make_client, pieces_of, wait_set
from prefixkv.serving.log import current_record
from prefixkv.serving.router import BoundedAffinityRouter, Route
from prefixkv.serving.tracing import current
from prefixkv.serving.wire import (
    SILENCE_S,
    Announcement,
    Ask,
    FenceRequest,
    LostPeer,
    TokenEvent,
    WorkerInfo,
    batches_of,
    namespace_of,
    part_rid,
)
from prefixkv.spi import RadixKey, check_page_sizes, page_keys

logger = logging.getLogger("prefixkv.fleet")

_ATTEMPTS: Final = 3  # at a request without any output yet
_AGAIN_S: Final = 1.0  # pause before another try to reach a worker
_TICK_S: Final = 0.5
_QUIET_TICKS: Final = 10  # until a worker counts as silent: it has missed two signs of life
_GIVEN_UP_TICKS: Final = round(SILENCE_S / _TICK_S)  # until no request waits for it any more

_output_decoder = msgspec.json.Decoder(TokenEvent)


class WorkerLostError(Exception):
    """A worker did not answer to the end. `detail` is for the log."""

    def __init__(self, why: str, detail: str = "") -> None:
        super().__init__(why)
        self.detail = detail


class Start:
    """Whether a worker is being started. `gone_s`: since when it does not serve, by
    time.monotonic(); None while it does, or where nothing starts it any more. `role` is "" where it
    is not known yet."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.gone_s: float | None = time.monotonic()


class _Member:
    """A worker, and whether it is silent. Silence is counted in ticks of the event loop: if this
    process or the whole machine stands still, that is no silence of the worker."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.tasks: tuple[asyncio.Task[None], ...] = ()
        self.silent = False
        # Lives that are over and that it has to hear of.
        self.fences: asyncio.Queue[FenceRequest] = asyncio.Queue()
        self._quiet_ticks = 0

    async def mark_alive(self, pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        async for piece in pieces:
            self._quiet_ticks = 0
            if self.silent:
                self.silent = False
                logger.warning("%s answers again", self.info.name)
            yield piece

    @property
    def given_up(self) -> bool:
        """True if no request waits for the worker any more."""
        return self._quiet_ticks >= _GIVEN_UP_TICKS

    async def watch(self) -> None:
        """Mark the worker silent after `_QUIET_TICKS` without a sign of life."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._quiet_ticks += 1
            if self._quiet_ticks >= _QUIET_TICKS and not self.silent:
                self.silent = True
                logger.warning("%s is silent: requests go elsewhere, or wait", self.info.name)


class Fleet:
    """The workers and the routers over them. `api_key` is what workers require. Requests wait for
    a worker that is started for `start_timeout_s` at most."""

    def __init__(self, api_key: str = "", start_timeout_s: float = 600.0) -> None:
        self.members: dict[str, _Member] = {}  # by name
        # By name, all workers that there have ever been, each as it was last.
        self.known: dict[str, WorkerInfo] = {}
        # In the order in which an attempt's workers are chosen.
        self.routers = {role: BoundedAffinityRouter() for role in ("decode", "prefill")}
        self.starts: Sequence[Start] = ()  # of all workers that something starts
        self._start_timeout_s = start_timeout_s
        self._closed = False
        self._joined = asyncio.Event()  # replaced whenever it is set: by each worker that comes
        # All lives fenced so far, never shortened: a worker that joins later must hear of each.
        self.fenced: list[FenceRequest] = []
        self.retried = 0
        # `SILENCE_S` bounds the time between two pieces, which signs of life keep short.
        self._client = make_client(api_key, SILENCE_S)

    # --- which there are --------------------------------------------------------------------------

    def add(self, info: WorkerInfo) -> None:
        """Add a worker, or replace one of the same name. Raises ConfigError, with nothing changed,
        if it cannot work with the others. After `close`: no-op."""
        if self._closed:
            return
        if FenceRequest(info.name, info.life) in self.fenced:  # the others refuse it
            raise ConfigError(f"{info.name} life {info.life} was fenced: restart it")
        # Models must agree over the whole fleet; page sizes within a role, since its router keys
        # prompts by pages. Checked before anything changes.
        for other in self.workers:
            if other.name == info.name and other.role == info.role:
                continue
            if other.name == info.name:
                raise ConfigError(f"a {info.role} and a {other.role} worker are named {info.name}")
            if other.identity != info.identity:
                raise ConfigError(
                    f"{info.name} has {info.identity!r}, {other.name} {other.identity!r}"
                )
            if other.role == info.role and other.page_size != info.page_size:
                raise ConfigError(
                    f"{info.name} has pages of {info.page_size} tokens, {other.name} of "
                    f"{other.page_size}"
                )
            try:
                check_page_sizes(info.page_size, other.page_size)
            except HandshakeError as error:
                raise ConfigError(f"{info.name} and {other.name}: {error}") from None
        self.remove(info.name)
        if info.name in self.known:
            logger.warning("%s is back", info.name)
        self._joined.set()
        self._joined = asyncio.Event()
        self.known[info.name] = info
        self.routers[info.role].add_worker(info.name)
        member = self.members[info.name] = _Member(info)
        for life in self.fenced:
            member.fences.put_nowait(life)
        member.tasks = (
            asyncio.create_task(self._apply_events(member)),
            asyncio.create_task(member.watch()),
            asyncio.create_task(self._report_fences(member)),
        )

    def remove(self, name: str, life: str = "") -> bool:
        """Send a worker no more requests; those in progress end by themselves. With `life`, only if
        it is in that life. Returns False if it is not here."""
        member = self.members.get(name)
        if member is None or (life and member.info.life != life):
            return False
        del self.members[name]
        for task in member.tasks:
            task.cancel()
        self.routers[member.info.role].remove_worker(name)
        return True

    @property
    def workers(self) -> list[WorkerInfo]:
        return [member.info for member in self.members.values()]

    async def _apply_events(self, member: _Member) -> None:
        """Apply a worker's cache events to its router, for as long as it is here."""
        info = member.info
        router = self.routers[info.role]
        while True:
            with contextlib.suppress(aiohttp.ClientError, ProtocolError):
                async with self._client.get(f"{info.url}/events", raise_for_status=True) as answer:
                    pieces = member.mark_alive(pieces_of(self._client, answer))
                    async for batch in batches_of(pieces, info.name):
                        if not router.apply(batch):
                            break  # an event is missing: reconnect, for a new snapshot
            await asyncio.sleep(_AGAIN_S)

    # --- lives that are over ----------------------------------------------------------------------

    @property
    def lives(self) -> set[FenceRequest]:
        """Return those that serve: not those that are silent, whose machines may be lost."""
        return {FenceRequest(w.name, w.life) for w in self.workers if w.name not in self.silent}

    def fence(self, life: FenceRequest) -> None:
        """State that a life of a worker is certainly dead, to every worker, present and future,
        until it confirms. What was held for that life is then reused: were it alive after all, its
        writes would land in pages of other requests."""
        self.fenced.append(life)
        self.remove(life.name, life.life)
        for member in self.members.values():
            member.fences.put_nowait(life)

    async def _report_fences(self, member: _Member) -> None:
        while True:
            body = msgspec.json.encode(await member.fences.get())
            while not await self._tell(f"{member.info.url}/fence", body):
                await asyncio.sleep(_AGAIN_S)

    async def _tell(self, url: str, body: bytes) -> bool:
        """Return whether it was taken."""
        with contextlib.suppress(aiohttp.ClientError):
            async with self._client.post(url, data=body, raise_for_status=True):
                return True
        return False

    async def lost(self) -> dict[str, list[LostPeer]]:
        """Return, by worker that answers, the lost peers that it holds pages or rooms for."""
        infos = self.workers
        found = await asyncio.gather(
            *(self._get(f"{info.url}/lost", list[LostPeer]) for info in infos),
            return_exceptions=True,
        )
        return {
            info.name: lost for info, lost in zip(infos, found, strict=True)
            if not isinstance(lost, BaseException)
        }  # fmt: skip

    async def info_of(self, url: str) -> WorkerInfo:
        """Return what the worker at `url` says of itself, as it is reached from here. Raises
        aiohttp.ClientError, MsgspecError."""
        info: WorkerInfo = await self._get(f"{url}/info", WorkerInfo)
        return replace(info, url=url)

    async def _get(self, url: str, kind: Any) -> Any:
        async with self._client.get(url, raise_for_status=True) as answer:
            return msgspec.json.decode(await answer.read(), type=kind)

    @property
    def ready(self) -> bool:
        """True if a worker of each kind is not silent, or a decode worker that answers alone."""
        return not self._missing(self._answering)

    async def wait_for_workers(self) -> None:
        """Wait for workers that are being started. Raises ApiError 503 if a role has none, and none
        is being started, or that is late."""
        while missing := self._missing(self._usable):
            if not all(map(self._is_starting, missing)):
                raise self._not_ready(missing)
            await wait_set(self._joined, _TICK_S)

    def _is_starting(self, role: str) -> bool:
        """True if a worker of a role is started, and not late."""
        since_s = time.monotonic() - self._start_timeout_s
        return any(
            one.role in (role, "") and one.gone_s is not None and one.gone_s >= since_s
            for one in self.starts
        )

    def _not_ready(self, roles: Sequence[str]) -> ApiError:
        said = [f"no {' and no '.join(roles)} worker is ready"]
        said += [f"{info.name} is silent" for info in self.workers if info.role in roles]
        said += [f"a {role} worker is starting" for role in roles if self._is_starting(role)]
        return ApiError(503, ", ".join(said), "server_error", "not_ready")

    def _missing(self, found: Callable[[str], list[_Member]]) -> list[str]:
        roles = [role for role in self.routers if not found(role)]
        return [] if any(member.info.alone for member in found("decode")) else roles

    @property
    def silent(self) -> list[str]:
        return [name for name, member in self.members.items() if member.silent]

    def _usable(self, role: str) -> list[_Member]:
        """Return the workers that are not silent; where all are, those that are not given up."""
        here = [member for member in self.members.values() if member.info.role == role]
        return [one for one in here if not one.silent] or [one for one in here if not one.given_up]

    def _answering(self, role: str) -> list[_Member]:
        return [member for member in self._usable(role) if not member.silent]

    @property
    def context(self) -> int:
        """Most tokens of a request that every worker accepts; 0 without a worker."""
        return min((info.context for info in self.workers), default=0)

    @property
    def vocab_size(self) -> int:
        """Bound of token ids on every worker; 0 without a worker."""
        return min((info.vocab_size for info in self.workers), default=0)

    # --- requests ---------------------------------------------------------------------------------

    async def generate(self, ask: Ask) -> AsyncGenerator[TokenEvent, None]:
        """Yield the outputs of a request to the ends of all its samples. Chooses `prefill` and
        `prefill_url` of the `Ask`. Closing the generator aborts the request.

        An attempt that fails before its first output is repeated on other workers. The line of the
        request log names those of the last one.

        Raises: ApiError 400 if a worker refuses the request; 500 if what was computed is not
        finite; 503 if none accepts it, or its worker is lost or has ended it.
        """
        lost, line = set[str](), current_record()
        output: TokenEvent | None
        for attempt in range(_ATTEMPTS):
            try:
                async with asyncio.timeout(ask.deadline_s):
                    await self.wait_for_workers()
            except TimeoutError:
                raise self._not_ready(self._missing(self._usable)) from None
            chosen = self._choose(ask, lost)
            facts: dict[str, Any] = {"prefixkv.attempt": attempt}
            for member, route in chosen:
                facts[f"prefixkv.{member.info.role}"] = route.worker
                facts[f"prefixkv.{member.info.role}_matched_pages"] = route.matched_pages
            members = [member for member, _ in chosen]
            decode, *prefills = (member.info for member in members)
            # A rid per attempt: an earlier one may still be ending on the same worker.
            sent = replace(ask, rid=part_rid(ask.rid, attempt))
            for prefill in prefills:
                sent = replace(sent, prefill=prefill.endpoint, prefill_url=prefill.url)
            begun = False
            try:
                line.mark("asked")
                line.fields |= {
                    "decode": decode.name, "prefill": prefills[0].name if prefills else "",
                    "attempts": line.fields.get("attempts", 0) + 1,
                }  # fmt: skip
                with current().call("generate", facts) as step:
                    tokens = outputs_of(self._client, decode, sent, step.headers)
                    async with contextlib.aclosing(tokens) as stream:
                        first = await self._first(stream, members)
                        # What is not finite is no worker's fault by its place: the same may come of
                        # another try.
                        if first.finish == "error" and not is_not_finite(first.error):
                            raise WorkerLostError(f"{decode.name} failed", first.error)
                        # From here on a repeat would send tokens twice: a failure now goes to the
                        # client.
                        begun, output = True, first
                        while output is not None:
                            if output.finish in ("error", "abort"):
                                step.fail(output.error)
                                raise answer_ended(output.error)
                            yield output
                            output = await anext(stream, None)
                return
            except WorkerLostError as error:
                if begun or attempt == _ATTEMPTS - 1:
                    detail = f"{error}: {error.detail}"
                    raise failed(503, str(error), detail, "worker_lost") from None
                # Either of the two may be at fault: avoid both while there are others. Where none
                # are, who follows them may not know yet that they have ended.
                lost |= {member.info.name for member in members}
                await asyncio.sleep(_AGAIN_S * attempt)
                self.retried += 1
            finally:
                for member, route in chosen:
                    self.routers[member.info.role].ended(route, time.monotonic())

    async def _first(
        self, stream: AsyncGenerator[TokenEvent, None], members: Sequence[_Member]
    ) -> TokenEvent:
        """Return the first output of an attempt. Raises WorkerLostError if a worker is silent and
        another one can answer, or it is given up. What has begun is left: its own connection tells
        whether the worker lives."""
        # A decode worker that answers alone need not hear of its prefill worker's silence.
        awaited = members[:1] if members[0].info.alone else members
        first = asyncio.ensure_future(anext(stream))
        try:
            # No time limit of its own: the prompt may take long. A worker that is alone, and only
            # stood still for a while, has lost no request.
            while not (await asyncio.wait((first,), timeout=_TICK_S))[0]:
                silent = [
                    member.info.name for member in awaited
                    if member.silent and (member.given_up or self._answering(member.info.role))
                ]  # fmt: skip
                if silent:
                    raise WorkerLostError(f"{' and '.join(silent)} did not answer")
            return first.result()
        finally:
            first.cancel()
            # Nothing reads the stream when it is closed.
            await asyncio.gather(first, return_exceptions=True)

    def _choose(self, ask: Ask, lost: Collection[str]) -> list[tuple[_Member, Route]]:
        """Choose a decode and a prefill worker, counted in their routers; only a decode worker,
        among those that answer alone, where no prefill worker answers. After
        `wait_for_workers`."""
        chosen: list[tuple[_Member, Route]] = []
        data, namespace = RadixKey(ask.tokens).data, namespace_of(ask.namespace)
        is_down = not self._answering("prefill")
        for role, router in self.routers.items():
            among = self._usable(role)
            if is_down and role == "decode":
                among = [member for member in among if member.info.alone] or among
            elif is_down and chosen[0][0].info.alone:
                break
            keys = page_keys(data, among[0].info.page_size)
            names = [member.info.name for member in among]
            # Lost ones come last, not never: with a single worker a repeat must be able to use it.
            names = [name for name in names if name not in lost] or names
            route = router.route(keys, time.monotonic(), namespace=namespace, among=names)
            chosen.append((self.members[route.worker], route))
        return chosen

    async def announce(self, announcement: Announcement) -> None:
        """Tell each decode worker that answers: any of them may have had the session's last turn.
        What a worker does not hear costs time, no answer."""
        body = msgspec.json.encode(announcement)
        urls = [f"{member.info.url}/announce" for member in self._answering("decode")]
        await asyncio.gather(*(self._tell(url, body) for url in urls))

    def stats(self) -> dict[str, int]:
        """Return the numbers of repeats and silent workers, and each router's counters."""
        counts = {"retried": self.retried, "silent": len(self.silent)}
        for role, router in self.routers.items():
            router.expire(time.monotonic())
            counts |= {f"{role}_{name}": number for name, number in router.stats().items()}
        return counts

    async def close(self) -> None:
        self._closed = True
        for name in list(self.members):
            self.remove(name)
        await self._client.close()


async def outputs_of(
    client: aiohttp.ClientSession, decode: WorkerInfo, ask: Ask, headers: Mapping[str, str]
) -> AsyncGenerator[TokenEvent, None]:
    """Yield the outputs of a request to a worker; `headers` carry its trace. Raises
    WorkerLostError, or ApiError if the worker refuses the request."""
    url, body, left = f"{decode.url}/generate", msgspec.json.encode(ask), ask.num_samples
    try:
        async with client.post(url, data=io.BytesIO(body), headers=headers) as answer:
            if answer.status != 200:
                refusal = await answer.read()
                raise _refusal_error(decode.name, answer.status, refusal)
            rest = b""
            async for piece in pieces_of(client, answer):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line:
                        output = _output_decoder.decode(line)
                        left -= output.finish is not None
                        yield output
    except aiohttp.ClientError as error:
        why = f"{decode.name} was lost"
        raise WorkerLostError(why, f"{type(error).__name__} {error}") from None
    # A stream that closes in order, but with samples that have not ended, is a lost worker too.
    if left:
        raise WorkerLostError(f"{decode.name} ended before its answer did")


def _refusal_error(worker: str, status: int, body: bytes) -> Exception:
    """Return ApiError if the request itself is wrong, in the worker's words if they are fit for a
    client; else WorkerLostError."""
    try:
        error = msgspec.json.decode(body)["error"]
        message, code = str(error["message"]), error["code"]
    except (msgspec.DecodeError, KeyError, TypeError):
        message, code = body[:500].decode("utf-8", "replace"), None
    if status == 400 and not is_inner(message):
        return ApiError(400, message, code=code)
    if status == 400:
        return failed(400, "the request is not served here", message, code or "refused")
    return WorkerLostError(f"{worker} refused the request", f"{status}: {message}")
