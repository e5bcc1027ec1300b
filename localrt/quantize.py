"""Quantizes a model layer by layer, each calibrated on what the quantized ones before it give.

Two passes of a layer over the calibration text: one with its own weights, to learn its inputs; one
with the quantized ones, for the next layer's inputs. Memory: the hidden states of the text, and one
layer's statistics. It knows neither files nor stores: a caller takes each weight as it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from localrt.engine.types import Progress, ProgressCallback
from localrt.errors import OptionError
from localrt.models.decoder import Block, Decoder, GatedMlp
from localrt.quant.formats import Format
from localrt.quant.methods import Quantized, quantize, restore
from localrt.quant.ops.protocol import Batch

if TYPE_CHECKING:
    from localrt.quant.ops.calibration import CalibrationOps

__all__ = ["calibration_windows", "quantize_decoder"]


def calibration_windows(
    tokens: Sequence[int], *, length: int = 512, count: int = 128
) -> list[list[int]]:
    """The first ``count`` windows of ``length`` tokens of a calibration text.

    Raises:
        OptionError: the text is shorter than one window.
    """
    starts = range(0, len(tokens) - length + 1, length)[:count]
    if not starts:
        raise OptionError(
            f"the calibration text has {len(tokens)} tokens: at least {length} are needed"
        )
    return [list(tokens[start : start + length]) for start in starts]


def quantize_decoder(
    decoder: Decoder,
    ops: CalibrationOps,
    format_: Format,
    *,
    method: str = "rtn",
    windows: Sequence[Sequence[int]] = (),
    take: Callable[[Quantized], None] | None = None,
    progress: ProgressCallback | None = None,
) -> None:
    """Put what ``format_`` leaves of every layer's matrices in their place.

    Embedding and head stay as they are. ``decoder`` must have been loaded with ``ops``; ``windows``
    are calibration tokens, needed by every method but rtn. ``take`` gets each
    packed weight, named ``model.layers.N.self_attn.qkv`` and so on (q, k, v and gate, up stacked).

    Raises:
        OptionError: see ``quantize``.
    """
    if method == "rtn":
        windows = ()
    elif not windows:
        raise OptionError(f"method {method} needs calibration text: give --calibration")
    with ops.scope():
        states = _States(decoder, ops, windows)
        for layer, block in enumerate(decoder.blocks):
            weights = dict(_matrices(layer, block))
            ops.watch(weights.values() if windows else ())
            states.observe(block)
            for name, weight in weights.items():
                hessian = ops.hessian(weight) if windows else None
                done = quantize(
                    ops.values(weight), format_, method=method, hessian=hessian, name=name
                )
                ops.replace(weight, restore(done))
                if take is not None:
                    take(done)
            ops.watch(())
            states.advance(block)
            if progress is not None:
                progress(Progress("quantize", layer + 1, len(decoder.blocks), "layers"))


class _States:
    """Hidden states of the calibration windows before the layer at hand."""

    def __init__(
        self, decoder: Decoder, ops: CalibrationOps, windows: Sequence[Sequence[int]]
    ) -> None:
        self._ops = ops
        self._batches: list[Batch] = []
        self._hidden: list[Any] = []
        if not windows:
            return
        # One cache serves all: a layer reads what a window wrote before the next one writes.
        cache = decoder.cache(max(len(window) for window in windows))
        scale = decoder.config.embedding_scale
        for window in windows:
            batch = Batch.extend([(cache, window)])
            self._batches.append(batch)
            self._hidden.append(ops.embed(decoder.embedding, ops.begin(batch), scale))

    def observe(self, block: Block) -> None:
        """Run the layer for its inputs' sake."""
        for hidden, batch in zip(self._hidden, self._batches, strict=True):
            block(self._ops, self._ops.copy(hidden), self._ops.begin(batch))

    def advance(self, block: Block) -> None:
        """Run the layer for the next one."""
        pairs = zip(self._hidden, self._batches, strict=True)
        self._hidden = [block(self._ops, hidden, self._ops.begin(batch)) for hidden, batch in pairs]


def _matrices(layer: int, block: Block) -> Iterator[tuple[str, Any]]:
    prefix = f"model.layers.{layer}."
    yield f"{prefix}self_attn.qkv", block.attention.weights.qkv
    yield f"{prefix}self_attn.o_proj", block.attention.weights.out
    if isinstance(block.mlp, GatedMlp):
        yield f"{prefix}mlp.gate_up", block.mlp.weights.gate_up
        yield f"{prefix}mlp.down_proj", block.mlp.weights.down
