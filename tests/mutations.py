"""Mutations: files and JSON documents with bytes and values that nobody meant."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from localrt.common.errors import LocalrtError

MISSING = object()
NUMBERS: list[Any] = [0, -1, 1, 3, 1 << 20, 1 << 31, 1 << 62, 10**400]
NUMBERS += [0.0, -0.0, 0.5, -1.5, 5e-324, 1e-30, 1e29, 1e300, float("nan"), float("inf")]
VALUES = [
    *(MISSING, None, True, False, "", "x", "3", "\ud800"),
    *NUMBERS,
    *([], [None], [0], ["x"], [[]], [1.0] * 6, [0.0] * 6, [float("nan")] * 6, [{}]),
    *({}, {"a": 1}, {"type": "x"}, {"rope_type": []}, {"content": 3}),
]

Path = tuple[str | int, ...]


def paths(document: Any, prefix: Path = ()) -> Iterator[Path]:
    """Every place of a JSON document; of lists and long objects the first two."""
    if isinstance(document, dict):
        keys: list[Any] = list(document) if len(document) < 200 else list(document)[:2]
    else:
        keys = list(range(min(2, len(document)))) if isinstance(document, list) else []
    for key in keys:
        yield (*prefix, key)
        yield from paths(document[key], (*prefix, key))


def changed(document: Any, changes: Sequence[tuple[Path, Any]]) -> Any:
    """A copy with other values at these places; objects are made where a place is in none."""
    result = copy.deepcopy(document)
    for path, value in changes:
        _change(result, path, value if value is MISSING else copy.deepcopy(value))
    return result


def _change(at: Any, path: Path, value: Any) -> None:
    key, *rest = path
    if isinstance(at, dict):
        if rest and not isinstance(at.get(key), dict | list):
            at[key] = {}
    elif not (isinstance(at, list) and isinstance(key, int) and key < len(at)):
        return  # another change made it something else
    if rest:
        _change(at[key], tuple(rest), value)
    elif value is MISSING and isinstance(at, dict):
        at.pop(key, None)
    else:
        at[key] = None if value is MISSING else value


def refusal(use: Callable[[], object]) -> str:
    """What ``use`` is told where it cannot be done, else nothing; another error goes through."""
    try:
        use()
    except LocalrtError as error:
        return str(error)
    return ""


def is_line(text: str) -> bool:
    """Whether ``text`` is one line that a person would read."""
    return "\n" not in text and len(text) < 1000


_NUMBERS = [0, 1, 0x7F, 0xFF, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1]


def mutated(data: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    """``data`` with values of its JSON changed, or bytes cut, replaced and inserted, some of them
    of ``others``. Its first line, which names what the rest is, stays.
    """
    head, _, body = data.partition(b"\n")
    with suppress(ValueError, RecursionError):
        if draw.random() < 0.8:
            return head + b"\n" + _other_values(body, draw, others)
    for _ in range(draw.randint(1, 4)):
        at, other = draw.randrange(len(body) + 1), draw.choice(others).partition(b"\n")[2]
        start = draw.randrange(len(other) + 1)
        number = struct.pack("<Q", draw.choice(_NUMBERS))[: draw.choice((1, 2, 4, 8))]
        many = draw.choice((b"[", b"(", b'{"a":', b"9")) * draw.choice((9, 5000))
        pieces = draw.randbytes(draw.randint(0, 8)), number, other[start : start + 64], many
        piece = draw.choices(pieces, (4, 4, 4, 1))[0]
        body = body[:at] + piece + body[at + draw.choice((0, len(piece), draw.randint(0, 16))) :]
    return head + b"\n" + (body if draw.random() < 0.9 else body[: draw.randrange(len(body) + 1)])


def _parsed(body: bytes) -> tuple[Any, bytes | None]:
    """A JSON document, or the header of a safetensors file and the bytes that follow it."""
    end = 8 + int.from_bytes(body[:8], "little")
    return (json.loads(body[8:end]), body[end:]) if end <= len(body) else (json.loads(body), None)


def _other_values(body: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    """``body`` with values that are odd, or those of another place, and keys of another input."""
    document, tensors = _parsed(body)
    other = document
    with suppress(ValueError, RecursionError):
        other = _parsed(draw.choice(others).partition(b"\n")[2])[0]
    places = [list(paths(each)) for each in (document, other)]
    if not places[0]:
        raise ValueError("has no values")
    changes = []
    for _ in range(draw.randint(1, 2)):
        kind = draw.random()
        place, value = draw.choice(places[0]), draw.choice(VALUES)
        if kind < 0.3 and places[1]:
            source = draw.choice(places[1])
            place, value = draw.choice((place, source)), _at(other, source)
        elif kind < 0.4 and isinstance(_at(document, place), list):
            value = _at(document, place)[::-1]
        changes.append((place, value))
    text = json.dumps(changed(document, changes)).encode()
    return text if tensors is None else struct.pack("<Q", len(text)) + text + tensors


def _at(document: Any, path: Path) -> Any:
    for key in path:
        document = document[key]
    return document
