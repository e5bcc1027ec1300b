"""Parse the responses of a server with OpenAI's protocol: streams, refusals, lists of models.

It turns bytes and JSON into text, tool calls, token counts and one-line errors. It knows no
connection.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, cast

from localrt.chat_format.thinking import CLOSE, OPEN
from localrt.client.servers import Address
from localrt.common.errors import ContextOverflowError, LocalrtError
from localrt.common.files import parse_json
from localrt.common.formatting import one_line
from localrt.common.option_names import option
from localrt.engine.types import FinishReason, Metrics, ToolCall

_SHORTEST_S = 0.05  # pieces that come faster arrived together: no rate can be measured
_LONGEST_EVENT = 16 << 20
_LONGEST_ANSWER = 256 << 20  # of all events, a million tokens
_NO_PROTOCOL = "does not speak OpenAI's protocol: is the address right? It often ends in /v1"


# -- streams -------------------------------------------------------------------------------------


def events(pieces: Iterable[bytes], address: Address) -> Iterator[dict[str, Any] | None]:
    """Yield the JSON objects of a stream of server-sent events, and None for its final ``[DONE]``.

    Raises:
        LocalrtError: the response is not such a stream.
    """
    data: list[bytes] = []
    nbytes = 0
    for line in _lines(pieces, address):
        nbytes = nbytes + len(line) if line else 0
        if nbytes > _LONGEST_EVENT:
            raise LocalrtError(f"{address.origin} {_NO_PROTOCOL}")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            text, data = b"\n".join(data), []
            if text.strip() == b"[DONE]":
                yield None
                return
            yield _object(text, address)
    if data == [b"[DONE]"]:  # only its final empty line is missing; other data may be cut short
        yield None


def _lines(pieces: Iterable[bytes], address: Address) -> Iterator[bytes]:
    """Yield lines without their ends; the last one need not have an end."""
    rest, nbytes = bytearray(), 0
    for piece in pieces:
        start = len(rest)
        rest += piece
        nbytes += len(piece)
        if nbytes > _LONGEST_ANSWER:
            raise LocalrtError(f"the answer of {address.origin} has no end: what came is kept")
        if b"\n" in piece:
            *lines, last = bytes(rest).split(b"\n")
            yield from (line.removesuffix(b"\r") for line in lines)
            rest = bytearray(last)
        elif start > _LONGEST_EVENT:
            raise LocalrtError(f"{address.origin} {_NO_PROTOCOL}")
    yield bytes(rest).removesuffix(b"\r")


def _object(text: bytes, address: Address) -> dict[str, object]:
    try:
        found = parse_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise LocalrtError(f"{address.origin} {_NO_PROTOCOL}")
    return found


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class AnswerReader:
    """Reads the events of one answer. ``estimate``: the prompt's tokens, until the server says.

    Pieces are counted as tokens until the server sends the number. Thinking in a field of its own
    becomes ``<think>...</think>`` in the text.
    """

    address: Address
    estimate: int
    reason: FinishReason | None = None
    told_reason: str | None = None
    _began: float = field(default_factory=time.monotonic)
    _first: float | None = None
    _last: float | None = None
    _pieces: int = 0
    _usage: Mapping[str, object] | None = None
    _thinking: bool = False
    _calls: dict[int, _Call] = field(default_factory=dict)

    def push(self, event: Mapping[str, object]) -> str:
        """Return the new text of an event.

        Raises:
            LocalrtError: it reports a failure, or is not an event of this protocol.
        """
        if event.get("error") or event.get("object") == "error":
            raise refusal(self.address, 200, {}, json.dumps(event).encode())
        usage, choices = event.get("usage"), event.get("choices")
        if isinstance(usage, Mapping):
            self._usage = usage
        if not isinstance(choices, list):
            if usage is None and "choices" not in event:
                raise LocalrtError(f"{self.address.origin} {_NO_PROTOCOL}")
            return ""
        choice = _mapping(choices[0] if choices else None)
        delta = _mapping(choice.get("delta"))
        text = self._text(delta)
        calls = delta.get("tool_calls")
        for index, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, Mapping):
                self._take_call(index, call)
        if text or calls:
            self._last = time.monotonic()
            self._first = self._last if self._first is None else self._first
            self._pieces += 1
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason:
            self.told_reason = reason
            known = reason if reason in ("stop", "length", "tool_calls") else "stop"
            self.reason = cast("FinishReason", known)
        return text

    def end(self) -> str:
        """Return the rest of the text when the answer has ended."""
        ended, self._thinking = self._thinking, False
        return f"\n{CLOSE}" if ended else ""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the answer."""
        found = (call for _, call in sorted(self._calls.items()))
        return tuple(
            ToolCall(call.id or f"call_{index}", call.name, call.arguments or "{}")
            for index, call in enumerate(found)
            if call.name
        )

    @property
    def metrics(self) -> Metrics:
        """Return the metrics known so far."""
        usage = self._usage or {}
        cached = _mapping(usage.get("prompt_tokens_details")).get("cached_tokens")
        details = _mapping(usage.get("completion_tokens_details"))
        count = _count(usage.get("completion_tokens"), self._pieces)
        found = Metrics(
            prompt_tokens=_count(usage.get("prompt_tokens"), self.estimate),
            cached_tokens=_count(cached, 0),
            completion_tokens=count,
            thinking_tokens=_count(details.get("reasoning_tokens"), 0),
        )
        if self._first is not None and self._last is not None:
            found.ttft_s = self._first - self._began
            seconds = self._last - self._first
            if count > 1 and seconds >= _SHORTEST_S:
                found.decode_tok_s = (count - 1) / seconds
                found.tpot_s = seconds / (count - 1)
        return found

    def _text(self, delta: Mapping[str, object]) -> str:
        thought = _string(delta, "reasoning", "reasoning_content")
        content = _string(delta, "content")
        text = ""
        if thought:
            text = thought if self._thinking else f"{OPEN}\n{thought}"
            self._thinking = True
        if content and self._thinking:
            text += f"\n{CLOSE}\n\n"
            self._thinking = False
        return text + content

    def _take_call(self, position: int, piece: Mapping[str, object]) -> None:
        call = self._calls.setdefault(_count(piece.get("index"), position), _Call())
        function = _mapping(piece.get("function"))
        call.id = _string(piece, "id") or call.id
        call.name = _string(function, "name") or call.name
        call.arguments += _string(function, "arguments")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _string(value: Mapping[str, object], *names: str) -> str:
    """Return the first of these entries that is a string, or ""."""
    return next((text for name in names if isinstance(text := value.get(name), str)), "")


def _count(value: Any, otherwise: int) -> int:
    usable = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return int(value) if usable else otherwise


# -- models --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model of a server, and its context in tokens; 0 if the server does not say.

    ``state``, ``ram`` in bytes, ``unload_s`` and ``sees`` come from localrt's own server: see
    ``localrt.server.models.ModelEntry``. Other servers refuse pictures themselves. ``tools``: the
    model's chat template shows it tools.
    """

    name: str
    ctx: int
    state: str = ""
    ram: int = 0
    unload_s: float | None = None
    sees: bool = True
    tools: bool = True


def listed_models(body: bytes, address: Address) -> list[ListedModel]:
    """Return the models of a ``GET /models`` response.

    Raises:
        LocalrtError: it is not such a list.
    """
    data = _object(body, address).get("data")
    if not isinstance(data, list):
        raise LocalrtError(f"{address.origin} {_NO_PROTOCOL}")
    entries = [entry for entry in map(_mapping, data) if _string(entry, "id")]
    return [_listed(entry) for entry in entries]


def _listed(entry: Mapping[str, object]) -> ListedModel:
    status = _mapping(entry.get("status"))
    unload_s, told = status.get("unload_s"), entry.get("capabilities")
    told = told if entry.get("owned_by") == "localrt" else None
    return ListedModel(
        _string(entry, "id"),
        _context(entry),
        _string(status, "value"),
        _count(status.get("ram"), 0),
        float(unload_s) if isinstance(unload_s, int | float) else None,
        "vision" in told if isinstance(told, list) else True,
        "tools" in told if isinstance(told, list) else True,
    )


def _context(entry: Mapping[str, object]) -> int:
    names = ("max_model_len", "context_length", "context_window")
    return next((count for name in names if (count := _count(entry.get(name), 0))), 0)


# -- refusals ------------------------------------------------------------------------------------


def refusal(address: Address, status: int, headers: Mapping[str, str], body: bytes) -> LocalrtError:
    """Return the error for a refusal or failure, with advice; ``headers`` are in lower case."""
    why, code = _told(body)
    why = address.hide(why)
    origin = address.origin
    because = f": {why}" if why else ""
    if code == "context_length_exceeded" or "maximum context length" in why:
        return ContextOverflowError(f"the conversation is too long for the server{because}")
    if status == 200 and why:
        return LocalrtError(f"{origin} failed{because}")
    if status in (401, 403) and address.key is None:
        return LocalrtError(
            f"{origin} wants an API key ({status}{because}): give {option('api_key')}, or set "
            "OPENAI_API_KEY"
        )
    if status in (401, 403):
        return LocalrtError(f"{origin} refuses the API key ({status}{because}): give another")
    if status in (404, 405):
        return LocalrtError(
            f"{origin} has no such thing ({status}{because}): check the model's name, and the "
            "address, which often ends in /v1"
        )
    if status == 429 or (status == 503 and "retry-after" in headers):
        later = _when(headers.get("retry-after", "").strip())
        return LocalrtError(f"{origin} is busy ({status}{because}): {later}")
    if status >= 500:
        return LocalrtError(f"{origin} failed ({status}{because}): try again, or see its log")
    if 300 <= status < 400 or not why:
        return LocalrtError(f"{origin} {_NO_PROTOCOL} ({status})")
    return LocalrtError(f"{origin} refused the request ({status}{because})")


def _told(body: bytes) -> tuple[str, str]:
    """Return an error's message and code, or empty strings if it is not JSON."""
    try:
        found = parse_json(body)
    except ValueError:
        return "", ""
    error = _mapping(found)
    error = error.get("error", error)
    if isinstance(error, str):
        return one_line(error), ""
    error = _mapping(error)
    message = one_line(_string(error, "message", "detail"))
    return message.rstrip("."), str(error.get("code") or "")


def _when(after: str) -> str:
    seconds: float | None = None
    if after.isascii() and after.isdigit():
        seconds = float(after[:9])
    elif after:
        try:
            seconds = parsedate_to_datetime(after).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            pass
    return "try again later" if seconds is None else f"try again in {max(1, round(seconds))} s"
