"""uvicorn's HTTP/1.1, which also refuses lines that end without a carriage return.

A proxy may read such a head differently, and a request could hide behind another (request
smuggling). Endpoints do not see how a line ended. What headers show, ``guard`` refuses.
"""

from __future__ import annotations

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["StrictHttp"]


class StrictHttp(H11Protocol):
    """A connection whose heads and trailers are strict HTTP/1.1."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn: h11.Connection = _StrictConnection(
            h11.SERVER, self.config.h11_max_incomplete_event_size or 16 << 10
        )


class _StrictConnection(h11.Connection):
    def next_event(self) -> Any:
        """See h11."""
        before = self.trailing_data[0]
        event = super().next_event()
        if isinstance(event, h11.Request | h11.EndOfMessage):
            read = before[: len(before) - len(self.trailing_data[0])]
            if read.count(b"\n") != read.count(b"\r\n"):
                raise h11.RemoteProtocolError("a line must end with a carriage return")
        return event
