"""A prefill worker and decode workers with one model, each a process as `prefixkv worker` runs it,
and requests to them. No worker outlives this process."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from prefixkv import PrefixKVError
from prefixkv.engines.hf.requests import Sampling
from prefixkv.serving.client import make_client
from prefixkv.serving.config import KINDS
from prefixkv.serving.fleet import Fleet
from prefixkv.serving.http import ApiError
from prefixkv.serving.launch import Child
from prefixkv.serving.roles import without_settings
from prefixkv.serving.wire import Ask, WorkerInfo
from prefixkv.settings import as_environ

PREFILL: Final = "prefill"  # the name of the prefill worker
_END_S: Final = 15.0
_START_S: Final = 300.0
_SETTLE_S: Final = 10.0
_BUSY: Final = ("owned", "held", "quarantined")  # states of pages that requests still use


class ModelWorkerError(PrefixKVError):
    """A worker did not start, or did not answer to the end."""


@dataclass(slots=True)
class ChatAnswer:
    """Outcome of one request. Of its prompt, the KV of the first `hit_tokens` was cached on decode,
    and that of the next `shared_tokens` was arriving there for another request. Prefill had that of
    the first `prefill_hit_tokens` cached."""

    prompt: list[int]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    hit_tokens: int = 0
    prefill_hit_tokens: int = 0
    shared_tokens: int = 0
    # By the client's clock: from sending to the first token, then between two tokens.
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)

    @property
    def computed_tokens(self) -> int:
        return len(self.prompt) - self.prefill_hit_tokens

    @property
    def sent_tokens(self) -> int:
        return len(self.prompt) - self.hit_tokens - self.shared_tokens


class _Fleets:
    """Those that a worker is in."""

    def __init__(self, fleets: Sequence[Fleet]) -> None:
        self._fleets = fleets

    def add(self, info: WorkerInfo) -> None:
        for fleet in self._fleets:
            fleet.add(info)

    def remove(self, name: str, life: str) -> None:
        for fleet in self._fleets:
            fleet.remove(name, life)


class ModelWorkers:
    """An asynchronous context: entering waits for all workers, leaving ends them.

    Args:
        folder: the model, as `prefixkv worker --model` takes it.
        prefill: settings by name, see `prefixkv worker prefill --help`.
        decode: settings of each decode worker, by its name. A request names the one it goes to.
        prefill_within: a command that runs the prefill worker's command line, see `Child`.
        decode_within: the same for each decode worker.
    """

    def __init__(
        self,
        folder: Path,
        prefill: Mapping[str, Any],
        decode: Mapping[str, Mapping[str, Any]],
        prefill_within: Sequence[str] = (),
        decode_within: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._settings = {PREFILL: dict(prefill), **{name: dict(of) for name, of in decode.items()}}
        self._within = {PREFILL: prefill_within, **dict.fromkeys(decode, decode_within)}
        self._key = secrets.token_urlsafe(24)
        # A fleet per decode worker, each with the one prefill worker: so a request goes where it is
        # sent.
        self._fleets = {name: Fleet(self._key) for name in decode}
        self._children: list[Child] = []

    async def __aenter__(self) -> Self:
        self._client = make_client(self._key, _SETTLE_S)
        try:
            # One by one: where the settings of one are refused, those before it have to be ended.
            for name in self._settings:
                self._children.append(self._start(name))
            async with asyncio.timeout(_START_S):
                await asyncio.gather(*(child.ready for child in self._children))
        except BaseException as error:
            # `async with` does not leave a context that it could not enter: end what has started.
            await self.__aexit__(type(error))
            raise
        return self

    async def __aexit__(self, *failed: Any) -> None:
        for fleet in self._fleets.values():
            await fleet.close()
        await self._client.close()
        # After a failure nothing is worth a drain.
        grace_s = 0 if any(failed) else _END_S
        for child in self._children:
            child.ready.cancel()  # that it did not start is no news any more
        await asyncio.gather(*(child.end(grace_s) for child in self._children))

    def _start(self, name: str) -> Child:
        """Keep the fleets that use the worker up to date."""
        is_prefill = name == PREFILL
        role = PREFILL if is_prefill else "decode"
        settings = {
            "name": name, "model": str(self._folder), "threads": 1, "api_key": self._key,
            "parent": os.getpid(), **self._settings[name],
        }  # fmt: skip
        environ = without_settings(os.environ) | as_environ(KINDS[role], settings)
        fleets = [*self._fleets.values()] if is_prefill else [self._fleets[name]]
        return Child(role, environ, _Fleets(fleets), self._within[name])

    # --- requests ---------------------------------------------------------------------------------

    async def ask(
        self, decode: str, rid: str, prompt: Sequence[int], max_new_tokens: int, salt: str = "",
        ignore_end: bool = False,
    ) -> ChatAnswer:  # fmt: skip
        """Send one request; its tokens are chosen greedily. Raises ModelWorkerError if it does not
        end as it should.

        Args:
            rid: unique among the requests in progress.
            salt: requests with different salts share nothing.
            ignore_end: True: the model's end tokens do not end the answer.
        """
        answer = ChatAnswer(list(prompt), max_new_tokens)
        how = Sampling(ignore_end=ignore_end)
        ask = Ask(rid, answer.prompt, "", how, max_new_tokens, namespace=salt)
        last_s = time.perf_counter()
        try:
            async with aclosing(self._fleets[decode].generate(ask)) as stream:
                async for output in stream:
                    now_s = time.perf_counter()
                    if output.finish in ("abort", "error") or output.token is None:
                        raise ModelWorkerError(f"request {rid}: {output.error or output.finish}")
                    if answer.tokens:
                        answer.itl_s.append(now_s - last_s)
                    else:
                        answer.ttft_s = now_s - last_s
                    last_s = now_s
                    answer.tokens.append(output.token)
                    answer.hit_tokens = output.hit_tokens
                    answer.prefill_hit_tokens = output.prefill_hit_tokens
                    answer.shared_tokens = output.shared_tokens
        except ApiError as error:
            raise ModelWorkerError(f"request {rid}: {error}") from None
        return answer

    @property
    def retried(self) -> int:
        return sum(fleet.retried for fleet in self._fleets.values())

    # --- figures ----------------------------------------------------------------------------------

    def _status_url(self, name: str) -> str:
        known = (fleet.known.get(name) for fleet in self._fleets.values())
        return next(info.status_url for info in known if info is not None)

    async def figures(self, name: str) -> dict[str, float]:
        async with self._client.get(f"{self._status_url(name)}/metrics") as answer:
            text = await answer.text()
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {metric: float(number) for metric, _, number in lines}

    async def settled(self, name: str) -> tuple[dict[str, float], dict[str, int]]:
        """Return a worker's metrics once no request uses pages there, or as they are after
        `_SETTLE_S`, and the number of pages still in use by state."""
        end_s = time.monotonic() + _SETTLE_S
        # A request's pages are given back a moment after its last token.
        while True:
            figures = await self.figures(name)
            pages = {
                state: int(figures[f'prefixkv_pages{{node="{name}",state="{state}"}}'])
                for state in _BUSY
            }
            if not any(pages.values()) or time.monotonic() > end_s:
                return figures, {state: num for state, num in pages.items() if num}
            await asyncio.sleep(0.05)
