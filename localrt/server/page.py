"""The chat page at ``/``: one HTML file, which asks nobody but this server.

Its parts are in ``web``. The policy that is sent with it allows no other script or style than
these, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from localrt.server.dialect import Endpoint

_SCRIPTS = ("view", "chat", "list", "message", "options", "models", "events")
_PARTS = {"style": ("chat.css",), "script": tuple(f"{name}.js" for name in _SCRIPTS)}


async def page(request: Request) -> Response:
    """The chat page for browsers; Ollama's clients look for a line of text here."""
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse("localrt is running", headers={"Vary": "Accept"})
    html, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept",
    }
    return HTMLResponse(html, headers=headers)


@cache
def _page() -> tuple[str, str]:
    """Return the page and its policy."""
    from importlib.resources import files  # another one

    folder = files("localrt.server") / "web"
    html = (folder / "chat.html").read_text("utf-8")
    policy = "default-src 'none'; img-src data: blob:; connect-src 'self'; base-uri 'none'; "
    policy += "form-action 'none'; frame-ancestors 'none'"
    for tag, names in _PARTS.items():
        text = "".join((folder / name).read_text("utf-8") for name in names)
        html = html.replace(f"<{tag}></{tag}>", f"<{tag}>{text}</{tag}>")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        policy += f"; {tag}-src 'sha256-{digest}'"
    return html, policy


ROUTES = (Endpoint("/", "GET", page),)
