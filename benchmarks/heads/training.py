"""Trains a head: cross-entropy with the target's own distribution, on several levels at once.

A step is unrolled: from its second level on, a row takes in what the head itself gave for the row
before, and attends as it will when a tree is drafted, so that guesses of guesses are trained too
(EAGLE-3's training-time test, HASS). Levels join one after another as the training goes on.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common.descent import Descent
from benchmarks.heads.head import HeadModel, split

_LEVELS = 4
_LEVEL_WEIGHT = 0.8  # of each deeper level's loss, over the one above


class Trainer:
    """Takes steps on ``batch`` sequences each; ``seen`` counts how often each was used."""

    def __init__(self, model: HeadModel, *, total: int, batch: int, rate: float) -> None:
        self.model, self._batch = model, batch
        self.descent = Descent(model.weights, total=total, rate=rate)
        self.seen: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._local = torch.full((model.target.embedding.shape[0],), -1)
        self._local[model.target.ids] = torch.arange(len(model.target.ids))

    def choose(self, among: list[int]) -> list[int]:
        """The sequences of the next step: those used least, in a random order that the step sets.

        So the text may still be growing.
        """
        self.seen = np.pad(self.seen, (0, max(0, among[-1] + 1 - len(self.seen))))
        random = np.random.default_rng((0, self.descent.step)).random(len(among))
        order = np.lexsort((random, self.seen[among]))
        chosen = [among[place] for place in order[: self._batch]]
        self.seen[chosen] += 1
        return chosen

    def levels(self) -> int:
        """How many levels the next step has: a fifth of the training begins with each."""
        return min(_LEVELS, 1 + 5 * self.descent.step // self.descent.total)

    def train(self, records: npt.NDArray[np.void]) -> tuple[float, list[float]]:
        """One step: its loss, and the share of its tokens that each level guessed."""
        loss, agreed = self._loss(records, self.levels())
        return self.descent.take(loss), agreed

    @torch.no_grad()
    def score(self, records: npt.NDArray[np.void]) -> list[float]:
        """The share of tokens whose best guess on each level is the target's."""
        return self._loss(records, _LEVELS)[1]

    def save(self, path: Path) -> None:
        """Write all that ``load`` needs to continue."""
        self.descent.save(path, seen=torch.from_numpy(self.seen))

    def load(self, path: Path) -> None:
        """Continue from a file of ``save``."""
        self.seen = self.descent.load(path)["seen"].numpy()

    def _loss(self, records: npt.NDArray[np.void], levels: int) -> tuple[Tensor, list[float]]:
        """What to minimize, and each level's agreement, on tokens that the target chose itself."""
        model = self.model
        tokens = torch.from_numpy(np.array(records["tokens"], np.int64))
        written = torch.from_numpy(np.array(records["written"]))
        bits = torch.from_numpy(np.array(records["features"]).view(np.int16))
        features = bits.view(torch.bfloat16)
        # Row i takes in token i + 1 with the features of token i, and guesses token i + 2.
        counted = written[:, 2:] & (self._local[tokens[:, 2:]] >= 0)
        last = split(features[:, 1:-1], 3)[:, :, -1]
        with torch.no_grad():
            normed = F.rms_norm(last.float(), last.shape[-1:], model.target.norm, model.target.eps)
            truth = F.linear(normed[counted].bfloat16(), model.target.head).float()
            wanted, best = truth.softmax(-1), truth.argmax(-1)
        with torch.autocast("cpu", torch.bfloat16):
            outs = model.unrolled(features[:, :-2], tokens[:, 1:-1], levels)
        total, shares = torch.zeros(()), []
        for level, out in enumerate(outs):
            logits = model.logits(out[counted])
            # The first rows of a deeper level have no guesses to go on from: they are few.
            total = total + _LEVEL_WEIGHT**level * F.cross_entropy(logits, wanted)
            shares.append(float((logits.argmax(-1) == best).float().mean()))
        return total, shares
