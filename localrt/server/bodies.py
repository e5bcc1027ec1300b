"""Turn a request's bytes into checked fields: size, time, JSON, and the fields' schema.

An error is one sentence that names the field. The meaning of fields is unknown here.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from localrt.common import files
from localrt.common.formatting import paired
from localrt.server.errors import ApiError, invalid
from localrt.server.options import ServeOptions
from localrt.server.request_schema import RequestSchema

_SMALL = 64 << 10


class BodyRoom:
    """Limits the total bytes of incoming bodies, ``taken``; small ones always have room."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0

    def take(self, nbytes: int) -> None:
        """Add bytes of a large body, or if negative, release them.

        Raises:
            ApiError: 503, there is no room; nothing was added.
        """
        if nbytes > 0 and self.taken + nbytes > self._most:
            raise ApiError(
                503,
                "too many large requests arrive at once: try again later",
                code="overloaded",
                headers={"Connection": "close", "Retry-After": "1"},
            )
        self.taken += nbytes


async def read_fields(
    request: Request, schema: RequestSchema, options: ServeOptions, room: BodyRoom
) -> dict[str, Any]:
    """Return the body of ``request`` as fields that follow ``schema``.

    Raises:
        ApiError: 400, 408, 413, 415 or 503, with the field concerned.
        ClientDisconnect: the client has disconnected.
    """
    taken = 0

    def grow(size: int) -> None:
        nonlocal taken
        more = max(0, size - _SMALL) - taken
        room.take(more)
        taken += more

    try:
        body = await _read(request, options, grow)
        # Large bodies take time to parse, and other requests should not wait for that.
        return await asyncio.to_thread(lambda: schema.check(parse_json(body)))
    finally:
        room.take(-taken)


async def _read(request: Request, options: ServeOptions, grow: Callable[[int], None]) -> bytes:
    limit = options.max_body
    too_large = ApiError(
        413,
        f"the request is larger than {limit} bytes: send less, or start the server with a larger "
        "--max-body",
        headers={"Connection": "close"},
    )
    if int(request.headers.get("content-length") or 0) > limit:
        raise too_large
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise ApiError(415, f"the body is sent as {encoding[:40]!r}: send it without compression")
    parts, size = [], 0
    try:
        async with asyncio.timeout(options.read_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large
                grow(size)
                parts.append(part)
    except TimeoutError as error:
        raise ApiError(
            408,
            f"the request did not arrive within {options.read_timeout_s:g} s",
            headers={"Connection": "close"},
        ) from error
    if not size and await request.is_disconnected():
        raise ClientDisconnect
    return b"".join(parts)


def parse_json(data: bytes) -> object:
    """Parse JSON.

    Raises:
        ApiError: 400, it is not JSON, or has too many values.
    """
    if not data:
        raise invalid("the body is empty: send JSON")
    try:
        text = data.decode("utf-8-sig")
        value = files.parse_json(text, parse_constant=_no_constant, parse_float=_finite)
        # An unpaired surrogate such as \ud83d: no tokenizer accepts it.
        return _whole_characters(value) if b"\\u" in data else value
    except UnicodeDecodeError as error:
        wrong = f"byte 0x{error.object[error.start]:02x}"
        raise invalid(f"the body is not UTF-8: {wrong}. Send JSON in UTF-8") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise invalid(f"the body is not JSON: {error.msg} at {where}") from error
    except ValueError as error:
        raise invalid(f"the body is not JSON that can be read: {error}") from error


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    """Return the number, or the largest one instead of infinity, which JSON cannot represent."""
    value = float(digits)
    return math.copysign(sys.float_info.max, value) if math.isinf(value) else value


def _whole_characters(value: object) -> object:
    if isinstance(value, str):
        return paired(value)
    if isinstance(value, list):
        return [_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {_whole_characters(name): _whole_characters(item) for name, item in value.items()}
    return value
