"""What one render of a chat template may compute: so much memory, so much of the processor's time.

Templates come from the internet, and a line of one can ask for hours or for all memory. Whatever a
template computes is charged here in units, which are about bytes; what could be large is asked for
before it is made. Knows strings, lists and numbers; no message and no Jinja2 syntax.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Set, ValuesView
from contextvars import ContextVar
from functools import reduce
from operator import add
from time import perf_counter, thread_time
from typing import Any, NoReturn

from jinja2 import TemplateRuntimeError, Undefined

from localrt.models.templates.printf import printf_size

__all__ = ["METER", "Meter", "Steps", "depth", "units"]

_UNITS = 36_000_000
_UNITS_PER_GIVEN = 128  # more for each unit that was given: a long conversation is rendered too
_SECONDS = 0.3  # of the thread's processor time: a busy machine refuses no good template
_SECONDS_PER_GIVEN = 1e-6
_REVIEW = 131_072  # units from one look at the clock to the next
_DEEPEST = 500  # containers within containers, where Python's own limit is about a thousand
_MAX_BITS = 16_384  # of an integer
_HOLD = 65_536  # characters; longer texts are given back once nothing refers to them
_SMALL = 1_024  # characters that are not worth a look
_SCALARS = frozenset((int, float, bool, type(None)))
_CONTAINERS = (list, tuple, Set, ValuesView)
_WALK = 500  # units of going through a container
_GROWTH = 10  # of a text's size when it is shown within a list: "\x00" for one byte, and so on


class Meter:
    """What a render may still spend; ``given`` are its variables, and allow for more.

    Every method raises TemplateRuntimeError where the template goes too far.
    """

    __slots__ = (
        "_began",
        "_check",
        "_extended",
        "_given",
        "_given_ids",
        "_held",
        "_held_limit",
        "_held_units",
        "_limit",
        "_overdue",
        "_seconds",
        "_spent",
    )

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._given_ids: set[int] | None = None
        self._extended = False
        self._spent = 0
        self._limit = _UNITS
        self._check = _REVIEW
        self._seconds = _SECONDS
        self._began = 0.0  # by the thread's clock, at the first review
        self._overdue = 0.0  # by the wall's clock, before which the thread's need not be asked
        self._held: list[tuple[str, int]] = []
        self._held_units = 0
        self._held_limit = _UNITS // 4

    # Accounts

    def spend(self, amount: int) -> None:
        """Charge ``amount`` units."""
        self._spent += amount
        if self._spent > self._check:
            self._review()

    def afford(self, amount: int) -> None:
        """See that ``amount`` units are left, before something of that size is made."""
        if self._spent + amount > self._limit:
            self._release()
            self._extend()
            if self._spent + amount > self._limit:
                _too_large()

    def _review(self) -> None:
        if self._spent > self._limit:
            self._release()
        if self._spent > self._limit or self._is_late():
            self._extend()
        if self._spent > self._limit:
            _too_large()
        if self._is_late():
            raise TemplateRuntimeError("it takes too long")
        self._check = min(self._limit, self._spent + _REVIEW)

    def _is_late(self) -> bool:
        if not self._overdue:  # asking for a thread's time is slow on some machines
            self._began = thread_time()
            self._overdue = perf_counter() + self._seconds
        if perf_counter() < self._overdue:
            return False
        return thread_time() - self._began > self._seconds

    def _extend(self) -> None:
        """Allow for what was given; it is measured only here, since few renders come to this."""
        if not self._extended:
            self._extended = True
            size = _measure(self._given, 1 << 40)
            self._limit += _UNITS_PER_GIVEN * size
            self._seconds += _SECONDS_PER_GIVEN * size
            if self._overdue:
                self._overdue += _SECONDS_PER_GIVEN * size

    def _hold(self, text: str, amount: int) -> None:
        """Charge a long ``text`` until nothing refers to it: some templates add to one often."""
        self.spend(amount)
        self._held.append((text, amount))
        self._held_units += amount
        if self._held_units > self._held_limit:
            self._release()

    def _release(self) -> None:
        held, self._held, self._held_units = self._held, [], 0
        while held:
            text, amount = held.pop()
            if sys.getrefcount(text) > 2:  # more than this variable and the call's argument
                self._held.append((text, amount))
                self._held_units += amount
            else:
                self._spent -= amount
        self._held_limit = 2 * self._held_units + _UNITS // 4
        self._check = self._spent  # look at the clock next time

    def weigh(self, value: Any) -> int:
        """The units of ``value`` with all that is in it, as often as it is in it."""
        if type(value) in _SCALARS:
            return 32
        if type(value) is str:
            return units(value)
        size = _measure(value, self._limit - self._spent)
        if self._spent + size > self._limit:
            self._extend()
            if self._spent + size <= self._limit:
                size = _measure(value, self._limit - self._spent)
            if self._spent + size > self._limit:
                _too_large()
        self.spend(size // 8)  # for the way through it
        return size

    def is_given(self, value: Any) -> bool:
        """Whether ``value`` is among what was given, or an item of that."""
        if self._given_ids is None:
            self._given_ids = set(map(id, self._given.values()))
            for item in self._given.values():
                if isinstance(item, (list, tuple)):
                    self._given_ids.update(map(id, item))
        return id(value) in self._given_ids

    # What templates write as operators

    def show(self, value: Any) -> str:
        """``value`` as text, as an output tag writes it."""
        text: str = value if type(value) is str else self._text(value)
        self._spent += len(text) + 16
        if self._spent > self._check:
            self._review()
        return text

    def _text(self, value: Any) -> str:
        if type(value) not in _SCALARS and not isinstance(value, (str, Undefined)):
            self.afford(_GROWTH * self.weigh(value))
        return str(value)

    def concat(self, pieces: Iterable[str]) -> str:
        """``"".join(pieces)``, whose length has been charged."""
        pieces = list(pieces)
        length = sum(map(len, pieces))
        if length <= _SMALL:
            self.spend(length)
            return "".join(pieces)
        amount = length if all(map(str.isascii, pieces)) else 4 * length
        self.afford(amount)
        text = "".join(pieces)
        self._keep(text, amount)
        return text

    def join(self, *values: Any) -> str:
        """``values`` joined by ``~``."""
        return self.concat([self.show(value) for value in values])

    def add(self, *values: Any) -> Any:
        """``values`` added from left to right."""
        length = 0
        for value in values:
            if type(value) is not str:
                return reduce(self._add_two, values)
            length += len(value)
        if length > _SMALL:
            return self.concat(values)
        self._spent += length
        return "".join(values)

    def _add_two(self, left: Any, right: Any) -> Any:
        if type(left) in _SCALARS:
            return left + right
        amount = units(left) + units(right)
        if isinstance(left, str):
            amount *= 5  # what is marked as safe escapes what is added to it
        self.afford(amount)
        self.spend(amount)
        return add(left, right)

    def subtract(self, left: Any, right: Any) -> Any:
        """``left - right``; the difference of a mapping's keys and any values is a set."""
        if type(left) not in _SCALARS:
            self.spend(self.weigh(left) + self.weigh(right))
        return left - right

    def multiply(self, left: Any, right: Any) -> Any:
        """``left * right``: a product or a repetition."""
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > _MAX_BITS:
                _too_large("a number in it becomes too large")
            return left * right
        if isinstance(right, int):
            self._repeat(left, right)
        elif isinstance(left, int):
            self._repeat(right, left)
        return left * right

    def _repeat(self, value: Any, count: int) -> None:
        if type(value) not in _SCALARS and count > 0:
            amount = units(value) * count
            self.afford(amount)
            self.spend(amount)

    def power(self, base: Any, exponent: Any) -> Any:
        """``base ** exponent``."""
        if isinstance(base, int) and isinstance(exponent, int):
            if base.bit_length() * max(exponent, 0) > _MAX_BITS:
                _too_large("a power in it is too large")
            if exponent < 0 and base.bit_length() > _MAX_BITS:
                _too_large("a number in it becomes too large")
        return base**exponent

    def modulo(self, left: Any, right: Any) -> Any:
        """``left % right``: a remainder, or printf's formatting."""
        if type(left) in _SCALARS:
            return left % right
        return self._format(left, right)

    def _format(self, left: Any, right: Any) -> Any:
        sizes: Iterable[Any] = (right,)
        if isinstance(right, (tuple, list)):
            sizes = right
        elif isinstance(right, Mapping):
            sizes = right.values()
        largest = max((self.weigh(value) for value in sizes), default=0)
        self.afford(printf_size(left, right, _GROWTH * max(largest, self.weigh(right))))
        result = left % right
        self.spend(units(result))
        return result

    def compared(self, value: Any) -> Any:
        """``value``, which is about to be compared."""
        kind = type(value)
        if kind is str:
            if len(value) > _SMALL:
                self.spend(len(value) // 8)
        elif kind not in _SCALARS:
            self.spend(self.weigh(value))
        return value

    def searched(self, value: Any) -> Any:
        """``value``, in which something is about to be looked for."""
        kind = type(value)
        if kind is str:
            self.spend(len(value) // 4)
        elif kind is not dict:
            self.spend(self.weigh(value))
        return value

    def key(self, value: Any) -> Any:
        """``value``, which is about to be hashed."""
        if type(value) is not str and type(value) not in _SCALARS:
            self.spend(self.weigh(value))
        return value

    def part(self, value: Any, bounds: slice) -> Any:
        """``value[bounds]``."""
        if isinstance(value, str):
            if len(value) > _SMALL:
                self.afford(units(value))
            return self.took(value[bounds], value)
        self.afford(units(value))
        result = value[bounds]
        self.spend(units(result))
        return result

    def took(self, result: Any, source: Any = None) -> Any:
        """``result`` of a function of ``source``, charged."""
        kind = type(result)
        if result is source:
            pass
        elif kind is str and len(result) <= _SMALL:
            self.spend(4 * len(result) + 64)
        elif kind is str:
            self._keep(result, units(result))
        elif kind is list or kind is tuple:
            self.spend(64 * len(result) + 64)
        elif isinstance(result, str):
            self.spend(units(result))
        return result

    def _keep(self, text: str, amount: int) -> None:
        if len(text) > _HOLD:
            self._hold(text, amount)
        else:
            self.spend(amount)


METER: ContextVar[Meter] = ContextVar("METER")
"""The meter of the render or the compilation that this thread is at."""


class Steps:
    """Items of a lazy filter, each charged ``cost`` units and, if ``deep``, what it weighs."""

    __slots__ = ("_cost", "_deep", "_items", "_meter")

    def __init__(
        self, meter: Meter, items: Iterable[Any], cost: int, *, deep: bool = False
    ) -> None:
        self._meter = meter
        self._items = iter(items)
        self._cost = cost
        self._deep = deep

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._meter.spend(self._cost)
        item = next(self._items)
        if self._deep:
            self._meter.spend(self._meter.weigh(item))
        return item


def units(value: Any) -> int:
    """The bytes that ``value`` itself takes, without what is in it; never less than its length."""
    if isinstance(value, (str, bytes, int)):
        return value.__sizeof__()
    if isinstance(value, dict):
        return 64 + 100 * len(value)
    try:
        return 64 + 8 * len(value)
    except TypeError:
        return 64


def depth(value: Any) -> int:
    """How many containers are within each other in ``value``, itself included."""
    deep, level = 0, [value]
    while level and deep < _DEEPEST:
        deep += 1
        level = [part for item in level for part in _parts(item)]
    return deep


def _parts(value: Any) -> Iterable[Any]:
    """What is in ``value``, if it is a container that is shown and compared by what is in it."""
    if isinstance(value, Mapping):
        return (*value, *value.values())
    return value if isinstance(value, _CONTAINERS) else ()


def _measure(value: Any, most: int) -> int:
    """The units of ``value`` with all that is in it, or the first sum that is over ``most``."""
    total = 0
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        within: list[Any] = []
        for item in level:
            kind = type(item)
            if kind in _SCALARS:
                total += 32
                continue
            total += units(item) if kind is str else units(item) + _WALK
            if total > most:
                return total
            if kind is range:
                total += 32 * len(item)
            elif kind is not str:
                within += _parts(item)
        if not within:
            return total
        level = within
    raise TemplateRuntimeError("a value in it is nested too deeply")


def _too_large(what: str = "what it makes is too large") -> NoReturn:
    raise TemplateRuntimeError(what)
