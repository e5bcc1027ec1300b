"""One step of a draft head's training, with torch: float32 weights, bfloat16 products.

The head learns to say what the target would say: cross-entropy with the target's own distribution
over the draft vocabulary, and a little regression of the hidden states. A step is unrolled: on its
second level a position takes in what the head itself gave for the position before, and attends as
it will when a tree is drafted (to true positions up to where the guesses begin, and to its own
line of guesses from there), so that guesses of guesses are trained too (EAGLE-3, HASS). It knows
no files but that of its own state.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localrt.drafts.training_model import HeadModel
from localrt.errors import CheckpointError, StorageError
from localrt.files import atomic_write
from localrt.speculative.draft_head_file import HeadConfig

if TYPE_CHECKING:
    from localrt.drafts.text import Learnt

__all__ = ["Frozen", "LevelScore", "Trainer", "freeze", "mean_scores"]

Tokens = npt.NDArray[np.int32]
Halves = npt.NDArray[np.uint16]

_LEVEL_WEIGHT = 0.8  # of each deeper level's loss, over the one above
_REGRESSION = 0.1
_RATE = 2e-3
_WARM_UP, _LEAST_RATE = 30, 0.02  # steps; share of the rate at the end
_SHALLOW = 0.3  # the share of the training that needs no guesses of guesses
_CLIP = 1.0
_ROWS = 512  # of logits at a time


@dataclass(frozen=True, slots=True)
class Frozen:
    """What the head takes from its target.

    ``embedding`` (V, D) of all tokens, ``head`` (draft vocabulary, D), ``norm`` (D,) the final one.
    """

    embedding: Tensor
    head: Tensor
    norm: Tensor
    eps: float
    softcap: float | None = None

    def logits(self, normed: Tensor) -> Tensor:
        """Of rows (..., D) past the final norm, over the draft vocabulary."""
        logits = F.linear(normed, self.head)
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap

    def normed(self, x: Tensor) -> Tensor:
        """The final norm of rows (..., D)."""
        return F.rms_norm(x.float(), x.shape[-1:], self.norm, self.eps)


def freeze(learnt: Learnt) -> Frozen:
    """A target's frozen parts."""
    embedding, head, norm = (
        torch.from_numpy(np.ascontiguousarray(array))
        for array in (learnt.embedding, learnt.head, learnt.norm)
    )
    return Frozen(embedding, head, norm, learnt.eps, learnt.softcap)


class _Entropy(torch.autograd.Function):
    """Mean cross-entropy of guessed rows (n, D) with the target's own (n, D), both normed.

    And the share of rows whose likeliest token is the same. A few rows at a time: whole logits
    would take longer to write and read than to compute. The gradient is made with the loss.
    """

    @staticmethod
    def forward(ctx: Any, guessed: Tensor, truth: Tensor, frozen: Frozen) -> tuple[Tensor, Tensor]:
        n = len(guessed)
        grad = torch.empty_like(guessed)
        entropy = torch.zeros((), device=guessed.device)
        agreed = torch.zeros((), device=guessed.device)
        for start in range(0, n, _ROWS):
            part = slice(start, start + _ROWS)
            said = frozen.logits(truth[part].bfloat16()).float()
            logits = frozen.logits(guessed[part].bfloat16()).float()
            wanted, chances = said.softmax(-1), logits.softmax(-1)
            top, best = logits.max(-1)
            # log-sum-exp, from the likeliest token's logit and chance
            total = top - chances.gather(-1, best[:, None]).squeeze(-1).log()
            entropy += (total - (wanted * logits).sum(-1)).sum()
            agreed += (best == said.argmax(-1)).sum()
            slope = chances.sub_(wanted)
            if frozen.softcap is not None:
                slope = slope * (1 - (logits / frozen.softcap).square())
            grad[part] = (slope.bfloat16() @ frozen.head).float() / n
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(agreed)
        return entropy / n, agreed / n

    @staticmethod
    def backward(ctx: Any, entropy: Tensor, agreed: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * entropy, None, None


@dataclass(frozen=True, slots=True)
class LevelScore:
    """How a level did: its cross-entropy, and how often its best guess was the target's."""

    loss: float
    agreed: float


class Trainer:
    """A head with its optimizer. ``total`` steps are to be taken, on ``device``."""

    def __init__(
        self,
        config: HeadConfig,
        frozen: Frozen,
        *,
        total: int,
        levels: int,
        seed: int,
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._total = total
        self._levels = levels
        self._device = torch.device(device)
        half = torch.bfloat16
        self._frozen = Frozen(
            frozen.embedding.to(self._device, half),
            frozen.head.to(self._device, half),
            frozen.norm.to(self._device),
            frozen.eps,
            frozen.softcap,
        )
        self.model = HeadModel(config).to(self._device)
        norm = frozen.norm / frozen.norm.square().mean().sqrt().clamp_min(1e-6)
        with torch.no_grad():
            self.model.fusion.feature_norm.weight.copy_(norm)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )
        self.step = 0

    def train(self, tokens: Tokens, features: Halves) -> list[LevelScore]:
        """One step on sequences: tokens (B, L), features (B, L, D) as bfloat16's bits."""
        for group in self._optimizer.param_groups:
            group["lr"] = _RATE * self._share()
        self._optimizer.zero_grad(set_to_none=True)
        levels = 1 if self.step < _SHALLOW * self._total else self._levels
        loss, scores = self._loss(tokens, features, levels)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        self._optimizer.step()
        self.step += 1
        return scores

    @torch.no_grad()
    def score(self, tokens: Tokens, features: Halves) -> list[LevelScore]:
        """Like ``train``, and nothing is learnt."""
        return self._loss(tokens, features, self._levels)[1]

    def weights(self) -> dict[str, Any]:
        """The head's weights as numpy arrays in float32, by their names."""
        return {n: p.detach().float().cpu().numpy() for n, p in self.model.state_dict().items()}

    def save(self, path: Path) -> None:
        """Write all that ``load`` needs to go on to the same numbers.

        Raises:
            StorageError: the disk is full or fails.
        """
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        try:
            with atomic_write(path) as stream:
                torch.save(state, stream)
        except (OSError, RuntimeError) as error:
            raise StorageError(f"{path} cannot be written: {error}") from error

    def load(self, path: Path) -> None:
        """Go on from a file of ``save``, if there is one.

        Raises:
            CheckpointError: it is damaged.
        """
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location=self._device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
        except (OSError, RuntimeError, KeyError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{path} is damaged: delete it to begin the training again"
            ) from error

    # -- parts -----------------------------------------------------------------------------------

    def _share(self) -> float:
        """The share of the learning rate for this step: a short rise, then a straight fall."""
        rise = min(1.0, (self.step + 1) / _WARM_UP)
        return rise * max(_LEAST_RATE, 1 - self.step / self._total)

    def _loss(self, ids: Tokens, halves: Halves, levels: int) -> tuple[Tensor, list[LevelScore]]:
        frozen = self._frozen
        tokens = torch.from_numpy(ids.astype(np.int64)).to(self._device)
        features = torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16).to(self._device)
        truth = frozen.normed(features)[:, 1:]
        with torch.autocast(self._device.type, torch.bfloat16):
            embedded = frozen.embedding[tokens[:, 1:]].float()
            outs = self.model(features[:, :-1].float(), embedded, levels)
        size = truth.square().mean()
        total = torch.zeros((), device=self._device)
        scores = []
        for level, out in enumerate(outs):
            # The first rows of a deeper level have no guesses to go on from.
            normed, wanted = frozen.normed(out[:, level:]), truth[:, level:]
            entropy, agreed = _Entropy.apply(  # type: ignore[no-untyped-call]
                normed.reshape(-1, normed.shape[-1]), wanted.reshape(-1, wanted.shape[-1]), frozen
            )
            regression = (normed - wanted).square().mean() / size
            total = total + _LEVEL_WEIGHT**level * (entropy + _REGRESSION * regression)
            scores.append(LevelScore(float(entropy.detach()), float(agreed.detach())))
        return total, scores


def mean_scores(scores: Sequence[Sequence[LevelScore]]) -> list[LevelScore]:
    """The means of several batches, level by level."""
    return [
        LevelScore(
            sum(score.loss for score in of_level) / len(of_level),
            sum(score.agreed for score in of_level) / len(of_level),
        )
        for of_level in zip(*scores, strict=True)
    ]
