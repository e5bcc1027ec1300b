"""The adapters of a loaded model, by name.

The base model is loaded once. An adapter is read from its file when it is added, and again when a
request needs one that was evicted: if memory is short, the adapters unused for longest, and without
tokens in any conversation, are evicted first. It does not know how adapters are computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from localrt.common.errors import MemoryBudgetError, OptionError
from localrt.engine.protocol import Engine
from localrt.models.checkpoints.adapters import read_adapter
from localrt.models.tensor_source import Checkpoint
from localrt.quant.ops.adapters import Mix

AdapterChoice = str | Mapping[str, float] | None


@dataclass(slots=True)
class _Known:
    """An adapter: ``key`` identifies its contents; ``nbytes`` is 0 while it is not in memory."""

    path: Path
    key: str = ""
    nbytes: int = 0
    asked: int = 0  # the number of the last request that needed it


class Adapters:
    """The adapters by name. Thread-safe. ``open_base`` opens the base, to check shapes."""

    def __init__(self, engine: Engine, open_base: Callable[[], Checkpoint]) -> None:
        self._engine = engine
        self._open_base = open_base
        self._base: Checkpoint | None = None  # opened for the first adapter
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()
        self._clock = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use, in the order in which they were added."""
        return tuple(self._known)

    @property
    def nbytes(self) -> int:
        """The bytes of the adapters in memory."""
        return sum(known.nbytes for known in self._known.values())

    def add(self, name: str, path: Path) -> None:
        """Read the adapter at ``path``, and make it available as ``name``.

        Raises:
            OptionError: the name is taken or not usable.
            CheckpointError: it is damaged, or belongs to another base.
            UnsupportedModelError: the adapter's kind or the engine does not support it.
            MemoryBudgetError: there is no room for it.
        """
        if not name or name != name.strip() or "=" in name or "," in name:
            raise OptionError(f"an adapter needs a name without '=' and ',', is {name!r:.60}")
        with self._lock:
            if name in self._known:
                raise OptionError(f"there is an adapter {name!r} already: remove it first")
            known = _Known(path)
            self._load(known)
            known.path = path.absolute()  # valid after a change of folder, too
            self._known[name] = known

    def remove(self, name: str) -> None:
        """Remove an adapter; running answers with it end with an error.

        Raises:
            OptionError: no adapter has that name.
        """
        with self._lock:
            known = self._find(name)
            del self._known[name]
            others = [other for other in self._known.values() if other.key == known.key]
            if others:  # it stays under another name
                others[0].nbytes += known.nbytes
            else:
                self._drop(known)

    def mix(self, choice: AdapterChoice) -> Mix:
        """Return the adapter set of a request's ``adapter``, and load the adapters that it needs.

        Raises:
            OptionError: a name is unknown, or a weight is not a number.
        """
        if choice is None or choice == "" or choice == "none":
            return ()
        weights = {choice: 1.0} if isinstance(choice, str) else dict(choice)
        with self._lock:
            self._clock += 1
            wanted: list[tuple[_Known, float]] = []
            for name, weight in weights.items():
                if not _is_number(weight):
                    raise OptionError(
                        f"adapter: the weight of {name!r} is {weight!r:.40}, no number"
                    )
                wanted.append((self._find(name), float(weight)))
            mix: dict[str, float] = {}
            for known, weight in wanted:
                known.asked = self._clock
                if not self._here(known.key):
                    self._load(known, needed=[other.key for other, _ in wanted])
                mix[known.key] = mix.get(known.key, 0.0) + weight
            return tuple(sorted((key, weight) for key, weight in mix.items() if weight))

    def close(self) -> None:
        """Close the base's files."""
        with self._lock:
            self._known.clear()
            if self._base is not None:
                self._base.close()
                self._base = None

    def _here(self, key: str) -> bool:
        return any(known.key == key and known.nbytes for known in self._known.values())

    def _find(self, name: str) -> _Known:
        if name not in self._known:
            known = ", ".join(self._known) or "none is loaded"
            raise OptionError(f"there is no adapter {name!r:.80}: known: {known}")
        return self._known[name]

    def _load(self, known: _Known, needed: Collection[str] = ()) -> None:
        """Load an adapter; if memory is short, evict others without a ``needed`` key."""
        if self._base is None:
            self._base = self._open_base()
        adapter = read_adapter(known.path, self._base)
        known.key = adapter.key
        if self._here(known.key):
            return  # the same adapter under another name
        while True:
            try:
                known.nbytes = self._engine.add_adapter(adapter)
                return
            except MemoryBudgetError:
                here = [other for other in self._known.values() if other.nbytes]
                others = [one for one in here if one.key not in needed]
                idle = [one for one in others if not self._engine.uses_adapter(one.key)]
                if not idle:
                    raise
                self._drop(min(idle, key=lambda one: one.asked))

    def _drop(self, known: _Known) -> None:
        if known.nbytes:
            self._engine.remove_adapter(known.key)
            known.nbytes = 0


def _is_number(weight: object) -> bool:
    return isinstance(weight, int | float) and not isinstance(weight, bool) and isfinite(weight)
