"""What guesses for a sequence while others share its passes: lookups, which cost next to nothing.

Draft models are left out, since their own passes would be made for each sequence in turn. It
proposes and learns; which guesses are computed is decided for all sequences together. See
``localrt.engine.speculation`` for a sequence that is alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from localrt.engine.protocol import Check
from localrt.engine.tree_pass import TreePass, TreeSession
from localrt.errors import CancelledError, LocalrtError
from localrt.speculative.archive import Archive
from localrt.speculative.mixed import MixedTree
from localrt.speculative.policy import DEPTH
from localrt.speculative.source import DraftSource
from localrt.speculative.tree import TokenTree
from localrt.speculative.tuner import Tuner

__all__ = ["Companion"]


class Companion:
    """Of one generation on ``session``. ``passes`` and ``emitted`` count since it began."""

    def __init__(
        self,
        session: TreeSession,
        prompt: Sequence[int],
        sources: Mapping[str, DraftSource],
        tuner: Tuner,
        *,
        archive: Archive | None = None,
    ) -> None:
        self.session = session
        self.tuner = tuner
        self._history = list(prompt)
        self._prompt_size = self._computed = len(prompt)
        self._sources = dict(sources)
        self._archive = archive
        self._mixed = MixedTree()
        self.passes = 0
        self.emitted = 0
        self._guessed_right: dict[str, int] = {}

    def chosen(self, token: int) -> None:
        """``token`` is what the next pass computes first."""
        del self._history[self._computed :]  # of a pass that was abandoned
        self._history.append(token)
        self._mixed.clear()

    def guess(self, most: int, depth: int, check: Check) -> TokenTree:
        """At most ``most`` guesses of what follows; scores are logarithms of believed chances."""
        most = min(most, self.session.capacity - len(self.session.tokens) - 1)
        depth = min(depth, DEPTH)
        if most < 1 or depth < 1:
            return TokenTree.empty()
        for name, source in list(self._sources.items()):
            try:
                tree = source.propose(self._history, most, depth, check=check)
            except CancelledError:
                raise
            except LocalrtError:  # the answer is the same without it
                del self._sources[name]
                continue
            if len(tree):
                self._mixed.add(name, tree, self.tuner.sources[name].calibration)
        with self.tuner.lock:
            return self._mixed.tree(most)

    def verified(self, computed: TreePass) -> None:
        """A pass has ended."""
        tree, path = computed.tree, computed.path
        self.passes += 1
        self.emitted += 1 + len(path)
        self._history += tree.tokens[path].tolist()
        self._computed = len(self._history)
        for node in path:
            for name in tree.proposed_by(node):
                self._guessed_right[name] = self._guessed_right.get(name, 0) + 1
        if len(tree):
            with self.tuner.lock:
                self._mixed.learn(tree, tuple(path))

    def finish(self) -> None:
        """The generation has ended, or goes on alone."""
        if self._archive is not None:
            self._archive.add(self._history[self._prompt_size :])

    @property
    def reason(self) -> str:
        """How it went, in one sentence."""
        each = self.emitted / self.passes if self.passes else 1.0
        names = " and ".join(self._sources) or "nothing to guess from"
        return f"speculation: {names}, {each:.1f} tokens a pass that other answers share"

    def acceptance(self) -> dict[str, float]:
        """The share of the passes' tokens that each source guessed right."""
        return {name: right / self.emitted for name, right in sorted(self._guessed_right.items())}
