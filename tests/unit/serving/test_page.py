"""The chat page as it is sent. What it does in a browser: tests/integration/serving."""

import asyncio
import re

import httpx
from starlette.routing import Route

from prefixkv.serving.front import PAGE, show_page
from prefixkv.serving.http import App


def page(path: str = "/", key: str = "") -> httpx.Response:
    async def main() -> httpx.Response:
        app = httpx.ASGITransport(App([Route(path, show_page) for path in PAGE], key, PAGE))
        async with httpx.AsyncClient(transport=app, base_url="http://localhost") as client:
            return await client.get(path)

    return asyncio.run(main())


def test_it_loads_its_script_and_its_style_from_its_own_server_alone() -> None:
    answer = page()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        one.strip().split(" ", 1) for one in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == policy["script-src"] == policy["style-src"] == "'self'"
    loaded = re.findall(r"(?:src|href|action)\s*=\s*[\"'](?!data:)([^\"']*)", answer.text)
    assert sorted(loaded) == ["chat.css", "chat.js"]
    assert not re.search(r"\son\w+=|\sstyle=", answer.text), "the policy keeps these from working"
    for name, kind in (("chat.css", "text/css"), ("chat.js", "text/javascript")):
        part = page(f"/{name}")
        assert part.headers["content-type"] == f"{kind}; charset=utf-8"
        assert part.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"@import|url\(|https?://", part.text)
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_it_is_shown_without_a_key() -> None:
    for path in PAGE:
        assert page(path, "secret").status_code == 200
