"""The proxy, over real sockets, before servers that do on command what vLLM's do by chance: fail,
say nothing, die in the middle. Streams are cut anywhere. With real ones:
tests/integration/vllm."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefixkv import Hints
from prefixkv.errors import ConfigError
from prefixkv.proxy import server as proxy_module
from prefixkv.proxy.server import Proxy, prompts_of, retold_events, whole_events
from prefixkv.serving.config import Limits, ListenSettings, ProxyConfig, ServerAt
from prefixkv.serving.http import (
    ApiError,
    App,
    HttpServer,
    Stream,
    json_response,
    run_until_disconnect,
)
from tests.support.patience import NEVER_S, PATIENCE_S
from tests.support.processes import run_python
from tests.support.scenes import played_by, until

LIMITS = Limits(1 << 20, NEVER_S, NEVER_S, NEVER_S, NEVER_S)
Say = Callable[["Engine", dict[str, Any]], Coroutine[Any, Any, Response]]


class Engine:
    """A server of one role. `say` is what it does with a request, `asked` what was asked."""

    def __init__(self, name: str, say: Say, port: int = 0) -> None:
        self.name, self.say = name, say
        self.asked: list[dict[str, Any]] = []
        self.ids: list[str] = []  # X-Request-Id of each
        self.heads: list[Headers] = []
        self.under_way = 0
        routes = [
            Route("/v1/completions", self._take, methods=["POST"]),
            Route("/v1/chat/completions", self._take, methods=["POST"]),
            Route("/v1/models", self._models),
            *(
                Route(f"/{one}", self._echo, methods=["GET", "POST"])
                for one in ("tokenize", "detokenize", "version")
            ),
        ]
        self.server = HttpServer(App(routes), "127.0.0.1", port, LIMITS)

    async def _take(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.asked.append(body)
        self.ids.append(request.headers.get("x-request-id", ""))
        self.heads.append(request.headers)
        self.under_way += 1
        try:
            return await run_until_disconnect(request, self.say(self, body))
        finally:
            self.under_way -= 1

    async def _echo(self, request: Request) -> Response:
        body = await request.body()
        return json_response({"path": request.url.path, "body": json.loads(body or "null")})

    async def _models(self, _: Request) -> Response:
        return json_response({"data": [self.name]})

    @property
    def at(self) -> ServerAt:
        return ServerAt(self.server.url, self.name)


async def well(engine: Engine, body: dict[str, Any]) -> Response:
    return json_response({"from": engine.name, "asked": body})


async def never(engine: Engine, body: dict[str, Any]) -> Response:
    await asyncio.Event().wait()
    raise AssertionError


def streaming(go_on: asyncio.Event | None = None, ended: list[str] | None = None) -> Say:
    """A stream of two pieces: the second comes when it may, if ever."""

    async def say(engine: Engine, body: dict[str, Any]) -> Response:
        async def pieces() -> AsyncGenerator[bytes, None]:
            try:
                yield b"data: one\n\n"
                await (go_on or asyncio.Event()).wait()
                yield b"data: [DONE]\n\n"
            finally:
                if ended is not None:
                    ended.append(engine.name)

        assert body["stream"] is True
        return Stream(pieces(), "text/event-stream")

    return say


def refusing(status: int, message: str = "no") -> Say:
    async def say(engine: Engine, body: dict[str, Any]) -> Response:
        raise ApiError(status, message)

    return say


class Stage:
    """A proxy, its servers, and a client."""

    def __init__(self, prefill: list[Say], decode: list[Say], config: ProxyConfig) -> None:
        self.prefill = [Engine(f"prefill-{i}", say) for i, say in enumerate(prefill)]
        self.decode = [Engine(f"decode-{i}", say) for i, say in enumerate(decode)]
        self.proxy = Proxy(
            config, [one.at for one in self.prefill], [one.at for one in self.decode]
        )
        self.client = httpx.AsyncClient(
            base_url=self.proxy.server.url, timeout=PATIENCE_S, trust_env=False
        )

    async def complete(self, prompt: Any = "hello", **more: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": prompt, **more})

    async def counter(self, name: str) -> float:
        answer = await self.client.get(f"{self.proxy.status.url}/metrics")
        (line,) = [line for line in answer.text.splitlines() if line.startswith(f"{name} ")]
        return float(line.split()[1])


def run(
    scene: Callable[[Stage], Awaitable[None]], prefill: list[Say] | None = None,
    decode: list[Say] | None = None, api_key: str = "", limits: Limits = LIMITS,
    request_log: str = "", servers_key: str = "",
) -> None:  # fmt: skip
    async def main() -> None:
        listen = ListenSettings(api_key=api_key, limits=limits, request_log=request_log)
        config = ProxyConfig(servers_key, listen=listen)
        stage = Stage(prefill or [well], decode or [well], config)
        async with AsyncExitStack() as stack:
            for engine in (*stage.prefill, *stage.decode):
                await engine.server.start()
                stack.push_async_callback(engine.server.stop)
            await stage.proxy.start()
            stack.push_async_callback(stage.proxy.stop)
            stack.push_async_callback(stage.client.aclose)
            await asyncio.wait_for(scene(stage), PATIENCE_S)
            await stage.client.aclose()  # clients that still wait leave
            await until(lambda: not any(places_taken(stage.proxy).values()))

    asyncio.run(main())


played = played_by(run)


def places_taken(proxy: Proxy) -> dict[str, float]:
    """The work of requests in progress, by role: that of those that have ended fades."""
    return {
        role: sum(worker.open_work for worker in side.router._workers.values())
        for role, side in proxy.sides.items()
    }


@pytest.mark.parametrize("num", [1, -5])
@played(decode=[never], limits=replace(LIMITS, max_requests_per_client=1))
async def test_a_client_with_as_many_requests_as_it_may_have_is_refused(
    stage: Stage, num: int
) -> None:
    asking = asyncio.create_task(stage.complete(n=num))
    await until(lambda: stage.decode[0].under_way)
    async with asyncio.timeout(5):
        refused = await stage.complete()
    assert refused.status_code == 429
    assert "rate_limit" in refused.text
    asking.cancel()


@played([refusing(500)], [never])
async def test_an_attempt_without_prefill_has_one_place(stage: Stage) -> None:
    asking = asyncio.create_task(stage.complete())
    (decode,) = stage.decode
    await until(lambda: decode.asked and "kv_transfer_params" not in decode.asked[-1])
    assert places_taken(stage.proxy) == {"prefill": 0.0, "decode": 1.0}
    asking.cancel()


@played([never], [never])
async def test_both_servers_are_asked_with_one_room_and_have_a_place_until_it_ends(
    stage: Stage,
) -> None:
    """That each gives its place back, however it ends, is looked at after every scene."""
    (prefill,), (decode,) = stage.prefill, stage.decode
    asked = asyncio.create_task(
        stage.complete(
            max_tokens=9, temperature=0.5, min_tokens=5, logprobs=1, logprob_token_ids=[7],
            seed=3, stop=["a"], structured_outputs={"regex": "a"}, cache_salt="salt", user="me",
        )
    )  # fmt: skip
    await until(lambda: prefill.asked and decode.asked)  # neither has answered
    send, load = prefill.asked[0], decode.asked[0]
    room = load["kv_transfer_params"]["room"]
    assert load["kv_transfer_params"] == {
        "do_remote_prefill": True, "room": room, "prefill": "prefill-0",
    }  # fmt: skip
    assert send["kv_transfer_params"] == {
        "do_remote_decode": True, "room": room, "decode": "decode-0",
    }  # fmt: skip
    assert (load["max_tokens"], send["max_tokens"], send["stream"]) == (9, 1, False)
    assert load["min_tokens"] == 5
    # What only says how tokens are drawn and shown is none of prefill's business.
    assert send.keys() == {
        "prompt", "max_tokens", "n", "stream", "temperature", "cache_salt", "user",
        "kv_transfer_params",
    }  # fmt: skip
    assert (send["temperature"], load["temperature"]) == (0, 0.5)
    assert places_taken(stage.proxy) == {"prefill": 1.0, "decode": 1.0}
    asked.cancel()
    await until(lambda: not prefill.under_way and not decode.under_way)


@played()
async def test_both_servers_hear_what_a_client_says_of_its_session(stage: Stage) -> None:
    hints = {"returns_after": 30, "of_later_versions": 1}
    answer = await stage.client.post(
        "/v1/completions", headers={"X-Session-Id": "s"},
        json={"prompt": "hello", "kv_hints": hints, "prompt_cache_retention": "24h"},
    )  # fmt: skip
    assert answer.status_code == 200
    expected = msgspec.to_builtins(Hints(session="s", returns_after=30))
    for (engine,) in (stage.prefill, stage.decode):
        assert engine.asked[0]["kv_transfer_params"]["hints"] == expected
        assert engine.asked[0]["session_id"] == "s"
        assert "kv_hints" not in engine.asked[0]
    # What brings a prompt is not the end of its request.
    await stage.complete(n=2, kv_hints={"ends": True})
    bring, last = stage.decode[0].asked[-2:]
    assert "hints" not in bring["kv_transfer_params"]
    assert last["kv_transfer_params"] == {"hints": msgspec.to_builtins(Hints(ends=True))}
    refused = await stage.complete(kv_hints={"returns_after": 45})
    assert (refused.status_code, refused.json()["error"]["param"]) == (
        400,
        "kv_hints.returns_after",
    )


def test_parameters_of_the_prompt_reach_both_servers_and_the_others_decode_alone() -> None:
    of_prompt = {
        "chat_template_kwargs": {"thinking": True}, "documents": [{"text": "x"}],
        "reasoning_effort": "low", "tools": [{"type": "function", "function": {"name": "f"}}],
        "add_generation_prompt": True,
    }  # fmt: skip
    of_answer = {
        "min_tokens": 2, "stop_token_ids": [7], "stream_options": {"include_usage": True},
        "skip_special_tokens": True, "user": None,
    }  # fmt: skip

    async def scene(stage: Stage) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "7"},
        ]
        body = {"messages": messages, **of_prompt, **of_answer}
        asking = asyncio.create_task(stage.client.post("/v1/chat/completions", json=body))
        await until(lambda: stage.prefill[0].asked and stage.decode[0].asked)
        (send,), (load,) = stage.prefill[0].asked, stage.decode[0].asked
        assert body.items() <= load.items()
        assert send["messages"] == messages
        assert of_prompt.items() <= send.items()
        assert not {"min_tokens", "stop_token_ids", "stream_options"} & send.keys()
        asking.cancel()

    run(scene, [never], [never])


@played()
async def test_what_decode_answers_is_passed_on_as_it_is(stage: Stage) -> None:
    answer = await stage.complete(user="me")
    assert answer.status_code == 200
    told = answer.json()
    assert (told["from"], told["asked"]["user"]) == ("decode-0", "me")
    rooms = {engine.asked[0]["kv_transfer_params"]["room"] for engine in stage.decode}
    await stage.complete()
    rooms.add(stage.decode[0].asked[1]["kv_transfer_params"]["room"])
    assert len(rooms) == 2  # each request has a room of its own
    assert (await stage.client.get("/v1/models")).json() == {"data": ["decode-0"]}


@pytest.mark.parametrize("words", ["slowly", "10.0.0.1 is slow"])
@pytest.mark.parametrize("status", [200, 429, 503])
@played()
async def test_when_to_ask_again_is_passed_on(stage: Stage, status: int, words: str) -> None:
    """Other headers are the proxy's own."""
    told = {"retry-after": "30", "retry-after-ms": "30000", "x-ratelimit-limit-requests": "7",
            "x-should-retry": "true", "x-inner": "10.0.0.1"}  # fmt: skip

    async def say(engine: Engine, body: dict[str, Any]) -> Response:
        return Response(json.dumps({"error": words}), status, told, "application/json")

    stage.decode[0].say = say
    for is_stream in (False, True):
        answer = await stage.complete(stream=is_stream)
        assert answer.status_code == (502 if status == 503 else status)
        assert {name: answer.headers.get(name) for name in told} == told | {"x-inner": None}
        assert answer.headers["content-type"] == "application/json"


def test_a_stream_is_passed_on_piece_by_piece() -> None:
    go_on = asyncio.Event()

    async def scene(stage: Stage) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with stage.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            pieces = answer.aiter_raw()
            assert await anext(pieces) == b"data: one\n\n"
            go_on.set()
            assert b"".join([piece async for piece in pieces]) == b"data: [DONE]\n\n"
        send = stage.prefill[0].asked[0]
        assert (send["max_tokens"], send["max_completion_tokens"]) == (1, 1)

    run(scene, None, [streaming(go_on)])


@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_that_leaves_and_the_first_piece_of_a_stream_end_prefills_request(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the end of the stream, which may be minutes later; a client that leaves ends that too."""
    monkeypatch.setattr(proxy_module, "_GRACE_S", NEVER_S if leaves else 0.01)
    ended: list[str] = []

    async def scene(stage: Stage) -> None:
        (prefill,) = stage.prefill
        body = {"prompt": "hello", "stream": True}
        async with stage.client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.aiter_raw()  # the client leaves when it is gone
            await anext(pieces)
            await until(lambda: prefill.under_way if leaves else not prefill.under_way)
            assert not ended
        await until(lambda: ended and not prefill.under_way)
        assert prefill.asked

    run(scene, [never], [streaming(ended=ended)])


@pytest.mark.slow
@pytest.mark.parametrize("status", [500, 401, 403, 404, 429])
def test_a_prefill_server_that_fails_is_replaced_before_the_first_token(status: int) -> None:
    async def scene(stage: Stage) -> None:
        first, second = stage.prefill
        answer = await stage.complete("a" * 5000)
        assert answer.status_code == 200
        broken, other = (first, second) if first.say is not well else (second, first)
        (decode,) = stage.decode
        if broken.asked:  # it was the first choice
            rooms = [body["kv_transfer_params"]["room"] for body in decode.asked]
            assert len(set(rooms)) == len(rooms) == 2
            assert decode.asked[1]["kv_transfer_params"]["prefill"] == other.name
            assert await stage.counter("prefixkv_proxy_retried_total") == 1
        assert [body["kv_transfer_params"]["room"] for body in other.asked] == [
            decode.asked[-1]["kv_transfer_params"]["room"]
        ]
        await until(lambda: decode.under_way == 0)

    broken = refusing(status)
    for order in ([broken, well], [well, broken]):
        run(scene, order, [_waits_for_prefill(order)])


def test_a_stream_that_begins_with_an_error_is_an_attempt_that_failed() -> None:
    """vLLM's status is 200 by then: where a transfer has failed, and prefill says so later."""
    events = [b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n']
    events.append(b'data: {"error": {"message": "failed at 10.0.0.1"}}\n\n')

    async def say(engine: Engine, body: dict[str, Any]) -> Response:
        async def pieces() -> AsyncGenerator[bytes, None]:
            yield b"".join(events) if "kv_transfer_params" in body else b"data: one\n\n"
            yield b"data: [DONE]\n\n"

        return Stream(pieces(), "text/event-stream")

    async def scene(stage: Stage) -> None:
        answer = await stage.complete(stream=True)
        assert (answer.status_code, answer.text) == (200, "data: one\n\ndata: [DONE]\n\n")
        (decode,) = stage.decode
        await until(lambda: decode.under_way == 0)
        assert len(decode.asked) == 3
        assert await stage.counter("prefixkv_proxy_retried_total") == 2

    run(scene, [never, never], [say])


def test_a_stream_that_begins_with_a_refusal_is_the_answer() -> None:
    """Another server would say the same, and the client has to read it."""
    refusal = b'data: {"error": {"message": "no \\"code\\": 500", "param": null, "code": 400}}\n\n'

    async def say(engine: Engine, body: dict[str, Any]) -> Response:
        async def pieces() -> AsyncGenerator[bytes, None]:
            yield refusal
            yield b"data: [DONE]\n\n"

        return Stream(pieces(), "text/event-stream")

    async def scene(stage: Stage) -> None:
        answer = await stage.complete(stream=True)
        assert (answer.status_code, answer.content) == (200, refusal + b"data: [DONE]\n\n")
        assert len(stage.decode[0].asked) == 1
        assert await stage.counter("prefixkv_proxy_retried_total") == 0
        assert await stage.counter("prefixkv_proxy_cut_total") == 0

    run(scene, [never, never], [say])


def test_a_stream_in_which_decode_says_an_error_is_counted_as_one_that_is_cut() -> None:
    async def say(engine: Engine, body: dict[str, Any]) -> Response:
        async def pieces() -> AsyncGenerator[bytes, None]:
            yield b"data: one\n\n"
            await asyncio.sleep(0.05)
            yield b'data: {"error": {"message": "out of memory"}}\n\ndata: [DONE]\n\n'

        return Stream(pieces(), "text/event-stream")

    async def scene(stage: Stage) -> None:
        answer = await stage.complete(stream=True)
        assert [one[:8] for one in answer.text.split("data: ")[1:]] == [
            "one\n\n", '{"error"', "[DONE]\n\n"
        ]  # fmt: skip
        assert await stage.counter("prefixkv_proxy_cut_total") == 1

    run(scene, None, [say])


def _waits_for_prefill(order: list[Say]) -> Say:
    """As decode does whose KV comes from a server that fails: nothing, till it is given up."""

    async def say(engine: Engine, body: dict[str, Any]) -> Response:
        params = body.get("kv_transfer_params")
        if params and order[int(params["prefill"][-1])] is not well:
            return await never(engine, body)
        await asyncio.sleep(0.05)
        return await well(engine, body)

    return say


@played([well], [_waits_for_prefill([never])])
async def test_without_a_prefill_server_decode_computes_the_prompt(stage: Stage) -> None:
    await stage.prefill[0].server.stop()
    answer = await stage.complete()
    assert answer.status_code == 200
    assert "kv_transfer_params" not in answer.json()["asked"]
    assert await stage.counter("prefixkv_proxy_recomputed_total") == 1
    health = (await stage.client.get(f"{stage.proxy.status.url}/health")).json()
    assert list(health["prefill"].values()) == ["avoided"]


def test_what_prefill_refuses_decode_is_asked_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode's word is the client's: in its own form, and it may do without prefill."""
    monkeypatch.setattr(proxy_module, "_GRACE_S", 0.01)

    async def say(engine: Engine, body: dict[str, Any]) -> Response:
        if "kv_transfer_params" in body:
            return await never(engine, body)
        raise ApiError(400, "much too long")

    async def scene(stage: Stage) -> None:
        answer = await stage.complete()
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "much too long"
        await until(lambda: stage.decode[0].under_way == 0)
        assert len(stage.decode[0].asked) == 2

    run(scene, [refusing(400, "too long")] * 3, [say])


@played(None, [well, well])
async def test_a_decode_server_that_is_gone_is_replaced(stage: Stage) -> None:
    await stage.decode[0].server.stop()
    for _ in range(3):
        answer = await stage.complete()
        assert (answer.status_code, answer.json()["from"]) == (200, "decode-1")
    await stage.decode[1].server.stop()
    answer = await stage.complete()
    for told in (answer, await stage.client.get("/v1/models")):
        assert (told.status_code, told.json()["error"]["code"]) == (503, "not_ready")
    health = await stage.client.get(f"{stage.proxy.status.url}/health")
    assert health.status_code == 503


def test_a_connection_that_breaks_before_an_answer_is_reopened_once() -> None:
    """As one does that was kept for too long. The room of the broken one ends on prefill with its
    connection; decode ends its own when it sees that the client is gone."""
    breaks = 1

    async def broken(engine: Engine, body: dict[str, Any]) -> Response:
        nonlocal breaks
        if breaks:
            breaks -= 1
            for connection in list(engine.server.state.connections):
                connection.transport.abort()
            await asyncio.Event().wait()
        return await well(engine, body)

    async def scene(stage: Stage) -> None:
        nonlocal breaks
        (decode,), (prefill,) = stage.decode, stage.prefill
        answer = await stage.complete(model="m")
        assert (answer.status_code, answer.json()["from"]) == (200, "decode-0")
        rooms = [one["kv_transfer_params"]["room"] for one in decode.asked]
        assert len(set(rooms)) == len(rooms) == 2
        breaks = 1
        assert (await stage.complete(use_beam_search=True)).status_code == 200, "without a room too"
        assert "kv_transfer_params" not in decode.asked[-1]
        breaks = 2
        answer = await stage.complete()
        assert answer.status_code == 503, "the second time it is lost"
        await until(lambda: prefill.under_way == 0)

    run(scene, [never], [broken])


@played()
async def test_while_decode_is_not_reached_nothing_is_asked_of_prefill(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """And its loss is not logged with each request of a client that asks again at once."""
    (gone,), (prefill,) = stage.decode, stage.prefill
    await gone.server.stop()
    for _ in range(20):
        assert (await stage.complete()).status_code == 503
    assert prefill.asked == []
    assert len([one for one in caplog.records if "was lost" in one.message]) == 1
    back = Engine("decode-0", well, int(gone.at.url.rpartition(":")[2]))
    await back.server.start()
    assert (await stage.complete()).status_code == 200
    await back.server.stop()


@pytest.mark.slow
def test_decodes_answer_ends_prefills_request() -> None:
    """Whatever it says: a room that it did not load is nobody's."""

    async def scene(stage: Stage) -> None:
        for _ in range(2):
            await stage.complete()
            await until(lambda: stage.prefill[0].under_way == 0)

    for say in (well, refusing(400), refusing(404), refusing(422)):
        run(scene, [never], [say])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "has_room"),
    [
        ({"prompt": "a", "use_beam_search": True}, False),
        ({"prompt": "a", "use_beam_search": True, "n": 3}, False),
        ({"prompt": "a", "prompt_logprobs": 0}, False),
        ({"prompt": "a", "prompt_embeds": "AAAA"}, False),
        # vLLM computes log-probabilities of an echo: of a chat unless their number is null, of a
        # completion where `logprobs` is given.
        ({"prompt": "a", "echo": True, "logprobs": 0}, False),
        ({"prompt": "a", "echo": True}, True),
        ({"messages": [{"role": "user", "content": "hi"}], "echo": True}, False),
        ({"messages": [{"role": "user", "content": "hi"}], "echo": True, "top_logprobs": 2,
          "logprobs": True}, False),
        ({"messages": [{"role": "user", "content": "hi"}], "echo": True, "top_logprobs": None},
         True),
        ({"messages": [{"role": "user", "content": "hi"}], "top_logprobs": 2, "logprobs": True},
         True),
    ],
)  # fmt: skip
@played()
async def test_what_decode_computes_by_itself_has_no_room(
    stage: Stage, more: dict[str, Any], has_room: bool
) -> None:
    path = "/v1/chat/completions" if "messages" in more else "/v1/completions"
    assert (await stage.client.post(path, json=more)).status_code == 200
    assert has_room or stage.prefill[0].asked == []
    (asked,) = stage.decode[0].asked
    assert ("kv_transfer_params" in asked) == has_room
    assert more.items() <= asked.items()


@played(api_key="key")
async def test_load_balancers_ask_the_port_that_serves(stage: Stage) -> None:
    bare = httpx.AsyncClient(base_url=stage.proxy.server.url, trust_env=False)
    for path in ("/health", "/ping"):
        assert (await bare.get(path)).status_code == 200
    assert (await bare.get("/v1/models")).status_code == 401
    await stage.decode[0].server.stop()
    await bare.post(
        "/v1/completions", json={"prompt": "a"}, headers={"authorization": "Bearer key"}
    )
    for path in ("/health", "/ping"):
        assert (await bare.get(path)).status_code == 503
    await bare.aclose()


@played()
async def test_decode_answers_for_tokens_and_version_and_other_paths_are_told(
    stage: Stage,
) -> None:
    for path in ("/v1/responses", "/v1/messages", "/nothing"):
        answer = await stage.client.post(path, json={})
        assert answer.status_code == 404
        for known in ("/v1/completions", "/tokenize", path):
            assert known in answer.json()["error"]["message"]
    for path in ("/tokenize", "/detokenize"):
        answer = await stage.client.post(path, json={"prompt": "a"})
        assert answer.json() == {"path": path, "body": {"prompt": "a"}}
    assert (await stage.client.get("/version")).json()["path"] == "/version"
    assert stage.prefill[0].asked == []


@played([never], [never])
async def test_rooms_that_wait_are_on_the_metrics(stage: Stage) -> None:
    asked = asyncio.create_task(stage.complete())
    await until(lambda: stage.decode[0].under_way and stage.prefill[0].under_way)
    name = f'{{prefill="{stage.prefill[0].at.url}"}}'
    assert await stage.counter("prefixkv_proxy_rooms_waiting" + name) == 1
    assert await stage.counter("prefixkv_proxy_oldest_waiting_timestamp_seconds" + name) > 1e9
    asked.cancel()
    await until(lambda: not stage.decode[0].under_way)
    assert await stage.counter("prefixkv_proxy_rooms_waiting" + name) == 0
    assert await stage.counter("prefixkv_proxy_oldest_waiting_timestamp_seconds" + name) == 0


@played([well], [refusing(400, "odd")])
async def test_a_stream_that_is_refused_and_one_that_fails_are_errors_and_counted(
    stage: Stage,
) -> None:
    answer = await stage.complete(stream=True)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "odd")
    await stage.decode[0].server.stop()
    assert (await stage.complete(stream=True)).status_code == 503
    for outcome in ("refused", "failed"):
        assert await stage.counter(f'prefixkv_proxy_requests_total{{outcome="{outcome}"}}') == 1
    for reason, status in (("server", 400), ("not_ready", 503)):
        labels = f'reason="{reason}",status="{status}"'
        assert await stage.counter(f"prefixkv_proxy_refused_total{{{labels}}}") == 1
    stage.proxy.draining = True
    told = (await stage.complete()).json()["error"]
    assert (told["type"], told["code"]) == ("server_error", "not_ready")


def _usage(cached: int | None, said: int | None) -> Say:
    """An answer of vLLM's; `said`: what the connector says."""

    async def say(engine: Engine, body: dict[str, Any]) -> Response:
        details = None if cached is None else {"cached_tokens": cached, "multimodal_tokens": 3}
        told = {"usage": {"prompt_tokens": 9, "prompt_tokens_details": details}}
        params = None if said is None else {"prefixkv": {"room": 1, "cached_tokens": said}}
        return json_response({**told, "kv_transfer_params": params})

    return say


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cached", "said", "passed_on"), [(8, 0, 0), (None, 0, 0), (4, None, 4), (None, None, None)]
)
def test_usage_says_what_decode_had(
    cached: int | None, said: int | None, passed_on: int | None
) -> None:
    async def scene(stage: Stage) -> None:
        answer = (await stage.complete()).json()
        details = answer["usage"]["prompt_tokens_details"]
        assert (details or {}).get("cached_tokens") == passed_on
        assert answer["kv_transfer_params"] is None

    run(scene, None, [_usage(cached, said)])


def test_usage_of_several_samples_is_of_before_they_were_brought() -> None:
    """The proxy has the prompt brought first, and decode then has all of it."""

    async def say(engine: Engine, body: dict[str, Any]) -> Response:
        return await _usage(8, 2 if "kv_transfer_params" in body else None)(engine, body)

    async def streamed(engine: Engine, body: dict[str, Any]) -> Response:
        if not body.get("stream"):
            return await say(engine, body)

        async def pieces() -> AsyncGenerator[bytes, None]:
            details = json.dumps({"usage": {"prompt_tokens_details": {"cached_tokens": 8}}})
            yield b'data: {"choices": 1}\n\ndata: ' + details[:20].encode()
            yield details[20:].encode() + b"\n\ndata: [DONE]\n\n"

        return Stream(pieces(), "text/event-stream")

    async def scene(stage: Stage) -> None:
        answer = (await stage.complete(n=2)).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
        answer = await stage.complete(["a", "b"], n=2, stream=True)
        lines = [line[6:] for line in answer.text.splitlines() if line]
        assert lines[0] == '{"choices": 1}'
        assert json.loads(lines[1])["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        assert lines[2] == "[DONE]"

    run(scene, None, [streamed])


@played(None, [refusing(500, "broken")])
async def test_an_error_of_decode_is_logged_when_all_attempts_are_made(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client hears under which number."""
    answer = await stage.complete()
    assert answer.status_code == 502
    told = answer.json()["error"]["message"]
    assert "broken" not in told
    number = told.partition("(request ")[2].rstrip(")")
    assert [
        one
        for one in caplog.records
        if f"request {number}: " in one.message and "broken" in one.message
    ]
    assert "kv_transfer_params" not in stage.decode[0].asked[-1]


def test_a_stream_whose_server_dies_ends_with_an_error() -> None:
    async def dies(engine: Engine, body: dict[str, Any]) -> Response:
        async def pieces() -> AsyncGenerator[bytes, None]:
            yield b"data: one\n\n"
            await asyncio.sleep(0.05)
            engine.server.cut()

        return Stream(pieces(), "text/event-stream")

    async def scene(stage: Stage) -> None:
        answer = await stage.complete(stream=True)
        assert answer.text.startswith("data: one\n\n")
        assert json.loads(answer.text.split("data: ")[2])["error"]["code"] == "worker_lost"
        assert "[DONE]" not in answer.text

    run(scene, None, [dies])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "num_samples", "brought"),
    [
        (["a", "b"], 1, ["a", "b"]),
        ([[1, 2], [3]], 1, [[1, 2], [3]]),
        ("a", 3, ["a"]),
        ([1, 2], 2, [[1, 2]]),
        ([1, 2], 1, None),
    ],
)
def test_several_answers_or_prompts_are_brought_each_by_itself(
    prompt: Any, num_samples: int, brought: list[Any] | None
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.complete(prompt, n=num_samples, max_tokens=4)
        *before, last = stage.decode[0].asked
        assert (last["prompt"], last["n"], last["max_tokens"]) == (prompt, num_samples, 4)
        if brought is None:
            assert before == []
            assert "kv_transfer_params" in last
            return
        assert "kv_transfer_params" not in last
        assert sorted(map(str, (body["prompt"] for body in before))) == sorted(map(str, brought))
        assert all(body["n"] == body["max_tokens"] == 1 for body in before)
        rooms = [body["kv_transfer_params"]["room"] for body in before]
        assert len(set(rooms)) == len(brought)
        sent = [body["kv_transfer_params"]["room"] for body in stage.prefill[0].asked]
        assert sorted(sent) == sorted(rooms)

    asked: list[int] = []

    async def prefill(engine: Engine, body: dict[str, Any]) -> Response:
        asked.append(body["kv_transfer_params"]["room"])
        return await well(engine, body)

    async def decode(engine: Engine, body: dict[str, Any]) -> Response:
        """As one that waits for its KV."""
        params = body.get("kv_transfer_params")
        await until(lambda: params is None or params["room"] in asked)
        return await well(engine, body)

    run(scene, [prefill], [decode])


def test_where_one_of_several_prompts_is_refused_the_others_end() -> None:
    async def say(engine: Engine, body: dict[str, Any]) -> Response:
        if body["prompt"] != "bad":
            return await never(engine, body)
        await until(lambda: len(engine.asked) == 3)
        raise ApiError(400, "bad")

    async def scene(stage: Stage) -> None:
        answer = await stage.complete(["a", "bad", "b"])
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "bad")
        await until(lambda: not any(one.under_way for one in (*stage.prefill, *stage.decode)))

    run(scene, [never], [say])


@played(None, [well, well])
async def test_the_next_turn_goes_where_the_first_went(stage: Stage) -> None:
    chats = [[{"role": "user", "content": f"{i} {i}" * 1000}] for i in range(4)]
    homes: dict[int, str] = {}
    for turn in range(3):
        for i, chat in enumerate(chats):
            answer = await stage.client.post("/v1/chat/completions", json={"messages": chat})
            assert homes.setdefault(i, answer.json()["from"]) == answer.json()["from"], turn
            chat += [
                {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}
            ]  # fmt: skip
    assert len(set(homes.values())) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "kv_transfer_params": {"room": 1}}, "kv_transfer_params"),
        ({"messages": []}, "prompt"),
        ({"prompt": "a", "n": "two"}, "n"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": ["a"] * 129}, "prompt"),
    ],
)
@played()
async def test_what_the_proxy_refuses_itself(
    stage: Stage, body: dict[str, Any], param: str
) -> None:
    answer = await stage.client.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not stage.prefill[0].asked
    assert not stage.decode[0].asked


async def elsewhere(engine: Engine, body: dict[str, Any]) -> Response:
    return Response(b"", 307, {"location": "http://127.0.0.1:1/"})


@played(decode=[elsewhere], servers_key="sk-secret")
async def test_the_servers_key_is_in_no_line_of_the_log(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor a loss that has no server's name."""
    assert (await stage.complete()).status_code == 503
    assert stage.decode[0].heads[0]["authorization"] == "Bearer sk-secret"
    lost, failed = [one.message for one in caplog.records]
    assert "a redirect to 'http://127.0.0.1:1/'" in lost
    assert "sk-secret" not in caplog.text
    assert f": {stage.decode[0].at.url} failed, and no decode" in failed


@played()
async def test_null_is_as_good_as_nothing_where_the_proxy_sets_it(stage: Stage) -> None:
    assert (await stage.complete(kv_transfer_params=None)).status_code == 200
    assert "room" in stage.decode[0].asked[0]["kv_transfer_params"]


def test_servers_as_they_are_named() -> None:
    one = ServerAt.of("http://127.0.0.1:8100/=tcp://127.0.0.1:14579")
    assert one == ServerAt("http://127.0.0.1:8100", "tcp://127.0.0.1:14579")
    # None is asked of a server.
    more = "http://me:secret@h=a", "http://:secret@h=a", "http://h#x=a", "http://h?=a"
    for text in (
        "http://127.0.0.1:8100", "127.0.0.1:8100=a", "http://h=", "http://[::=a", "=", "", *more,
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="is no server"):
            ServerAt.of(text)
    config = ProxyConfig(listen=ListenSettings())
    with pytest.raises(ConfigError, match="no prefill server"):
        Proxy(config, [], [one])
    with pytest.raises(ConfigError, match="named twice"):
        Proxy(config, [one], [one, one])


def test_it_imports_no_engine() -> None:
    program = (
        "import sys, prefixkv.proxy.server; "
        "sys.exit(next((n for n in sys.modules if n.startswith('prefixkv.engines')), None) or "
        "('torch' in sys.modules and 'torch'))"
    )
    assert run_python(program).returncode == 0


TRACE = 'Traceback (most recent call last):\n  File "/srv/engine/core.py", line 7\nat 10.1.2.3:8000'


@played()
async def test_what_goes_wrong_on_a_server_is_not_told_to_a_client(stage: Stage) -> None:
    said = [
        Response(TRACE, 500), json_response({"error": {"message": TRACE}}, 500),
        json_response({"error": {"message": TRACE}}, 400),
        json_response({"error": {"message": "wrong key sk-1"}}, 401),
    ]  # fmt: skip
    for wrong in said:

        async def say(engine: Engine, body: dict[str, Any], wrong: Response = wrong) -> Response:
            return wrong

        stage.decode[0].say = say
        for prompt in ("hello", ["one", "two"]):
            answer = await stage.complete(prompt)
            assert answer.status_code >= 400
            told = answer.json()["error"]["message"]
            assert "(request " in told
            for inner in ("Traceback", "core.py", "10.1.2.3", "127.0.0.1", "http://", "sk-1"):
                assert inner not in told


STREAM = b'data: {"id": "a"}\n\ndata: {"id": "b", "usage": null}\n\ndata: [DONE]\n\n'


async def pieces(stream: bytes, size: int, *, breaks: bool) -> AsyncGenerator[bytes, None]:
    for at in range(0, len(stream), size):
        yield stream[at : at + size]
    if breaks:
        raise ConnectionError


async def passed_on(stream: bytes, size: int, *, breaks: bool, cached: int | None) -> bytes:
    out, later = b"", pieces(stream, size, breaks=breaks)
    try:
        async for events in whole_events(await anext(later, b""), later):
            out += retold_events(events, cached)[0]
    except ConnectionError:
        assert breaks
    return out


@pytest.mark.parametrize("cached", [None, 3])
@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_what_breaks_off_is_passed_on_in_whole_events(
    end: bytes, size: int, cached: int | None
) -> None:
    """An error can be said behind it. A stream that ends is passed on whole."""
    stream = STREAM.replace(b"\n", end)
    ends = [found.end() for found in re.finditer(end * 2, stream)]
    for cut in range(len(stream) + 1):
        begun = stream[:cut]
        out = asyncio.run(passed_on(begun, size, breaks=True, cached=cached))
        assert out == stream[: max([0, *(end for end in ends if end <= cut)])]
        assert asyncio.run(passed_on(begun, size, breaks=False, cached=cached)) == begun


def test_prompts_are_told_apart_whatever_blanks_stand_before_them() -> None:
    """Several with one room would be computed by the two servers as one."""
    for first, second in ((b'"a"', b'"b"'), (b"[1]", b"[2]")):
        blanks = b"\n" + b" " * 100
        several = msgspec.Raw(b"[" + blanks + first + b"," + second + b"]")
        assert [*map(bytes, prompts_of(several))] == [first, second]
    for one in (b'"[\\"a"', b"[]", b"[1, 2]"):
        assert prompts_of(msgspec.Raw(one)) == [msgspec.Raw(one)]
