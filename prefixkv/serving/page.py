"""The chat page: one file, `chat.html`, that loads nothing else.

Its headers restrict it: only its own script and style run, by their digests, and requests go only
to the server that it came from.
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
    """Return the HTTP route of the chat page. It holds nothing secret, so it needs no key."""
    # Read once: the policy's digests are of these bytes, whatever happens to the file later.
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
    """Return a Content-Security-Policy that allows only the chat page's own script and style."""
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
    """Return the digests of the chat page's `<tag>` elements, as the policy lists them."""
    # A digest covers the element's exact bytes: read from the served file, the two cannot differ.
    found = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(one).digest()).decode() for one in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
