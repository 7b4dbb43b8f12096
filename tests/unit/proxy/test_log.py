"""The request log of a proxy, and what it refuses itself, over real sockets."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from starlette.responses import Response

from prefixkv.serving.http import ApiError, Stream, json_response
from tests.support.processes import lines_of
from tests.support.scenes import until
from tests.unit.proxy.test_server import Engine, Stage, never, refusing, run, well

USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 32},
}


async def counts(engine: Engine, body: dict[str, Any]) -> Response:
    return json_response({"usage": USAGE})


def test_both_servers_get_the_id_of_the_line(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        answer = await stage.client.post(
            "/v1/completions", json={"prompt": "hello"}, headers={"x-request-id": "mine"}
        )
        assert answer.headers["x-request-id"] == "mine"
        assert answer.json()["usage"]["completion_tokens"] == 3
        names.extend([stage.decode[0].at.url, stage.prefill[0].at.url])
        ids.extend([*stage.decode[0].ids, *stage.prefill[0].ids])

    prefill_asked = asyncio.Event()

    async def prefill(engine: Engine, body: dict[str, Any]) -> Response:
        prefill_asked.set()
        return await counts(engine, body)

    async def decode(engine: Engine, body: dict[str, Any]) -> Response:
        await prefill_asked.wait()
        if len(engine.asked) == 1:
            raise ApiError(500, "once")
        return await counts(engine, body)

    names: list[str] = []
    ids: list[str] = []
    log = tmp_path / "log"
    run(scene, [prefill], [decode], request_log=str(log))
    (line,) = lines_of(log)
    assert line["id"]
    # An attempt that failed on decode, then one that did not.
    assert {one.partition("#")[0] for one in ids} == {line["id"]}
    assert line["id"].startswith("mine-")
    assert {one.partition("#")[2] for one in ids} == {"1.decode", "1.prefill", "2.decode"}
    assert (line["outcome"], line["status"], line["attempts"]) == ("finished", 200, 2)
    assert (line["prompt_tokens"], line["output_tokens"], line["decode_hit_tokens"]) == (40, 3, 32)
    assert [line["decode"], line["prefill"]] == [names[0], None], "the last attempt had no prefill"
    assert line["request_id"] == "mine"
    assert 0 <= line["asked_s"] <= line["first_token_s"] <= line["ended_s"]


def test_the_line_of_a_stream_has_the_counts_of_its_last_usage(tmp_path: Path) -> None:
    """As vLLM sends it: null in each event but those that were asked to report. A text may have any
    words; what was reported before a client left is written down."""

    def reports(num_output: int) -> dict[str, Any]:
        return {**USAGE, "completion_tokens": num_output}

    async def streamed(engine: Engine, body: dict[str, Any]) -> Response:
        text = {"choices": [{"text": '"prompt_tokens": 9'}]}
        told: list[dict[str, Any]] = {
            "last": [{**text, "usage": None}, {"choices": [], "usage": reports(3)}],
            "each": [{**text, "usage": reports(1)}, {**text, "usage": reports(2)}],
            "none": [text, text],
            "left": [{**text, "usage": reports(1)}],
        }[body["prompt"]]

        async def pieces() -> AsyncGenerator[bytes, None]:
            for event in told:
                data = f"data: {json.dumps(event)}\n\n".encode()
                yield data[:9]
                yield data[9:]
            if body["prompt"] == "left":
                await asyncio.Event().wait()
            yield b"data: [DONE]\n\n"

        return Stream(pieces(), "text/event-stream")

    async def scene(stage: Stage) -> None:
        for prompt in ("last", "each", "none"):
            await stage.complete(prompt, stream=True)
        body = {"prompt": "left", "stream": True}
        async with stage.client.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_raw())

    log = tmp_path / "log"
    run(scene, [never], [streamed], request_log=str(log))
    names = ("outcome", "prompt_tokens", "output_tokens", "decode_hit_tokens")
    assert [tuple(line.get(name) for name in names) for line in lines_of(log)] == [
        ("finished", 40, 3, 32), ("finished", 40, 2, 32), ("finished", None, None, None),
        ("aborted", 40, 1, 32),
    ]  # fmt: skip


def test_what_is_refused_and_what_is_left_has_a_line(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        assert (await stage.client.get("/v1/nothing")).status_code == 401
        stage.client.headers["authorization"] = "Bearer key"
        assert (await stage.client.get("/v1/nothing")).status_code == 404
        assert (await stage.client.post("/v1/completions", json={})).status_code == 400
        assert (await stage.complete("a")).status_code == 422
        for status, reason in (
            (401, "invalid_api_key"), (404, "not_found"), (400, "invalid_value"), (422, "server"),
        ):  # fmt: skip
            labels = f'reason="{reason}",status="{status}"'
            assert await stage.counter(f"prefixkv_proxy_refused_total{{{labels}}}") == 1
        stage.decode[0].say = never
        asking = asyncio.create_task(stage.complete("b"))
        await until(lambda: stage.decode[0].under_way)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking

    log = tmp_path / "log"
    run(scene, [well], [refusing(422)], api_key="key", request_log=str(log))
    found = [(line["outcome"], line["status"], line["reason"]) for line in lines_of(log)]
    assert found[:4] == [
        ("refused", 401, "invalid_api_key"), ("refused", 404, "not_found"),
        ("refused", 400, "invalid_value"), ("refused", 422, "server"),
    ]  # fmt: skip
    assert [one[0] for one in found[4:]] == ["aborted"]
