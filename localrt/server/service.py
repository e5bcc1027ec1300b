"""A running server: its models, its limits, its metrics, and stored responses.

Responses of the last hour stay in memory, so that the next request can refer to them by id.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

from starlette.requests import Request

from localrt.documents.reading import DocumentCache
from localrt.offload.memory import current_rss
from localrt.server.bodies import BodyRoom, read_fields
from localrt.server.errors import ApiError, to_json
from localrt.server.models import Models, Offered, ServedModel
from localrt.server.options import ServeOptions

_MOST = 1000
_MOST_BYTES = 64 << 20
_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored ``response`` as sent to its client, and all ``items`` that it answers.

    ``nbytes`` is its approximate size, ``since`` the time when it was stored.
    """

    response: dict[str, object]
    items: Sequence[dict[str, object]]
    nbytes: int
    since: float

    def conversation(self) -> list[dict[str, object]]:
        """Return all items, up to the end of the response."""
        return [*self.items, *cast("list[dict[str, object]]", self.response.get("output", ()))]


class ResponseStore:
    """Stored responses, limited in number, bytes and age; the oldest are dropped first. For one
    event loop.
    """

    def __init__(
        self,
        *,
        most: int = _MOST,
        most_bytes: int = _MOST_BYTES,
        seconds: float = _SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._most_bytes, self._seconds = most, most_bytes, seconds
        self._now = now
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._items: dict[str, tuple[str, dict[str, object]]] = {}  # by item id: last response
        self._nbytes = 0

    def put(self, response: dict[str, object], items: Sequence[dict[str, object]]) -> None:
        """Store a response to ``items`` under its ``id``."""
        nbytes, name = len(to_json([response, items])), str(response["id"])
        self._kept[name] = stored = Stored(response, items, nbytes, self._now())
        self._items |= {str(item["id"]): (name, item) for item in stored.conversation()}
        self._nbytes += nbytes
        self._make_room()

    def get(self, name: str) -> Stored | None:
        """Return the response with this id, if it is still stored."""
        self._make_room()
        return self._kept.get(name)

    def item(self, name: str) -> dict[str, object] | None:
        """Return the item with this id, from a stored response."""
        self._make_room()
        return self._items.get(name, ("", None))[1]

    def remove(self, name: str) -> None:
        """Remove the response with this id."""
        stored = self._kept.pop(name)
        self._nbytes -= stored.nbytes
        for item in stored.conversation():
            if self._items.get(str(item["id"]), ("",))[0] == name:
                del self._items[str(item["id"])]

    def _make_room(self) -> None:
        while self._kept:
            oldest = next(iter(self._kept))
            full = len(self._kept) > self._most or self._nbytes > self._most_bytes
            if not full and self._now() - self._kept[oldest].since <= self._seconds:
                break
            self.remove(oldest)


_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counters and histograms. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[Labels, float]] = {}
        self._times: dict[str, list[float]] = {}  # counts of buckets, sum, count

    def count(self, name: str, by: float = 1, **labels: str) -> None:
        """Add to a counter."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            series = self._counts.setdefault(name, {})
            series[key] = series.get(key, 0) + by

    def observe(self, name: str, seconds: float) -> None:
        """Add a duration to a histogram."""
        with self._lock:
            row = self._times.setdefault(name, [0.0] * (len(_BUCKETS) + 2))
            place = bisect_left(_BUCKETS, seconds)
            if place < len(_BUCKETS):
                row[place] += 1
            row[-2] += seconds
            row[-1] += 1

    def mean(self, name: str) -> float | None:
        """Return the mean of a histogram's durations; None if it is empty."""
        with self._lock:
            row = self._times.get(name)
            return row[-2] / row[-1] if row else None

    def lines(self, help_texts: Mapping[str, str]) -> Iterator[str]:
        """Yield all metrics as text; every name needs a help text."""
        with self._lock:
            counts = {name: dict(series) for name, series in self._counts.items()}
            times = {name: list(row) for name, row in self._times.items()}
        for name, series in counts.items():
            yield from render(name, "counter", help_texts[name], list(series.items()))
        for name, row in times.items():
            yield from _histogram(name, help_texts[name], row)


def render(
    name: str, kind: str, help_text: str, series: Sequence[tuple[Labels, float]]
) -> Iterator[str]:
    """Yield one metric with its values by label."""
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in series:
        yield f"{name}{_spelled(labels)} {_number(value)}"


def _histogram(name: str, help_text: str, row: Sequence[float]) -> Iterator[str]:
    bounds = [*(f"{bound:g}" for bound in _BUCKETS), "+Inf"]
    counts = [*accumulate(row[: len(_BUCKETS)]), row[-1]]
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} histogram"
    for bound, count in zip(bounds, counts, strict=True):
        yield f'{name}_bucket{{le="{bound}"}} {_number(count)}'
    yield f"{name}_sum {_number(row[-2])}"
    yield f"{name}_count {_number(row[-1])}"


def _spelled(labels: Labels) -> str:
    # JSON escapes the characters that Prometheus requires, in the same way.
    pairs = [f"{name}={json.dumps(value)}" for name, value in labels]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"


_BODIES = 8  # large bodies that may arrive at once
_LONGEST_RETRY_S = 60
_MOST_NOTES = 256  # kinds of notes; limited, since clients determine some of them
_HELP = {
    "localrt_http_requests_total": "Requests, by path and status.",
    "localrt_http_request_seconds": "Time from a request to the end of its answer.",
    "localrt_time_to_first_token_seconds": "Time from a request to its first token.",
    "localrt_rejected_requests_total": "Requests that were told to come back later.",
    "localrt_cancelled_requests_total": "Answers that nobody waited for any more.",
}


class Service:
    """The models of a server, and its counts. ``note`` is called with lines for the log."""

    def __init__(
        self, models: Models, options: ServeOptions, note: Callable[[str], None] | None = None
    ) -> None:
        self.models = models
        self.options = options
        self.metrics = Metrics()
        self.bodies = BodyRoom(_BODIES * options.max_body)
        self.seeing = asyncio.Lock()  # one at a time: a decoded picture takes hundreds of megabytes
        self.documents = DocumentCache()  # for who holds ``seeing``
        self.responses = ResponseStore()
        self.downloads = asyncio.Lock()  # one at a time: each occupies one of a few threads
        self.open_requests = 0
        self.started = int(time.time())
        self.draining = False  # new requests are refused; running ones may finish
        self.stopping = False
        self.open_answers = 0  # running or queued answers
        self._note = note
        self._noted: set[str] = set()

    def note_once(self, kind: str, text: str) -> None:
        """Log ``text`` if it is the first of its ``kind``."""
        if self._note is None or kind in self._noted or len(self._noted) >= _MOST_NOTES:
            return
        self._noted.add(kind)
        with suppress(OSError):  # the log's reader is gone
            self._note(text.encode("unicode_escape").decode()[:300])

    def stop(self) -> None:
        """End every answer, and start no new ones."""
        self.stopping = True
        for served in self.models.at_work():
            served.live.cancel_all()

    @contextmanager
    def admitted(self, count: int = 1) -> Iterator[None]:
        """Reserve room for ``count`` more answers, running or queued.

        Raises:
            ApiError: 429, there is no room.
        """
        options = self.options
        most = options.max_running + options.max_queued
        if self.open_answers + count > most:
            self.metrics.count("localrt_rejected_requests_total")
            raise ApiError(
                429,
                f"{self.open_answers} answers are running or queued, and the limit is {most}: try "
                "again later",
                code="overloaded",
                headers={"Retry-After": str(self._retry_after())},
            )
        self.open_answers += count
        try:
            yield
        finally:
            self.open_answers -= count

    def sample(self) -> None:
        """Record the number of tokens so far, and call the models' ``tend``; runs every second."""
        self.models.tend()
        for served in self.models.at_work():
            served.sample()

    def metrics_text(self) -> str:
        """Return all figures in Prometheus' text format."""
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
        """Estimate the seconds until an admitted answer has finished."""
        mean = self.metrics.mean("localrt_http_request_seconds") or 1.0
        return max(1, min(_LONGEST_RETRY_S, round(mean / self.options.max_running)))


def sent_key(headers: Mapping[str, str]) -> str:
    """Return the API key that a client sent, or ""."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return (bearer if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()


# -- reading requests ---------------------------------------------------------------


def service_of(request: Request) -> Service:
    """Return the server that received ``request``."""
    service = request.app.state.service
    assert isinstance(service, Service), "the app was made by create_app"
    return service


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """An HTTP request for a model: its checked ``fields``, and the ``model`` they name."""

    http: Request
    service: Service
    fields: dict[str, Any]
    model: Offered

    @property
    def model_name(self) -> str:
        """The model's name in the answer: the one from the request, if any."""
        return self.fields.get("model") or self.model.name

    @asynccontextmanager
    async def using(self, *, background: bool = False) -> AsyncIterator[ServedModel]:
        """Lend the model, loaded until the block ends: see ``Models``.

        Raises:
            ApiError: 503, the server is stopping.
            LocalrtError: it cannot be loaded.
        """
        async with self.service.models.using(self.model.name, background=background) as served:
            if self.service.stopping:
                raise ApiError(503, "the server is stopping", code="stopping")
            yield served


async def read_request(request: Request, kind: str) -> ModelRequest:
    """Read a request for an existing model, and check its body as a ``kind`` of ``REQUESTS``.

    Raises:
        ApiError: a field is wrong, or there is no such model.
        ClientDisconnect: the client has disconnected.
    """
    service = service_of(request)
    fields = await read_fields(request, kind, service.options, service.bodies)
    return ModelRequest(request, service, fields, service.models.find(fields.get("model")))
