"""A server at work: who may come in, which models they find, and what that adds up to.

It counts, and knows no HTTP: that is the endpoints' business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from localrt.offload.memory.process import current_rss
from localrt.serve.bodies import BodyRoom
from localrt.serve.errors import ApiError
from localrt.serve.metrics import Labels, Metrics, render
from localrt.serve.models import Models
from localrt.serve.options import ServeOptions
from localrt.serve.responses.store import ResponseStore
from localrt.serve.served import ServedModel

__all__ = ["Service"]

_BODIES = 8  # of the largest size, that may come at once
_LONGEST_RETRY_S = 60
_MOST_NOTES = 256  # kinds may have names that clients choose

_HELP = {
    "localrt_http_requests_total": "Requests, by path and status.",
    "localrt_http_request_seconds": "Time from a request to the end of its answer.",
    "localrt_time_to_first_token_seconds": "Time from a request to its first token.",
    "localrt_rejected_requests_total": "Requests that were told to come back later.",
    "localrt_cancelled_requests_total": "Answers that nobody waited for any more.",
}


class Service:
    """The models of a server, and its counts. ``note`` gets lines for the log."""

    def __init__(
        self, models: Models, options: ServeOptions, note: Callable[[str], None] | None = None
    ) -> None:
        self.models = models
        self.options = options
        self.metrics = Metrics()
        self.bodies = BodyRoom(_BODIES * options.max_body)
        self.responses = ResponseStore()
        self.downloads = asyncio.Lock()  # one at a time: each keeps a thread of the server's few
        self.open_requests = 0
        self.started = int(time.time())
        self.stopping = False
        self._inside = 0
        self._note = note
        self._noted: set[str] = set()

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[ServedModel]:
        """The model ``name``, loaded as long as the block runs; None is the first.

        Raises:
            ApiError: 404, there is no such model; 503, the server is stopping.
            LocalrtError: it cannot be loaded.
        """
        async with self.models.using(name) as served:
            if self.stopping:
                raise ApiError(503, "the server is stopping", code="stopping")
            yield served

    def note_once(self, kind: str, text: str) -> None:
        """Log ``text``, the first time that there is something of this ``kind`` to say."""
        if self._note is None or kind in self._noted or len(self._noted) >= _MOST_NOTES:
            return
        self._noted.add(kind)
        with suppress(OSError):  # whoever read the log has gone
            self._note(text.encode("unicode_escape").decode()[:300])

    def stop(self) -> None:
        """Every answer ends, and no new one begins."""
        self.stopping = True
        for served in self.models.at_work():
            served.live.cancel_all()

    @contextmanager
    def admitted(self, count: int = 1) -> Iterator[None]:
        """Room for ``count`` more answers, running or queued.

        Raises:
            ApiError: 429, there is none.
        """
        options = self.options
        most = options.max_running + options.max_queued
        if self._inside + count > most:
            self.metrics.count("localrt_rejected_requests_total")
            raise ApiError(
                429,
                f"{self._inside} answers are running or queued, and {most} are the most: try again "
                "later",
                code="overloaded",
                headers={"Retry-After": str(self._retry_after())},
            )
        self._inside += count
        try:
            yield
        finally:
            self._inside -= count

    def sample(self) -> None:
        """Take note of the tokens so far, and look after the models; called once a second."""
        self.models.tend()
        for served in self.models.at_work():
            served.sample()

    def metrics_text(self) -> str:
        """All numbers, in Prometheus' text format."""
        lines = list(self.metrics.lines(_HELP))
        found: dict[tuple[str, str], list[tuple[Labels, float]]] = {}
        for served in self.models.at_work():
            for name, help_text, value in served.gauges():
                found.setdefault((name, help_text), []).append(((("model", served.name),), value))
        found["process_resident_memory_bytes", "Bytes in RAM."] = [((), current_rss())]
        for (name, help_text), series in found.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += render(name, kind, help_text, series)
        return "\n".join(lines) + "\n"

    def _retry_after(self) -> int:
        """Seconds until about one of those inside has finished."""
        mean = self.metrics.mean("localrt_http_request_seconds") or 1.0
        return max(1, min(_LONGEST_RETRY_S, round(mean / self.options.max_running)))
