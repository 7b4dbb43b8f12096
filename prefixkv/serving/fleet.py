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
import math
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec

from prefixkv.errors import ConfigError, HandshakeError, ProtocolError
from prefixkv.serving.client import make_client, pieces_of
from prefixkv.serving.failures import ApiError, answer_ended, failed, is_inner, is_not_finite
from prefixkv.serving.feed import batches_of
from prefixkv.serving.router import BoundedAffinityRouter, Route
from prefixkv.serving.streams import read_some
from prefixkv.serving.tracing import current
from prefixkv.serving.waits import wait_set
from prefixkv.serving.wire import (
    SILENCE_S,
    Announcement,
    Ask,
    FenceRequest,
    LostPeer,
    TokenEvent,
    WorkerInfo,
    namespace_of,
    part_rid,
)
from prefixkv.spi import RadixKey, check_page_sizes, page_keys

logger = logging.getLogger("prefixkv.fleet")

_ATTEMPTS: Final = 3  # at a request without any output yet
_AGAIN_S: Final = 1.0  # pause before another try to reach a worker
_REFUSAL_BYTES: Final = 64 << 10
_TICK_S: Final = 0.5
_QUIET_TICKS: Final = 10  # until a worker counts as silent: it has missed two signs of life
_GIVEN_UP_TICKS: Final = round(SILENCE_S / _TICK_S)  # until no request waits for it any more

_output_decoder = msgspec.json.Decoder(TokenEvent)


class WorkerLostError(Exception):
    """A worker did not answer to the end. `detail` is for the log."""

    def __init__(self, why: str, detail: str = "") -> None:
        super().__init__(why)
        self.detail = detail


class Start(NamedTuple):
    """A worker that is being started, and expected in `left_s` seconds; where it `is_late`,
    requests do not wait for it any more."""

    left_s: float
    is_late: bool


class _Member:
    """A worker, and whether it is silent. Silence is counted in ticks of the event loop: if this
    process or the whole machine stands still, that is no silence of the worker."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.tasks: tuple[asyncio.Task[None], ...] = ()
        self.silent = False
        # Requests that wait for the worker's first output: `watch` ends these. Those that have
        # begun are left: their own connection tells whether the worker lives.
        self.waiting: set[asyncio.Timeout] = set()
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

    async def watch(self, has_others: Callable[[], bool]) -> None:
        """Mark the worker silent after `_QUIET_TICKS` without a sign of life. What waits for it is
        ended once it can go elsewhere, or it is given up. `has_others`: another worker of its role
        answers."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._quiet_ticks += 1
            if self._quiet_ticks < _QUIET_TICKS:
                continue
            if not self.silent:
                self.silent = True
                logger.warning("%s is silent: requests go elsewhere, or wait", self.info.name)
            # A worker that is alone and only stood still for a while has lost no request.
            if not self.given_up and not has_others():
                continue
            # Rescheduling a time-out to now ends its wait with TimeoutError.
            for patience in self.waiting:
                if not patience.expired():
                    patience.reschedule(asyncio.get_running_loop().time())


class _WorkerPair:
    """The two workers of one attempt, counted in their routers until `end`. Without a prefill
    worker the decode worker answers alone."""

    def __init__(self, fleet: Fleet, routes: Sequence[Route]) -> None:
        self._fleet, self._routes = fleet, routes
        self.names = [route.worker for route in routes]
        self._members = [fleet.members[name] for name in self.names]
        self.decode = self._members[0].info
        self.prefill = self._members[1].info if len(routes) > 1 else None
        self.facts: dict[str, Any] = {}  # for its spans
        for role, route in zip(fleet.routers, routes, strict=False):
            self.facts[f"prefixkv.{role}"] = route.worker
            self.facts[f"prefixkv.{role}_matched_pages"] = route.matched_pages

    async def first(self, stream: AsyncGenerator[TokenEvent, None]) -> TokenEvent:
        """Raises WorkerLostError if a worker falls silent and another one can answer."""
        # A decode worker that answers alone need not hear of its prefill worker's silence.
        awaited = self._members[:1] if self.decode.alone else self._members
        try:
            # No time limit of its own: the prompt may take long. Only silence ends the wait.
            async with asyncio.timeout(None) as patience:
                for member in awaited:
                    member.waiting.add(patience)
                try:
                    return await anext(stream)
                finally:
                    for member in awaited:
                        member.waiting.discard(patience)
        except TimeoutError:
            silent = [member.info.name for member in awaited if member.silent]
            raise WorkerLostError(f"{' and '.join(silent)} did not answer") from None

    def end(self) -> None:
        for router, route in zip(self._fleet.routers.values(), self._routes, strict=False):
            router.ended(route, time.monotonic())


class Fleet:
    """The workers and the routers over them. `api_key` is what workers require."""

    def __init__(self, api_key: str = "") -> None:
        self.workers: dict[str, WorkerInfo] = {}
        # By name, all workers that there have ever been, each as it was last.
        self.known: dict[str, WorkerInfo] = {}
        # In the order in which an attempt's workers are chosen.
        self.routers = {role: BoundedAffinityRouter() for role in ("decode", "prefill")}
        self.members: dict[str, _Member] = {}  # by name, those in `workers`
        self._closed = False
        # The worker of a role that is being started, and serves first; None: none is.
        self.next_start: Callable[[str], Start | None] = lambda role: None
        self._joined = asyncio.Event()  # replaced whenever it is set: by each worker that comes
        # All lives fenced so far, never shortened: a worker that joins later must hear of each.
        self._fenced: list[FenceRequest] = []
        self._any_fenced = asyncio.Condition()
        self.retried = 0
        # `SILENCE_S` bounds the time between two pieces, which signs of life keep short.
        self._client = make_client(api_key, SILENCE_S)

    # --- which there are --------------------------------------------------------------------------

    def add(self, info: WorkerInfo) -> None:
        """Add a worker, or replace one of the same name. Raises ConfigError, with nothing changed,
        if it cannot work with the others. After `close`: no-op."""
        if self._closed:
            return
        # Models must agree over the whole fleet; page sizes within a role, since its router keys
        # prompts by pages. Checked before anything changes.
        for other in self.workers.values():
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
        self.workers[info.name] = info
        self.known[info.name] = info
        self.routers[info.role].add_worker(info.name)
        member = self.members[info.name] = _Member(info)
        member.tasks = (
            asyncio.create_task(self._apply_events(member)),
            asyncio.create_task(member.watch(lambda: bool(self._answering(info.role)))),
            asyncio.create_task(self._report_fences(info)),
        )

    def remove(self, name: str, life: str = "") -> bool:
        """Send a worker no more requests; those in progress end by themselves. With `life`, only if
        it is in that life. Returns False if it is not here."""
        info = self.workers.get(name)
        if info is None or (life and info.life != life):
            return False
        del self.workers[name]
        for task in self.members.pop(name).tasks:
            task.cancel()
        self.routers[info.role].remove_worker(name)
        return True

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

    async def fence(self, name: str, life: str) -> None:
        """State that a life of a worker is certainly dead, to every worker, present and future,
        until it confirms. What was held for that life is then reused: were it alive after all, its
        writes would land in pages of other requests."""
        async with self._any_fenced:
            self._fenced.append(FenceRequest(name, life))
            self._any_fenced.notify_all()

    async def _report_fences(self, info: WorkerInfo) -> None:
        num_confirmed = 0
        while True:
            async with self._any_fenced:
                while num_confirmed == len(self._fenced):
                    await self._any_fenced.wait()
            body = msgspec.json.encode(self._fenced[num_confirmed])
            try:
                asked = self._client.post(f"{info.url}/fence", data=body, raise_for_status=True)
                async with asked:
                    num_confirmed += 1
            except aiohttp.ClientError:  # repeated, since it is not counted
                await asyncio.sleep(_AGAIN_S)

    async def lost(self) -> dict[str, list[LostPeer]]:
        """Return, by worker that answers, the lost peers that it holds pages or rooms for."""
        infos = [*self.workers.values()]
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
        return msgspec.structs.replace(info, url=url)

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
            starts = [self.next_start(role) for role in missing]
            if any(start is None or start.is_late for start in starts):
                raise self._not_ready(missing)
            await wait_set(self._joined, _TICK_S)

    def _not_ready(self, roles: Sequence[str]) -> ApiError:
        silent = "".join(
            f", {name} is silent" for name, member in self.members.items()
            if member.info.role in roles
        )  # fmt: skip
        starts = {role: start for role in roles if (start := self.next_start(role)) is not None}
        coming = "".join(
            f", a {role} worker is starting "
            + ("and late" if start.is_late else f"(about {math.ceil(start.left_s)} s)")
            for role, start in starts.items()
        )
        why = f"no {' and no '.join(roles)} worker is ready{silent}{coming}"
        error = ApiError(503, why, "server_error", "not_ready")
        error.retry_s = max((start.left_s for start in starts.values()), default=1.0)
        return error

    @property
    def takes_requests(self) -> bool:
        """As `ready`, but silent workers count until they are given up."""
        return not self._missing(self._usable)

    def _missing(self, found: Callable[[str], list[str]]) -> list[str]:
        roles = [role for role in self.routers if not found(role)]
        alone = any(self.workers[name].alone for name in found("decode"))
        return [] if alone else roles

    @property
    def silent(self) -> list[str]:
        return [name for name, member in self.members.items() if member.silent]

    def _answering(self, role: str) -> list[str]:
        return self._where(role, lambda member: not member.silent)

    def _usable(self, role: str) -> list[str]:
        """Return the workers that are not silent; where all are, those that are not given up."""
        return self._answering(role) or self._where(role, lambda member: not member.given_up)

    def _where(self, role: str, holds: Callable[[_Member], bool]) -> list[str]:
        members = self.members.items()
        return [name for name, one in members if one.info.role == role and holds(one)]

    @property
    def context(self) -> int:
        """Most tokens of a request that every worker accepts; 0 without a worker."""
        return min((info.context for info in self.workers.values()), default=0)

    @property
    def vocab_size(self) -> int:
        """Bound of token ids on every worker; 0 without a worker."""
        return min((info.vocab_size for info in self.workers.values()), default=0)

    # --- requests ---------------------------------------------------------------------------------

    async def generate(
        self, ask: Ask, on_attempt: Callable[[str, str], object] = lambda decode, prefill: None
    ) -> AsyncGenerator[TokenEvent, None]:
        """Yield the outputs of a request to the ends of all its samples. Chooses `prefill` and
        `prefill_url` of the `Ask`. Closing the generator aborts the request.

        An attempt that fails before its first output is repeated on other workers. `on_attempt`
        gets the names of each attempt's decode and prefill worker.

        Raises: ApiError 400 if a worker refuses the request; 500 if what was computed first is not
        finite; 503 if none accepts it or its worker is lost.
        """
        lost: set[str] = set()
        for attempt in range(_ATTEMPTS):
            try:
                async with asyncio.timeout(ask.deadline_s):
                    await self.wait_for_workers()
            except TimeoutError:
                raise self._not_ready(self._missing(self._usable)) from None
            with current().part("routing", {"prefixkv.attempt": attempt}) as step:
                pair = self._choose_pair(ask, lost)
                step.add(pair.facts)
            begun = False
            try:
                on_attempt(pair.decode.name, "" if pair.prefill is None else pair.prefill.name)
                with current().part(
                    "generate", {"prefixkv.attempt": attempt, **pair.facts}, is_call=True
                ) as step:
                    tokens = self._stream(ask, pair, attempt, step.headers)
                    async with contextlib.aclosing(tokens) as stream:
                        output = await pair.first(stream)
                        if output.finish == "error":
                            # No worker is at fault by its place: the same may come of another try.
                            if is_not_finite(output.error):
                                raise answer_ended(output.error)
                            raise WorkerLostError(f"{pair.decode.name} failed", output.error)
                        # From here on a repeat would send tokens twice: a failure now goes to the
                        # client.
                        begun = True
                        yield output
                        async for output in stream:
                            if output.error:
                                step.fail(output.error)
                            yield output
                return
            except WorkerLostError as error:
                if begun or attempt == _ATTEMPTS - 1:
                    detail = f"{error}: {error.detail}"
                    raise failed(503, str(error), detail, "worker_lost") from None
                # Either of the two may be at fault: avoid both while there are others.
                lost |= {*pair.names}
                self.retried += 1
            finally:
                pair.end()

    def _choose_pair(self, ask: Ask, lost: Collection[str]) -> _WorkerPair:
        """Choose a decode and a prefill worker; only a decode worker, among those that answer
        alone, where no prefill worker answers. After `wait_for_workers`."""
        routes: list[Route] = []
        data, namespace = RadixKey(ask.tokens).data, namespace_of(ask.namespace)
        is_down = not self._answering("prefill")
        for role, router in self.routers.items():
            among = self._usable(role)
            if is_down and role == "decode":
                among = [name for name in among if self.workers[name].alone] or among
            elif is_down and self.workers[routes[0].worker].alone:
                break
            keys = page_keys(data, self.workers[among[0]].page_size)
            # Lost ones come last, not never: with a single worker a repeat must be able to use it.
            among = [name for name in among if name not in lost] or among
            routes.append(router.route(keys, time.monotonic(), namespace=namespace, among=among))
        return _WorkerPair(self, routes)

    async def _stream(
        self, ask: Ask, pair: _WorkerPair, attempt: int, headers: Mapping[str, str]
    ) -> AsyncGenerator[TokenEvent, None]:
        """Yield the outputs of one attempt; `headers` carry its trace. Raises WorkerLostError, or
        ApiError if the worker refuses the request."""
        body = msgspec.json.encode(
            msgspec.structs.replace(
                # A rid per attempt: an earlier one may still be ending on the same worker.
                ask, rid=part_rid(ask.rid, attempt),
                prefill="" if pair.prefill is None else pair.prefill.endpoint,
                prefill_url="" if pair.prefill is None else pair.prefill.url,
            )
        )  # fmt: skip
        url, left = f"{pair.decode.url}/generate", ask.num_samples
        try:
            async with self._client.post(url, data=io.BytesIO(body), headers=headers) as answer:
                if answer.status != 200:
                    refusal = await read_some(pieces_of(self._client, answer), _REFUSAL_BYTES)
                    raise _refusal_error(pair.decode.name, answer.status, refusal)
                rest = b""
                async for piece in pieces_of(self._client, answer):
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        if line:
                            output = _output_decoder.decode(line)
                            left -= output.finish is not None
                            yield output
        except aiohttp.ClientError as error:
            why = f"{pair.decode.name} was lost"
            raise WorkerLostError(why, f"{type(error).__name__} {error}") from None
        # A stream that closes in order, but with samples that have not ended, is a lost worker too.
        if left:
            raise WorkerLostError(f"{pair.decode.name} ended before its answer did")

    async def announce(self, announcement: Announcement) -> None:
        """Tell each decode worker that answers: any of them may have had the session's last turn.
        What a worker does not hear costs time, no answer."""
        body = msgspec.json.encode(announcement)

        async def tell(url: str) -> None:
            with contextlib.suppress(aiohttp.ClientError):
                async with self._client.post(f"{url}/announce", data=body):
                    pass

        await asyncio.gather(*(tell(self.workers[name].url) for name in self._answering("decode")))

    def stats(self) -> dict[str, int]:
        """Return the numbers of repeats and silent workers, and each router's counters."""
        counts = {"retried": self.retried, "silent": len(self.silent)}
        for role, router in self.routers.items():
            router.expire(time.monotonic())
            counts |= {f"{role}_{name}": number for name, number in router.stats().items()}
        return counts

    async def close(self) -> None:
        self._closed = True
        for name in list(self.workers):
            self.remove(name)
        await self._client.close()


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
