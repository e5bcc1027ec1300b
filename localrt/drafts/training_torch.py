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
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localrt.drafts.training_data import Learnt
from localrt.drafts.training_model import HeadModel
from localrt.drafts.training_options import DraftTraining
from localrt.errors import CheckpointError, StorageError
from localrt.files import atomic_write

__all__ = ["Trainer"]

Tokens = npt.NDArray[np.int32]
Halves = npt.NDArray[np.uint16]

_LEVEL_WEIGHT = 0.8  # of each deeper level's loss, over the one above
_REGRESSION = 0.1
_RATE = 2e-3
_WARM_UP, _LEAST_RATE = 30, 0.02  # steps; share of the rate at the end
_SHALLOW = 0.3  # the share of the training that needs no guesses of guesses
_CLIP = 1.0
_ROWS = 512  # of logits at a time


class _Frozen:
    """What the head takes from its target: embedding, rows of the head, the final norm."""

    def __init__(self, learnt: Learnt, device: torch.device) -> None:
        def tensor(array: npt.NDArray[np.float32], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)

        self.embedding = tensor(learnt.embedding, torch.bfloat16)
        self.head = tensor(learnt.head, torch.bfloat16)
        self.norm = tensor(learnt.norm, torch.float32)
        self.softcap = learnt.softcap
        self._eps = learnt.eps

    def logits(self, normed: Tensor) -> Tensor:
        """Of rows (..., D) past the final norm, over the draft vocabulary."""
        logits = F.linear(normed.bfloat16(), self.head)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.float()

    def normed(self, x: Tensor) -> Tensor:
        """The final norm of rows (..., D)."""
        return F.rms_norm(x.float(), x.shape[-1:], self.norm, self._eps)


class _Entropy(torch.autograd.Function):
    """Mean cross-entropy of guessed rows (n, D) with the target's own (n, D), both normed.

    And the share of rows whose likeliest token is the same. A few rows at a time: whole logits
    would take longer to write and read than to compute. The gradient is made with the loss.
    """

    @staticmethod
    def forward(ctx: Any, guessed: Tensor, truth: Tensor, frozen: _Frozen) -> tuple[Tensor, Tensor]:
        n = len(guessed)
        grad = torch.empty_like(guessed)
        entropy = torch.zeros((), device=guessed.device)
        agreed = torch.zeros((), device=guessed.device)
        for start in range(0, n, _ROWS):
            part = slice(start, start + _ROWS)
            target, logits = frozen.logits(truth[part]), frozen.logits(guessed[part])
            wanted, chances = target.softmax(-1), logits.softmax(-1)
            top, best = logits.max(-1)
            # log-sum-exp, from the likeliest token's logit and chance
            total = top - chances.gather(-1, best[:, None]).squeeze(-1).log()
            entropy += (total - (wanted * logits).sum(-1)).sum()
            agreed += (best == target.argmax(-1)).sum()
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


class Trainer:
    """A head with its optimizer. ``total`` steps are to be taken, unrolled to ``levels``."""

    def __init__(self, learnt: Learnt, training: DraftTraining, *, total: int, levels: int) -> None:
        if training.threads is not None:
            torch.set_num_threads(training.threads)
        torch.manual_seed(training.seed)
        self._total = total
        self._levels = levels
        self._device = torch.device(training.device)
        self._frozen = _Frozen(learnt, self._device)
        self.model = HeadModel(learnt.config, self._device)
        norm = self._frozen.norm
        with torch.no_grad():
            self.model.weights["fusion.feature_norm.weight"].copy_(
                norm / norm.square().mean().sqrt().clamp_min(1e-6)
            )
        self._parameters = list(self.model.weights.values())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )
        self.step = 0

    def train(self, tokens: Tokens, features: Halves) -> float:
        """One step on sequences: tokens (B, L), features (B, L, D) as bfloat16's bits.

        The share of the next tokens that were guessed.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = _RATE * self._share()
        self._optimizer.zero_grad(set_to_none=True)
        levels = 1 if self.step < _SHALLOW * self._total else self._levels
        total, _, agreed = self._loss(tokens, features, levels)
        torch.autograd.backward(total)
        nn.utils.clip_grad_norm_(self._parameters, _CLIP)
        self._optimizer.step()
        self.step += 1
        return agreed[0]

    @torch.no_grad()
    def score(self, tokens: Tokens, features: Halves) -> tuple[list[float], list[float]]:
        """Each level's cross-entropy, and how often its best guess is the target's."""
        return self._loss(tokens, features, self._levels)[1:]

    def weights(self) -> dict[str, npt.NDArray[np.float32]]:
        """The head's weights, by their names."""
        return {n: p.detach().float().cpu().numpy() for n, p in self.model.weights.items()}

    def save(self, path: Path) -> None:
        """Write all that ``load`` needs to continue to the same numbers.

        Raises:
            StorageError: the disk is full or fails.
        """
        state = {
            "step": self.step,
            "weights": {name: tensor.detach() for name, tensor in self.model.weights.items()},
            "optimizer": self._optimizer.state_dict(),
        }
        try:
            with atomic_write(path) as stream:
                torch.save(state, stream)
        except (OSError, RuntimeError) as error:
            raise StorageError(f"{path} cannot be written: {error}") from error

    def load(self, path: Path) -> None:
        """Continue from a file of ``save``, if there is one.

        Raises:
            CheckpointError: it is damaged.
        """
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location=self._device, weights_only=True)
            with torch.no_grad():
                for name, tensor in self.model.weights.items():
                    tensor.copy_(state["weights"][name])
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

    def _loss(
        self, ids: Tokens, halves: Halves, levels: int
    ) -> tuple[Tensor, list[float], list[float]]:
        """What to minimize, and each level's cross-entropy and agreement."""
        frozen = self._frozen
        tokens = torch.from_numpy(ids.astype(np.int64)).to(self._device)
        features = torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16).to(self._device)
        truth = frozen.normed(features)[:, 1:]
        with torch.autocast(self._device.type, torch.bfloat16):
            embedded = frozen.embedding[tokens[:, 1:]].float()
            outs = self.model(features[:, :-1].float(), embedded, levels)
        size = truth.square().mean()
        total = torch.zeros((), device=self._device)
        losses, shares = [], []
        for level, out in enumerate(outs):
            # The first rows of a deeper level have no guesses to go on from.
            normed, wanted = frozen.normed(out[:, level:]), truth[:, level:]
            entropy, agreed = _Entropy.apply(  # type: ignore[no-untyped-call]
                normed.reshape(-1, normed.shape[-1]), wanted.reshape(-1, wanted.shape[-1]), frozen
            )
            regression = (normed - wanted).square().mean() / size
            total = total + _LEVEL_WEIGHT**level * (entropy + _REGRESSION * regression)
            losses.append(float(entropy.detach()))
            shares.append(float(agreed.detach()))
        return total, losses, shares
