"""Calibration: what the inputs of a layer's matrices look like on a text, one layer at a time.

``HiddenStates`` carries the text through the layers: ``observe`` measures the layer at hand,
``advance`` takes the states past it. Only hidden states, one layer and its statistics are in
memory. It knows neither formats nor files; where weights come from, a checkpoint says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from localrt.errors import MissingExtraError, OptionError
from localrt.models.decoder import (
    Block,
    DecoderConfig,
    GatedMlp,
    LayerNames,
    load_attention,
    resident_mlp,
)
from localrt.models.latent import LatentAttention
from localrt.models.moe import SparseMlp
from localrt.models.units import EMBEDDING
from localrt.models.weights import WeightLoader
from localrt.quant.ops.protocol import Batch

if TYPE_CHECKING:
    from localrt.models.checkpoints import Checkpoint
    from localrt.quant.ops.torch.calibration import CalibrationOps

__all__ = ["HiddenStates", "calibration_ops", "calibration_windows"]

Windows = Sequence[Sequence[int]]


def calibration_windows(
    tokens: Sequence[int],
    *,
    length: int = 512,
    count: int = 32,
    seed: int = 0,
    bos: int | None = None,
) -> list[list[int]]:
    """``count`` windows of ``length`` tokens from all over a text, in order; all if it has fewer.

    ``seed`` chooses them. ``bos`` takes the place of each window's first token.

    Raises:
        OptionError: the text is shorter than one window.
    """
    starts = range(0, len(tokens) - length + 1, length)
    if not starts:
        raise OptionError(
            f"the calibration text has {len(tokens)} tokens: at least {length} are needed"
        )
    chosen = sorted(random.Random(seed).sample(starts, min(count, len(starts))))
    windows = [list(tokens[start : start + length]) for start in chosen]
    if bos is not None:
        for window in windows:
            window[0] = bos
    return windows


def calibration_ops(threads: int | None = None) -> CalibrationOps:
    """What computes the passes.

    Raises:
        MissingExtraError: torch is not installed.
    """
    try:
        from localrt.quant.ops.torch.calibration import CalibrationOps, calibration_format
    except ImportError as error:
        raise MissingExtraError(
            "gptq and mr-gptq compute with torch: pip install 'localrt[quantize]', or use "
            "--method rtn"
        ) from error
    return CalibrationOps(compute_format=calibration_format(), threads=threads)


class HiddenStates:
    """The hidden states of ``windows`` before a layer; at first, their embeddings.

    ``check`` is called between passes, and may raise to stop.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        names: LayerNames,
        ops: CalibrationOps,
        windows: Windows,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._names = names
        self._ops = ops
        self._check = check
        # One cache serves all: a layer reads what a window wrote before the next one writes.
        cache = ops.kv_cache(config.attention, max(map(len, windows)))
        used, numbers = np.unique(
            np.concatenate([np.array(w) for w in windows]), return_inverse=True
        )
        self._batches: list[Batch] = []
        self._hidden: list[Any] = []
        with ops.scope():
            rows = [checkpoint.read(EMBEDDING, token, token + 1) for token in used.tolist()]
            table = ops.weight((len(used), config.hidden_size), rows)
            ends = np.cumsum([len(window) for window in windows])[:-1]
            for ids in np.split(numbers.reshape(-1), ends):
                batch = Batch.extend([(cache, ids.tolist())])
                self._batches.append(batch)
                self._hidden.append(ops.embed(table, ops.begin(batch), config.embedding_scale))

    def observe(self, checkpoint: Checkpoint, layer: int) -> Mapping[str, npt.NDArray[np.float32]]:
        """H of the layer's inputs with the weights of ``checkpoint``; the states stay.

        By the first name of each group of matrices that share an input.
        """
        with self._ops.scope():
            block = self._block(checkpoint, layer)
            weights = _matrices(block, self._names)
            self._ops.watch(weights.values())
            for hidden, batch in zip(self._hidden, self._batches, strict=True):
                self._check()
                block(self._ops, self._ops.copy(hidden), self._ops.begin(batch))
            return {name: self._ops.take_hessian(weight) for name, weight in weights.items()}

    def advance(self, checkpoint: Checkpoint, layer: int) -> None:
        """Take the states past the layer, with the weights of ``checkpoint``."""
        with self._ops.scope():
            block = self._block(checkpoint, layer)
            for number, batch in enumerate(self._batches):
                self._check()
                hidden = self._hidden[number]
                self._hidden[number] = block(self._ops, hidden, self._ops.begin(batch))

    def _block(self, checkpoint: Checkpoint, layer: int) -> Block:
        weights = WeightLoader(checkpoint, self._ops)
        prefix = f"model.layers.{layer}."
        config, names = self._config, self._names
        return Block(
            load_attention(config, layer, names, prefix, weights),
            resident_mlp(config, layer, names, prefix, weights, self._ops),
            config.residual_scale,
        )


def _matrices(block: Block, names: LayerNames) -> dict[str, Any]:
    """A layer's stacked matrices by the first name in them.

    Not a mixture's experts: few rows of a text reach each of them, too few to calibrate by.
    """
    attention = block.attention
    if isinstance(attention, LatentAttention):
        found = attention.matrices()
    else:
        found = {names.qkv[0]: attention.weights.qkv, names.out: attention.weights.out}
    if isinstance(block.mlp, GatedMlp):
        found[names.gate_up[0]] = block.mlp.weights.gate_up
        found[names.down] = block.mlp.weights.down
    elif isinstance(block.mlp, SparseMlp) and block.mlp.shared is not None:
        found[names.mixture.shared_gate_up[0]] = block.mlp.shared.gate_up
        found[names.mixture.shared_down] = block.mlp.shared.down
    return found
