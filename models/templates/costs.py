"""What the methods, filters and tests of templates cost, where that is more than their arguments.

Each function here is called with the arguments of what it stands for, before that is called, and
returns the first of them. It raises TemplateRuntimeError where the result would be too large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import TemplateRuntimeError

from localrt.models.templates.meter import Meter, Steps, depth, units
from localrt.models.templates.printf import printf_size

__all__ = ["charge_method", "filter_cost", "test_cost"]

_STEP = 64
_PIECE = 64  # units of a short text in a list
_ESCAPED = 6  # "&#34;" for a quotation mark
_MAX_NUMBER = 4_300  # digits, as Python has it for decimal ones
_MAX_PRECISION = 300  # digits that a float can be rounded to
_MAX_INDENT = 1_000


def _whole(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    """All of every argument, a few times over."""
    for item in (*args, *kwargs.values()):
        meter.spend(meter.weigh(item) // 4)
    return _read(meter, value)


def _read(meter: Meter, value: Any) -> Any:
    if not isinstance(value, (str, list, tuple, dict)) and hasattr(value, "__next__"):
        return Steps(meter, value, _STEP, deep=True)
    size = meter.weigh(value)
    meter.afford(_ESCAPED * size)
    meter.spend(size // 4)
    return value


def _texts(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    """What splits a text into words."""
    meter.afford(_PIECE * meter.weigh(value))
    return _whole(meter, value, *args, **kwargs)


def _squared(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    """What may go through its text once for every few characters of it."""
    size = meter.weigh(value)
    given = sum(meter.weigh(item) for item in (*args, *kwargs.values()))
    meter.spend(size * (_PIECE + size // 32 + given))
    return value


# Methods --------------------------------------------------------------------------------------


def _wide(*texts: Any) -> int:
    """Bytes of a character of what is made of ``texts``."""
    return 1 if all(isinstance(text, str) and text.isascii() for text in texts) else 4


def _nothing(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


def _padded(meter: Meter, value: Any, width: Any = 80, fill: str = " ") -> Any:
    if isinstance(width, int):
        meter.afford(_wide(value, fill) * max(width, 0))
    return _read(meter, value)


def _expanded(meter: Meter, value: str, tabsize: Any = 8) -> Any:
    if isinstance(tabsize, int):
        meter.afford(_wide(value) * (len(value) + value.count("\t") * max(tabsize, 0)))
    return value


def _stripped(meter: Meter, value: Any, chars: Any = None) -> Any:
    if chars is None and type(value) is str:
        return value
    if isinstance(chars, str) and len(chars) > 16:
        meter.spend(units(value) * len(chars) // 16)
    return _read(meter, value)


def _split(meter: Meter, value: str, sep: Any = None, maxsplit: Any = -1) -> Any:
    pieces = len(value) // 2 + 1
    if isinstance(sep, str) and sep:
        pieces = len(value) // len(sep) + 1
    if _PIECE * pieces > 65_536:
        pieces = value.count(sep) + 1 if isinstance(sep, str) and sep else pieces
        meter.afford(_PIECE * pieces + 2 * units(value))
    meter.spend(len(value) // 8)
    return value


def _backwards(meter: Meter, value: str, sep: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Looking for ``sep`` from the right, which compares all of it at every place."""
    sep = kwargs.get("sep", sep)
    if isinstance(sep, str) and len(sep) > 16:
        meter.spend(len(value) * len(sep) // 16)
    return _split(meter, value, sep)


def _lines(meter: Meter, value: str, keepends: Any = False) -> Any:
    meter.afford(_PIECE * (len(value) + 1))
    return value


def _replaced(meter: Meter, value: Any, old: Any, new: Any, count: Any = None) -> Any:
    text, old, new = (
        item if isinstance(item, str) else meter.show(item) for item in (value, old, new)
    )
    meter.spend(len(text) // 8)
    if len(new) > len(old):
        places = len(text) // max(len(old), 1) + 1
        if places * len(new) > 65_536:
            places = text.count(old)
            if isinstance(count, int) and 0 <= count < places:
                places = count
        grown = len(text) + _ESCAPED * places * len(new) * (1 if type(value) is str else 5) // 5
        meter.afford(grown * _wide(text, new))
    return value


def _joined(meter: Meter, separator: str, items: Any) -> Any:
    listed = isinstance(items, (list, tuple))
    width = 4 * (5 if type(separator) is not str else 1)
    if listed and all(type(item) is str for item in items):
        length = sum(map(len, items)) + len(separator) * len(items)
        meter.afford(length * (1 if _wide(separator, *items) == 1 and width == 4 else width))
    elif isinstance(items, str):
        meter.afford((_PIECE + width * len(separator)) * len(items))
    else:
        meter.afford(width * (meter.weigh(items) + len(separator) * _count(items)))
    return separator


def _count(items: Any) -> int:
    try:
        return len(items)
    except TypeError:
        return 0


def _cased(meter: Meter, value: str, *args: Any) -> Any:
    meter.afford(3 * _wide(value) * len(value))
    return value


def _searched(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    meter.searched(value)
    for item in args:
        meter.key(item)
    return value


def _called(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    for item in args:
        meter.key(item)
    for item in kwargs.values():
        meter.key(item)
    return value


_TEXT_METHODS: dict[str, Callable[..., Any]] = {
    "capitalize": _cased,
    "casefold": _cased,
    "center": _padded,
    "count": _searched,
    "endswith": _called,
    "expandtabs": _expanded,
    "find": _searched,
    "format": _nothing,  # by a formatter that charges each field
    "format_map": _nothing,
    "index": _searched,
    "join": _joined,
    "ljust": _padded,
    "lower": _cased,
    "lstrip": _stripped,
    "partition": _searched,
    "removeprefix": _called,
    "removesuffix": _called,
    "replace": _replaced,
    "rfind": _backwards,
    "rindex": _backwards,
    "rjust": _padded,
    "rpartition": _backwards,
    "rsplit": _backwards,
    "rstrip": _stripped,
    "split": _split,
    "splitlines": _lines,
    "startswith": _called,
    "strip": _stripped,
    "swapcase": _cased,
    "title": _cased,
    "unescape": _squared,
    "striptags": _squared,
    "upper": _cased,
    "zfill": _padded,
}
_TEXT_METHODS.update({name: _searched for name in dir(str) if name.startswith("is")})

_METHODS: dict[type, dict[str, Callable[..., Any]]] = {
    str: _TEXT_METHODS,
    dict: {
        "copy": _searched,
        "get": _called,
        "items": _nothing,
        "keys": _nothing,
        "values": _nothing,
    },
    list: {"copy": _nothing, "count": _searched, "index": _searched},
    tuple: {"count": _searched, "index": _searched},
    int: {"bit_length": _nothing, "is_integer": _nothing},
    float: {"is_integer": _nothing},
}


def charge_method(
    meter: Meter, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Charge the method ``name`` of ``owner``, before it is called.

    Raises:
        TemplateRuntimeError: a method of a built-in type that templates have no use for.
    """
    methods = _METHODS.get(type(owner))
    if methods is None:
        kinds = (kind for kind in type(owner).__mro__ if kind in _METHODS)
        methods = _METHODS.get(next(kinds, object), {})
    cost = methods.get(name)
    if cost is not None:
        cost(meter, owner, *args, **kwargs)
        return
    module = (owner if isinstance(owner, type) else type(owner)).__module__
    if module in ("builtins", "markupsafe"):
        kind = type(owner)
        raise TemplateRuntimeError(f"a template cannot use {name[:40]!r} of a {kind.__name__}")
    if module.startswith("jinja2"):
        _called(meter, owner, *args, **kwargs)


# Filters --------------------------------------------------------------------------------------


def _stepped(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    """A lazy filter, each step of which may go through its short arguments."""
    if not value:
        return value
    _called(meter, value, *args, **kwargs)
    names = sum(len(item) for item in (*args, *kwargs.values()) if isinstance(item, str))
    return Steps(meter, value, _STEP + 8 * names)


def _batched(meter: Meter, value: Any, linecount: Any, fill_with: Any = None) -> Any:
    if isinstance(linecount, int) and fill_with is not None:
        meter.afford(8 * max(linecount, 0))
    return Steps(meter, value, _STEP)


def _listed(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(value, str):
        meter.afford(_PIECE * len(value) if value.isascii() else 84 * len(value))
    elif not hasattr(value, "__next__"):
        meter.afford(units(value))
        meter.spend(units(value))
    return value


def _joined_filter(meter: Meter, value: Any, d: Any = "", attribute: Any = None) -> Any:
    separator = units(d) if isinstance(d, str) else _ESCAPED * meter.weigh(d)
    if attribute is None and isinstance(value, list) and all(type(text) is str for text in value):
        length = sum(map(len, value)) + len(value) * separator
        meter.afford(length if _wide(d, *value) == 1 else 4 * length)
        return value
    if not isinstance(value, Iterable):
        return value
    return Steps(meter, value, _STEP + separator, deep=True)


def _indented(
    meter: Meter, value: Any, width: Any = 4, first: Any = False, blank: Any = False
) -> Any:
    text = value if isinstance(value, str) else ""
    lines = sum(map(text.count, _LINE_ENDS)) + 2
    wide = max(width, 0) if isinstance(width, int) else units(width)
    meter.afford(_PIECE * lines + 4 * lines * wide + 2 * units(text))
    return value


_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def _wrapped(
    meter: Meter,
    value: Any,
    width: Any = 79,
    break_long_words: Any = True,
    wrapstring: Any = None,
    break_on_hyphens: Any = True,
) -> Any:
    if isinstance(value, str) and isinstance(width, int):
        meter.afford(_PIECE * len(value))
        longest = max(map(len, value.split()), default=0)
        lines = len(value) + 1
        meter.afford(4 * lines * len(wrapstring) if isinstance(wrapstring, str) else 0)
        meter.spend(_PIECE * len(value) + longest * longest // (16 * max(width, 1)))
    return value


def _numbered(meter: Meter, value: Any, default: Any = 0, base: Any = 10) -> Any:
    if isinstance(value, str) and len(value) > _MAX_NUMBER:
        raise TemplateRuntimeError("a number in it is too long")
    return value


def _rounded(meter: Meter, value: Any, precision: Any = 0, method: Any = "common") -> Any:
    if isinstance(precision, int) and abs(precision) > _MAX_PRECISION:
        raise TemplateRuntimeError(f"a number is rounded to more than {_MAX_PRECISION} digits")
    if isinstance(value, (str, list, tuple)):
        raise TemplateRuntimeError("only a number can be rounded")
    return value


def _formatted(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    values = kwargs or args
    largest = meter.weigh(values)
    meter.afford(printf_size(value if isinstance(value, str) else "", values, 10 * largest))
    return value


def _summed(meter: Meter, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    if isinstance(start, (int, float)):
        return _stepped(meter, value, attribute)
    return _Growing(meter, value, attribute, units(start))


class _Growing(Steps):
    """Items of which each is added to the sum of those before it, by a copy of that."""

    __slots__ = ("_attribute", "_sum")

    def __init__(self, meter: Meter, items: Iterable[Any], attribute: Any, start: int) -> None:
        super().__init__(meter, items, _STEP)
        self._attribute = attribute
        self._sum = start

    def __next__(self) -> Any:
        item = super().__next__()
        if self._attribute is None:
            self._sum += units(item)
        elif isinstance(item, Mapping) and self._attribute in item:
            self._sum += units(item[self._attribute])
        else:
            self._sum += self._meter.weigh(item)
        self._meter.afford(self._sum)
        self._meter.spend(self._sum)
        return item


def _json(
    meter: Meter,
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> Any:
    if indent is None and separators is None and meter.is_given(value):
        return value
    size = meter.weigh(value)
    grown = 12 * size
    if indent is not None:
        wide = indent if isinstance(indent, int) else units(indent)
        grown += size // 8 * max(wide, 0) * depth(value)
    if separators is not None:
        grown += size // 8 * meter.weigh(separators)
    meter.afford(grown)
    return value


_FILTERS: dict[str, Callable[..., Any]] = {
    "attr": _called,
    "batch": _batched,
    "center": _padded,
    "format": _formatted,
    "indent": _indented,
    "int": _numbered,
    "items": _nothing,
    "join": _joined_filter,
    "list": _listed,
    "map": _stepped,
    "pprint": _squared,
    "reject": _stepped,
    "rejectattr": _stepped,
    "replace": _replaced,
    "round": _rounded,
    "select": _stepped,
    "selectattr": _stepped,
    "reverse": _listed,
    "slice": _listed,
    "striptags": _squared,
    "sum": _summed,
    "title": _texts,
    "tojson": _json,
    "trim": _stripped,
    "urlencode": _texts,
    "urlize": _squared,
    "wordcount": _texts,
    "wordwrap": _wrapped,
}


_FREE_FILTERS = frozenset(["count", "d", "default", "first", "last", "length"])


def filter_cost(name: str) -> Callable[..., Any] | None:
    """What charges the filter ``name``; None where it costs next to nothing."""
    return None if name in _FREE_FILTERS else _FILTERS.get(name, _whole)


# Tests ----------------------------------------------------------------------------------------


def _compared(meter: Meter, value: Any, *args: Any) -> Any:
    for other in args:
        meter.compared(other)
    return meter.compared(value)


def _looked_for(meter: Meter, value: Any, *args: Any) -> Any:
    for other in args:
        meter.searched(other)
    return meter.key(value)


def _divided(meter: Meter, value: Any, number: Any = 2) -> Any:
    meter.modulo(value, number)
    return value


_CHEAP_TESTS = frozenset(
    [
        "boolean",
        "callable",
        "defined",
        "false",
        "float",
        "integer",
        "iterable",
        "mapping",
        "none",
        "number",
        "sameas",
        "sequence",
        "string",
        "true",
        "undefined",
        "escaped",
    ]
)


def test_cost(name: str) -> Callable[..., Any] | None:
    """What charges the test ``name``; None where it looks at nothing but its value's type."""
    if name in _CHEAP_TESTS:
        return None
    if name in ("odd", "even", "divisibleby"):
        return _divided
    if name in ("in", "filter", "test"):
        return _looked_for
    return _compared
