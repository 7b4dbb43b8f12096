"""The chat page as it is sent. What it does in a browser: tests/engines/serving."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re

import httpx

from prefixkv.serving.http import make_app
from prefixkv.serving.page import page_route


def page(key: str = "") -> httpx.Response:
    async def main() -> httpx.Response:
        app = httpx.ASGITransport(make_app([page_route()], key, ["/"]))
        async with httpx.AsyncClient(transport=app, base_url="http://localhost") as client:
            return await client.get("/")

    return asyncio.run(main())


def test_it_is_one_file_that_loads_nothing_and_runs_its_own_script_alone() -> None:
    answer = page()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        one.strip().split(" ", 1) for one in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        found = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert len(found) == 1
        digest = base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    outside = re.findall(r"(?:src|href|action)\s*=\s*[\"'](?!data:)|@import|url\(", answer.text)
    assert outside == []
    assert not re.search(r"\son\w+=|\sstyle=", answer.text), "the policy keeps these from working"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_it_says_what_a_grey_bar_is() -> None:
    text = " ".join(re.sub(r"<[^>]+>", "", page().text.partition("<body>")[2]).split())
    assert "Grey is what decode did not have: prefill sent it." in text


def test_it_is_shown_without_a_key() -> None:
    assert page("secret").status_code == 200
