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
from localrt.models.config import EMBEDDING, DecoderConfig
from localrt.models.decoder import load_attention, load_resident_mlp
from localrt.models.moe import ResidentExperts
from localrt.models.parts import PassState, Residual, SideBySide
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
        ops: CalibrationOps,
        windows: Windows,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        if any(spec.value_norm for spec in config.attending):
            raise OptionError(
                f"gptq and mr-gptq do not know {config.architecture}'s layers: use --method rtn"
            )
        self._config = config
        self._ops = ops
        self._check = check
        # One cache serves all: a layer reads what a window wrote before the next one writes.
        cache = ops.kv_cache(config.memory, max(map(len, windows)))
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
            parts = self._layer(checkpoint, layer)
            weights = {name: weight for part in parts for name, weight in part.matrices().items()}
            self._ops.watch(weights.values())
            for hidden, batch in zip(self._hidden, self._batches, strict=True):
                self._check()
                self._run(parts, self._ops.copy(hidden), batch)
            return {name: self._ops.take_hessian(weight) for name, weight in weights.items()}

    def advance(self, checkpoint: Checkpoint, layer: int) -> None:
        """Take the states past the layer, with the weights of ``checkpoint``."""
        with self._ops.scope():
            parts = self._layer(checkpoint, layer)
            for number, batch in enumerate(self._batches):
                self._check()
                self._hidden[number] = self._run(parts, self._hidden[number], batch)

    def _layer(self, checkpoint: Checkpoint, layer: int) -> list[Residual | SideBySide]:
        weights, parts = WeightLoader(checkpoint, self._ops), list[Residual | SideBySide]()
        if self._config.memory_of(layer):
            attention = load_attention(self._config, layer, weights)
            assert isinstance(attention, Residual | SideBySide), "others have been refused"
            parts.append(attention)
        if self._config.has_mlp(layer):
            mlp = load_resident_mlp(self._config, layer, weights, self._ops, ResidentExperts())
            assert isinstance(mlp, Residual), "as attention"
            parts.append(mlp)
        return parts

    def _run(self, parts: Sequence[Residual | SideBySide], hidden: Any, batch: Batch) -> Any:
        """The hidden states behind ``parts``; ``hidden`` is given up."""
        state = PassState(self._ops, self._ops.begin(batch), hidden)
        for part in parts:
            part(state)
        return state.x
