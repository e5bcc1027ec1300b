"""How often the guesses of a draft have come true, kept from one run to the next.

A plan for a target and its draft stands and falls with it, and only running both tells. A few
numbers in the cache folder, by the names of the two; losing them costs a worse first guess.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from localrt.files import write_text
from localrt.settings import Settings
from localrt.speculative.source import AheadSource, Check, DraftSource, Outcome
from localrt.speculative.tree import ROOT, TokenTree

__all__ = [
    "FirstChoices",
    "MeasuredAheadSource",
    "MeasuredSource",
    "known_acceptance",
    "measured",
    "remember_acceptance",
]

_TESTS = 64  # that make a measurement
_BLEND = 0.5  # of a new one
_MOST = 200  # pairs


def known_acceptance(settings: Settings, target: str, draft: str) -> float | None:
    """The share of first choices that came true; None where nothing was measured."""
    value = _read(_path(settings)).get(_key(target, draft))
    if isinstance(value, (int, float)) and 0.0 <= value <= 1.0:
        return float(value)
    return None


def remember_acceptance(settings: Settings, target: str, draft: str, share: float) -> None:
    """Blend a new measurement with what is known. A cache that cannot be written is left."""
    path, key = _path(settings), _key(target, draft)
    before = known_acceptance(settings, target, draft)
    value = share if before is None else before + _BLEND * (share - before)
    known = _read(path)
    known.pop(key, None)
    known[key] = round(min(1.0, max(0.0, value)), 4)
    kept = dict(list(known.items())[-_MOST:])
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(kept), sync=False)


def _key(target: str, draft: str) -> str:
    return f"{target} | {draft}"


def _path(settings: Settings) -> Path:
    return settings.cache_dir / "acceptance.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


class FirstChoices:
    """Counts how often a draft's likeliest child is the token that came; tells ``said`` the share.

    A tree is compared with the history that the next one is asked for: all that came is known then,
    whether it was guessed or not.
    """

    def __init__(self, said: Callable[[float], None]) -> None:
        self._said = said
        self._tree = TokenTree.empty()
        self._length = 0  # of the history that it was drafted behind
        self.tested = self.true = 0

    def drafted(self, history: Sequence[int], tree: TokenTree) -> None:
        """``tree`` was drafted behind ``history``."""
        self._tree, self._length = tree, len(history)

    def came(self, history: Sequence[int]) -> None:
        """``history`` is what has come since, if it goes on from the last tree's."""
        tree, self._tree = self._tree, TokenTree.empty()
        node = ROOT
        for token in history[self._length :] if len(tree) else ():
            children = np.flatnonzero(tree.parents == node)
            if not len(children):
                break
            self.tested += 1
            best = children[int(np.argmax(tree.scores[children]))]
            self.true += int(tree.tokens[best]) == token
            same = children[tree.tokens[children] == token]
            if not len(same):
                break
            node = int(same[0])
        if self.tested >= _TESTS:
            self._said(self.true / self.tested)
            self.tested = self.true = 0


class MeasuredSource:
    """See ``DraftSource``: one whose first choices are counted."""

    def __init__(self, source: DraftSource, choices: FirstChoices) -> None:
        self._source = source
        self._choices = choices

    @property
    def name(self) -> str:
        """See ``DraftSource``."""
        return self._source.name

    def begin(self, history: Sequence[int]) -> None:
        """See ``DraftSource``."""
        self._choices.drafted(history, TokenTree.empty())  # another text begins
        self._source.begin(history)

    def propose(
        self, history: Sequence[int], budget: int, depth: int, *, check: Check | None = None
    ) -> TokenTree:
        """See ``DraftSource``."""
        self._choices.came(history)
        tree = self._source.propose(history, budget, depth, check=check)
        self._choices.drafted(history, tree)
        return tree

    def close(self) -> None:
        """See ``DraftSource``."""
        self._source.close()


class MeasuredAheadSource(MeasuredSource):
    """See ``AheadSource``: the same of a source that goes on while its guesses are verified."""

    def __init__(self, source: AheadSource, choices: FirstChoices) -> None:
        super().__init__(source, choices)
        self._ahead = source

    @property
    def prepares(self) -> bool:
        """See ``AheadSource``."""
        return self._ahead.prepares

    def ahead(self, history: Sequence[int], nodes: int, *, check: Check, outcome: Outcome) -> None:
        """See ``AheadSource``."""
        self._ahead.ahead(history, nodes, check=check, outcome=outcome)

    def missing(self, history: Sequence[int]) -> int:
        """See ``AheadSource``."""
        return self._ahead.missing(history)

    def catch_up(self, history: Sequence[int], *, check: Check | None = None) -> None:
        """See ``AheadSource``."""
        self._ahead.catch_up(history, check=check)

    def ready(self, history: Sequence[int]) -> int:
        """See ``AheadSource``."""
        return self._ahead.ready(history)


def measured(source: DraftSource, said: Callable[[float], None]) -> DraftSource:
    """``source``, with the share of its first choices that come true told to ``said``."""
    choices = FirstChoices(said)
    if isinstance(source, AheadSource):
        return MeasuredAheadSource(source, choices)
    return MeasuredSource(source, choices)
