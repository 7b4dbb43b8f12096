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
from prefixkv.serving.config import KINDS, without_settings
from prefixkv.serving.fleet import WorkerLostError, outputs_of
from prefixkv.serving.http import ApiError
from prefixkv.serving.launch import Child
from prefixkv.serving.openai import Usage
from prefixkv.serving.wire import SILENCE_S, Ask, WorkerInfo
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
    """Outcome of one request."""

    prompt: list[int]
    max_new_tokens: int
    usage: Usage
    tokens: list[int] = field(default_factory=list)
    # By the client's clock: from sending to the first token, then between two tokens.
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)


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
        self._infos: dict[str, WorkerInfo] = {}
        self._children: list[Child] = []

    async def __aenter__(self) -> Self:
        self._client = make_client(self._key, SILENCE_S)
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
        await self._client.close()
        # After a failure nothing is worth a drain.
        grace_s = 0 if any(failed) else _END_S
        for child in self._children:
            child.ready.cancel()  # that it did not start is no news any more
        await asyncio.gather(*(child.end(grace_s) for child in self._children))

    def _start(self, name: str) -> Child:
        role = PREFILL if name == PREFILL else "decode"
        settings = {
            "name": name, "model": str(self._folder), "threads": 1, "api_key": self._key,
            "parent": os.getpid(), **self._settings[name],
        }  # fmt: skip
        environ = without_settings(os.environ) | as_environ(KINDS[role], settings)
        return Child(role, environ, self, self._within[name])

    # What a `Child` asks of a fleet. One that has gone is asked all the same, and is lost then.
    def add(self, info: WorkerInfo) -> None:
        self._infos[info.name] = info

    def remove(self, name: str, life: str) -> None:
        pass

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
        answer = ChatAnswer(list(prompt), max_new_tokens, Usage(len(prompt)))
        prefill, how = self._infos[PREFILL], Sampling(ignore_end=ignore_end)
        ask = Ask(
            rid, answer.prompt, prefill.endpoint, how, max_new_tokens, namespace=salt,
            prefill_url=prefill.url,
        )  # fmt: skip
        last_s = time.perf_counter()
        try:
            outputs = outputs_of(self._client, self._infos[decode], ask, {})
            async with aclosing(outputs) as stream:
                async for output in stream:
                    now_s = time.perf_counter()
                    if output.finish in ("abort", "error") or output.token is None:
                        raise ModelWorkerError(f"request {rid}: {output.error or output.finish}")
                    if answer.tokens:
                        answer.itl_s.append(now_s - last_s)
                    else:
                        answer.ttft_s = now_s - last_s
                        answer.usage.add_prompt(len(prompt), output)
                    last_s = now_s
                    answer.tokens.append(output.token)
        except (ApiError, WorkerLostError) as error:
            raise ModelWorkerError(f"request {rid}: {error}") from None
        return answer

    # --- figures ----------------------------------------------------------------------------------

    async def figures(self, name: str) -> dict[str, float]:
        async with self._client.get(f"{self._infos[name].status_url}/metrics") as answer:
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
