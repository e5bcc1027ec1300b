"""A running server: its models, limits, counters, and stored responses.

Responses of the last hour stay in memory, so that the next request can refer to them by id.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

from starlette.requests import Request

from localrt.documents.reading import DocumentCache
from localrt.server.bodies import BodyRoom, read_fields
from localrt.server.errors import ApiError, to_json
from localrt.server.models import ModelEntry, Models, ServedModel
from localrt.server.options import ServeOptions
from localrt.server.request_schema import RequestSchema

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

    def _remove(self, name: str) -> None:
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
            self._remove(oldest)


Labels = tuple[tuple[str, str], ...]


def render(name: str, help_text: str, series: Iterable[tuple[Labels, float]]) -> Iterator[str]:
    """Yield one counter in Prometheus' text format, with its values by label."""
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} counter"
    for labels, value in series:
        # JSON escapes the characters that Prometheus requires, in the same way.
        pairs = [f"{label}={json.dumps(text)}" for label, text in labels]
        yield f"{name}{'{' + ','.join(pairs) + '}' if pairs else ''} {int(value)}"


_BODIES = 8  # large bodies that may arrive at once
_LONGEST_RETRY_S = 60
_BLEND = 0.25  # weight of a new duration in the running mean
_MOST_NOTES = 256  # kinds of notes; limited, since clients determine some of them


class Service:
    """The models of a server, and its counts. ``note`` is called with lines for the log."""

    def __init__(
        self, models: Models, options: ServeOptions, note: Callable[[str], None] | None = None
    ) -> None:
        self.models = models
        self.options = options
        self.requests: Counter[Labels] = Counter()  # answered ones, by path and status
        self.answer_s = 0.0  # the mean duration of recent requests for models
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

    def metrics_text(self) -> str:
        """Return the counters in Prometheus' text format."""
        stats = {(("model", one.name),): one.live.stats() for one in self.models.at_work()}
        read = {name: each.prompt_tokens for name, each in stats.items()}
        written = {name: each.completion_tokens for name, each in stats.items()}
        lines = [
            *render("localrt_http_requests_total", "Requests.", self.requests.items()),
            *render("localrt_prompt_tokens_total", "Tokens of prompts.", read.items()),
            *render("localrt_generated_tokens_total", "Tokens of answers.", written.items()),
        ]
        return "\n".join(lines) + "\n"

    def count(self, path: str, status: int, seconds: float | None = None) -> None:
        """Count an answered request, and how long it took if it was one for a model."""
        self.requests[("path", path), ("status", str(status))] += 1
        if seconds is not None:
            self.answer_s += _BLEND * (seconds - self.answer_s)

    def _retry_after(self) -> int:
        """Estimate the seconds until an admitted answer has finished."""
        return max(1, min(_LONGEST_RETRY_S, round(self.answer_s / self.options.max_running)))


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
    model: ModelEntry

    @property
    def model_name(self) -> str:
        """The model's name in the answer: the one from the request, if any."""
        return self.fields.get("model") or self.model.name

    @asynccontextmanager
    async def using(self) -> AsyncIterator[ServedModel]:
        """Lend the model, loaded until the block ends: see ``Models``.

        Raises:
            ApiError: 503, the server is stopping.
            LocalrtError: it cannot be loaded.
        """
        async with self.service.models.using(self.model.name) as served:
            if self.service.stopping:
                raise ApiError(503, "the server is stopping", code="stopping")
            yield served


async def read_request(request: Request, schema: RequestSchema) -> ModelRequest:
    """Read a request for an existing model, and check its body against ``schema``.

    Raises:
        ApiError: a field is wrong, or there is no such model.
        ClientDisconnect: the client has disconnected.
    """
    service = service_of(request)
    fields = await read_fields(request, schema, service.options, service.bodies)
    return ModelRequest(request, service, fields, service.models.find(fields.get("model")))
