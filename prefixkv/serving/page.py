"""The chat page: `chat.html` with its script and its style. Its headers restrict it: only what the
server sends runs, and requests go only to that server."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

_FILES: Final = {"/": "chat.html", "/chat.js": "chat.js", "/chat.css": "chat.css"}
PAGE_PATHS: Final = tuple(_FILES)
"""Paths of the page. They hold nothing secret, so they need no key."""

_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
}


def page_routes() -> list[Route]:
    return [Route(path, _show, methods=["GET"]) for path in PAGE_PATHS]


async def _show(request: Request) -> Response:
    return FileResponse(Path(__file__).with_name(_FILES[request.url.path]), headers=_HEADERS)
