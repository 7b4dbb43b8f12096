"""The chat page: one file, `chat.html`, that loads nothing else.

What it may do is said in its headers: its own script and style, by their digests, and requests to
the server that it came from.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FILE: Final = "chat.html"


def page_route(path: str = "/") -> Route:
    """The page, at `path`. It holds nothing that a key would have to guard."""
    page = resources.files(__package__).joinpath(_FILE).read_bytes()
    headers = {
        "content-security-policy": _policy(page),
        "cache-control": "no-cache",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    async def show(_: Request) -> Response:
        return Response(page, headers=headers, media_type="text/html")

    return Route(path, show, methods=["GET"])


def _policy(page: bytes) -> str:
    """A Content-Security-Policy under which the page's own script and style alone count."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_digests(page, b'script')}",
            f"style-src {_digests(page, b'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        ]
    )


def _digests(page: bytes, tag: bytes) -> str:
    found = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(one).digest()).decode() for one in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
