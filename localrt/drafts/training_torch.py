"""A draft head in torch and its training: float32 weights, bfloat16 products.

The head learns to say what the target would say: cross-entropy with the target's own distribution
over the draft vocabulary, and a little regression of the hidden states. A step is unrolled: on its
second level a position takes in what the head itself gave for the position before, and attends as
it will when a tree is drafted (to true positions up to where the guesses begin, and to its own
line of guesses from there), so that guesses of guesses are trained too (EAGLE-3, HASS). What the
head computes is what ``speculative/draft_head.py`` computes.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from localrt.errors import CheckpointError, StorageError
from localrt.files import atomic_write
from localrt.quant.formats import unpack
from localrt.speculative.draft_head import TargetParts
from localrt.speculative.draft_head_file import HeadConfig

if TYPE_CHECKING:
    from localrt.drafts.training import DraftTraining

__all__ = ["HeadModel", "Trainer"]

_LEVELS = 3  # unrolled: guesses, guesses of guesses, and those of these
_LEVEL_WEIGHT = 0.8  # of each deeper level's loss, over the one above
_REGRESSION = 0.1
_RATE = 2e-3
_WARM_UP, _LEAST_RATE = 30, 0.02  # steps; share of the rate at the end
_SHALLOW = 0.3  # the share of the training that needs no guesses of guesses
_CLIP = 1.0
# What begins at zero, so that a new head passes the target's features on.
_ZERO = ("gate_feature", "gate_token", "o_proj", "down_proj")

_Levels = list[tuple[Tensor, Tensor]]  # keys and values (B, G, T, E) of each level so far


class HeadModel:
    """The head. ``weights`` have the names and shapes of ``HeadConfig.shapes``."""

    def __init__(self, config: HeadConfig, device: torch.device | str = "cpu") -> None:
        self._config, self._spec = config, config.decoder.attending[0]
        self.weights = {
            name: _initial(name, shape).to(device).requires_grad_()
            for name, shape in config.shapes().items()
        }

    def __call__(self, features: Tensor, embedded: Tensor, levels: int) -> list[Tensor]:
        """Predicted features (B, T, D) of each level.

        Row i takes in ``features`` (B, T, D) of token i and ``embedded`` (B, T, D) of token i + 1;
        from the second level on, what the level before gave at row i - 1.
        """
        assert self._spec.rope is not None, "a head's blocks have positions"
        frequencies = torch.tensor(self._spec.rope.inv_freq, device=features.device)
        angles = torch.arange(features.shape[1], device=features.device)[:, None] * frequencies
        h2 = F.silu(self._linear(self._norm(embedded, "fusion.token_norm"), "fusion.token"))
        gate = self._linear(h2, "fusion.gate_token")
        held: list[_Levels] = [[] for _ in range(self._config.decoder.layers)]
        outs: list[Tensor] = []
        for _ in range(levels):
            h1 = self._linear(self._norm(features, "fusion.feature_norm"), "fusion.feature")
            z = torch.sigmoid(self._linear(h1, "fusion.gate_feature") + gate)
            x = z * h1 + (1 - z) * h2
            for block, of_block in enumerate(held):
                x = self._block(x, f"model.layers.{block}.", angles, of_block)
            outs.append(x)
            features = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return outs

    def _block(self, x: Tensor, name: str, angles: Tensor, levels: _Levels) -> Tensor:
        """One block; keys and values of this level join ``levels``.

        On level n, row i sees the first level up to row i - n + 1, row i - n + 2 of the second,
        ... and itself.
        """
        spec = self._spec
        batch, length, _ = x.shape
        y = self._norm(x, f"{name}input_layernorm")

        def heads(part: str, count: int) -> Tensor:
            rows = self._linear(y, f"{name}self_attn.{part}_proj")
            return rows.view(batch, length, count, spec.head_dim).transpose(1, 2)

        v = heads("v", spec.kv_heads)
        q = _rotate(heads("q", spec.heads), angles).to(v.dtype)
        levels.append((_rotate(heads("k", spec.kv_heads), angles).to(v.dtype), v))
        rows = torch.arange(length, device=x.device)
        behind = rows[:, None] - rows  # how far a key lies behind
        last = len(levels) - 1
        seen = [behind >= last, *(behind == last - level for level in range(1, last + 1))]
        keys, values = (torch.cat(each, 2) for each in zip(*levels, strict=True))
        mixed = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=torch.cat(seen, 1), enable_gqa=True
        )
        joined = mixed.transpose(1, 2).reshape(batch, length, -1)
        x = x + self._linear(joined, f"{name}self_attn.o_proj")
        y = self._norm(x, f"{name}post_attention_layernorm")
        inner = F.silu(self._linear(y, f"{name}mlp.gate_proj"))
        inner = inner * self._linear(y, f"{name}mlp.up_proj")
        return x + self._linear(inner, f"{name}mlp.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x.float(), x.shape[-1:], weight, self._config.decoder.norm_eps)


def _initial(name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape)
    if name == "fusion.feature.weight":
        return torch.eye(*shape)
    if name.split(".")[-2] in _ZERO:
        return torch.zeros(shape)
    return torch.empty(shape).uniform_(-1, 1) / math.sqrt(shape[1])


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Trainer:
    """A head for ``target`` with its optimizer. ``total`` steps are to be taken."""

    def __init__(
        self, config: HeadConfig, target: TargetParts, training: DraftTraining, total: int
    ) -> None:
        if training.threads is not None:
            torch.set_num_threads(training.threads)
        torch.manual_seed(training.seed)
        self.total = total
        self.step = 0
        self._device = device = torch.device(training.device)
        self._eps, self._softcap = target.eps, target.softcap
        self._norm = torch.tensor(target.norm, device=device)
        head = np.concatenate([unpack(rows) for rows in target.head])
        self._head = torch.tensor(head).to(device, torch.bfloat16)
        embedding = target.embed(range(config.decoder.vocab_size))
        self._embedding = torch.tensor(embedding).to(device, torch.bfloat16)
        self.model = HeadModel(config, device)
        with torch.no_grad():
            size = self._norm.square().mean().sqrt().clamp_min(1e-6)
            self.model.weights["fusion.feature_norm.weight"].copy_(self._norm / size)
        self._optimizer = torch.optim.AdamW(
            self.model.weights.values(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )

    def train(self, tokens: npt.NDArray[np.int32], features: npt.NDArray[np.uint16]) -> float:
        """One step on sequences: tokens (B, L), features (B, L, D) as bfloat16's bits.

        The share of the next tokens that were guessed.
        """
        rise, fall = (self.step + 1) / _WARM_UP, 1 - self.step / self.total
        for group in self._optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, rise) * max(_LEAST_RATE, fall)
        self._optimizer.zero_grad(set_to_none=True)
        levels = 1 if self.step < _SHALLOW * self.total else _LEVELS
        total, agreed = self._loss(tokens, features, levels)
        torch.autograd.backward(total)
        nn.utils.clip_grad_norm_(self.model.weights.values(), _CLIP)
        self._optimizer.step()
        self.step += 1
        return agreed[0]

    @torch.no_grad()
    def score(self, tokens: npt.NDArray[np.int32], features: npt.NDArray[np.uint16]) -> list[float]:
        """How often each level's best guess is the target's."""
        return self._loss(tokens, features, _LEVELS)[1]

    def weights(self) -> dict[str, npt.NDArray[np.float32]]:
        """The head's weights, by their names."""
        return {n: p.detach().float().cpu().numpy() for n, p in self.model.weights.items()}

    def save(self, path: Path) -> None:
        """Write all that ``load`` needs to continue to the same numbers.

        Raises:
            StorageError: the disk is full or fails.
        """
        weights = {name: tensor.detach() for name, tensor in self.model.weights.items()}
        state = {"step": self.step, "weights": weights, "optimizer": self._optimizer.state_dict()}
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
        except (OSError, RuntimeError, LookupError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{path} is damaged: delete it to begin the training again"
            ) from error

    # -- parts -----------------------------------------------------------------------------------

    def _loss(
        self, ids: npt.NDArray[np.int32], halves: npt.NDArray[np.uint16], levels: int
    ) -> tuple[Tensor, list[float]]:
        """What to minimize, and each level's agreement."""
        tokens = torch.from_numpy(ids.astype(np.int64)).to(self._device)
        features = torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16).to(self._device)
        truth = self._normed(features)[:, 1:]
        with torch.autocast(self._device.type, torch.bfloat16):
            embedded = self._embedding[tokens[:, 1:]].float()
            outs = self.model(features[:, :-1].float(), embedded, levels)
        size = truth.square().mean()
        total = torch.zeros((), device=self._device)
        shares = []
        for level, out in enumerate(outs):
            # The first rows of a deeper level have no guesses to go on from.
            normed, wanted = self._normed(out[:, level:]), truth[:, level:]
            # Logits are computed again in the backward pass: all levels' would take gigabytes.
            entropy, agreed = checkpoint(self._entropy, normed, wanted, use_reentrant=False)
            regression = (normed - wanted).square().mean() / size
            total = total + _LEVEL_WEIGHT**level * (entropy + _REGRESSION * regression)
            shares.append(float(agreed))
        return total, shares

    def _entropy(self, normed: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy of guessed rows (B, T, D) with the target's own, and agreement."""
        logits, truth = self._logits(normed), self._logits(wanted)
        agreed = (logits.argmax(-1) == truth.argmax(-1)).float().mean()
        return F.cross_entropy(logits, truth.softmax(-1)), agreed

    def _logits(self, normed: Tensor) -> Tensor:
        """Of rows (B, T, D) past the final norm, over the draft vocabulary, (B * T, V)."""
        logits = F.linear(normed.flatten(0, 1).bfloat16(), self._head)
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits.float()

    def _normed(self, x: Tensor) -> Tensor:
        """The final norm of rows (..., D)."""
        return F.rms_norm(x.float(), x.shape[-1:], self._norm, self._eps)
