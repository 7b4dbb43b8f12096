"""The chat page: `chat.html` with its script and its style, and nothing else.

Its headers restrict it: only what the server sends runs, and requests go only to that server.
"""

from __future__ import annotations

from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FILES: Final = {
    "/": ("chat.html", "text/html"),
    "/chat.js": ("chat.js", "text/javascript"),
    "/chat.css": ("chat.css", "text/css"),
}
PAGE_PATHS: Final = tuple(_FILES)
"""Paths of the page. They hold nothing secret, so they need no key."""

_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes() -> list[Route]:
    return [_route(path, *file) for path, file in _FILES.items()]


def _route(path: str, name: str, media_type: str) -> Route:
    content = resources.files(__package__).joinpath(name).read_bytes()

    async def show(_: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return Route(path, show, methods=["GET"])
