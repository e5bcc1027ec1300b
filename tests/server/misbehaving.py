"""Requests of clients that leave, stall, half-close, lie or behave, at random.

What they return is what a server must not answer to anybody.
"""

from __future__ import annotations

import base64
import json
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.documents.samples import pdf
from tests.server.conftest import Running, connected
from tests.server.dialects import BODIES, colours, data_uri
from tests.server.test_media import png

_WAITING = ("says nothing", "half a head", "half a body", "does not read")
Wait = Callable[[float], Any]
WAYS = ("reads", "page", "leaves", "resets", "half-closes", "lies", "bad JSON", *_WAITING)
_WRONG = (7, None, True, {}, [], "x", -1e9, [[]], {"type": "x"})


def asked(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A request like no other, maybe with a picture, a document or a schema: its path, its body."""
    text, chat = f"{rng.getrandbits(64)} and so on " * rng.randint(1, 20), "/v1/chat/completions"
    image, paper = png(f"#{rng.getrandbits(24):06x}"), pdf(text)
    picture, paper = (base64.b64encode(data).decode() for data in (image, paper))
    file = {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{paper}"}
    seen = [{"type": "image_url", "image_url": {"url": data_uri(picture)}}]
    form = {"name": "c", "schema": colours(text, "blue")}
    kinds: list[tuple[str, dict[str, Any]]] = [
        (chat, {"messages": [{"role": "user", "content": seen}]}),
        (chat, {"messages": [{"role": "user", "content": [{"type": "file", "file": file}]}]}),
        (chat, {"response_format": {"type": "json_schema", "json_schema": form}}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", **form}}}),
        ("/api/chat", {"format": form["schema"]}),
        ("/api/generate", {"images": [picture]}),
    ]
    path, more = rng.choice([*kinds, *((path, {}) for path in BODIES)])
    fields = json.loads(json.dumps(BODIES[path]).replace('"hi"', json.dumps(text)))
    return path, {**fields, **more, "stream": rng.random() < 0.5}


def visit(way: str, rng: random.Random, port: int, wait: Wait = time.sleep, most: float = 0) -> str:
    """A request in one of the ``WAYS``, in about ``most`` seconds; what must not be, or ""."""
    (path, fields), received, more = asked(rng), b"", 0
    if way == "lies":
        fields[rng.choice([*fields])], more = rng.choice(_WRONG), rng.choice((0, -3, 3))
    body = json.dumps(fields).encode()
    body = body[: rng.randrange(len(body))] if way == "bad JSON" else body
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    sent = f"{head}Content-Length: {len(body) + more}\r\n\r\n".encode() + body
    cut = {"says nothing": 0, "half a head": rng.randrange(1, 60), "half a body": -5}.get(way)
    with suppress(ConnectionError), connected(port, sent[:cut]) as raw:
        if way == "resets":
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, *[0] * 7]))
        if way in ("leaves", "resets", *_WAITING):
            wait(rng.uniform(0, most if way in _WAITING else 0.5))
            return ""
        if way == "half-closes" or more > 0:
            raw.shutdown(socket.SHUT_WR)
        while piece := raw.recv(1 << 16):
            received += piece
    status = int(received[9:12] or 0)
    bad = status >= 500 and status != 503
    bad |= way == "reads" and (status not in (200, 429) or b"_error" in received)
    return f"{path}: {received[:400]!r}" if bad else ""


def page(rng: random.Random, port: int) -> str:
    """What the chat page does: a conversation, an answer, followed or stopped, and all deleted."""
    request = Running(None, None, port, None).request
    kept = f"/v1/conversations/{request('POST', '/v1/conversations', {})[1]['id']}"
    request("POST", f"{kept}/items", {"content": [{"text": f"{rng.getrandbits(64)}"}]})
    answer = f"{kept}/answers/{request('POST', f'{kept}/answers', {})[1]['id']}"
    with connected(port, f"GET {answer} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()) as raw:
        raw.recv(rng.choice((1, 1 << 16)))
    if rng.random() < 0.5:
        request("POST", f"{answer}/cancel", {})
    status, told, _ = request("DELETE", kept)
    return "" if status == 200 else f"{told}"
