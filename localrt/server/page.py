"""The chat page at ``/``: one HTML file, which asks nobody but this server.

Its parts are in ``web``. The policy that is sent with it allows no other script or style than
these, by their hashes. Markdown becomes HTML here: whatever a model writes, it is only shown. HTML
in it is text, links lead to the web or to a mail address alone, and a picture is a link.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from localrt.server.dialect import Endpoint

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline

_PARTS = {"style": ("chat.css",), "script": ("view.js", "chat.js", "message.js", "events.js")}
_INSIDE = r"(?:[^\\]|\\[^()[\]])+"
_FORMULA = re.compile(
    rf"\\\({_INSIDE}\\\)|\\\[{_INSIDE}\\\]|\$\$[^$]+\$\$"
    r"|\$(?=[^\s$])[^$\n`]+(?<=\S)\$(?!\d)"  # but no prices
)
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_LINKS = ("http://", "https://", "mailto:")


def to_html(text: str) -> str:
    """Return Markdown as HTML that can be put into a page."""
    html = str(_parser().render(text))  # with `"` in text as an entity
    return html.replace(' style="text-align:', ' class="align-')  # the policy allows no style


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt  # takes a megabyte, and not every server shows answers

    parser = MarkdownIt("commonmark", {"html": False, "breaks": True})
    parser.enable(["strikethrough", "table"]).disable("image")
    parser.inline.ruler.before("escape", "formula", _formula)
    parser.inline.ruler.before("escape", "break", _break)
    parser.validateLink = lambda url: url.lower().startswith(_LINKS)  # type: ignore[method-assign]
    return parser


def _formula(state: StateInline, silent: bool) -> bool:
    """Keep a formula as it is written, without Markdown in it."""
    if (found := _FORMULA.match(state.src, state.pos)) is None:
        return False
    if not silent:
        state.push("text", "", 0).content = found[0]
    state.pos = found.end()
    return True


def _break(state: StateInline, silent: bool) -> bool:
    """Read a ``<br>``, with which models write lines in the cells of tables."""
    if (found := _BREAK.match(state.src, state.pos)) is None:
        return False
    if not silent:
        state.push("hardbreak", "br", 0)
    state.pos = found.end()
    return True


async def page(request: Request) -> Response:
    """The chat page for browsers; Ollama's clients look for a line of text here."""
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse("localrt is running", headers={"Vary": "Accept"})
    html, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
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
