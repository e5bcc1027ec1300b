"""Picture rows in a decoder on our kernels, for ``scripts/gpu_check``: rows that replace embeddings
or follow the first layer, positions on three axes, bidirectional attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.gpu.configs import (
    ARCHITECTURES,
    largest_error,
    random_ids,
    random_model,
    tiny_config,
)
from benchmarks.gpu.timing import Check, Values
from localrt.models.decoder import Decoder
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.ops.protocol import Batch, PictureRows, Span
from localrt.quant.reference.ops import TorchOps

_BOUND = 0.05
_SIDE = 6  # a picture has 6 x 6 rows
_TEXT = 60
_SECTIONS = {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}


def check_pictures(device: str) -> Iterator[Check]:
    """Compare logits after pictures with float32 on the CPU, also if passes cut a picture."""
    for name, extra in (("Qwen2ForCausalLM", _SECTIONS), ("Gemma3ForCausalLM", {})):
        yield f"pictures {name}", partial(_compared, name, extra, device)


def _compared(name: str, extra: Values, device: str) -> Values:
    config = {**ARCHITECTURES[name], **extra, **tiny_config(device)}
    both_ways = name.startswith("Gemma")
    cuts = [100] if both_ways else [60, 17]
    reference = random_model(name, config, TorchOps(compute_format="f32", device="cpu"))
    wanted = _logits(reference, cuts[0], both_ways=both_ways)
    model = random_model(name, config, CudaOps(device=device))
    found = [_logits(model, cut, both_ways=both_ways) for cut in cuts]
    error = max(largest_error(each, wanted) for each in found)
    same = all(np.array_equal(each, found[0]) for each in found)
    values = {"bound": _BOUND, "relative_error": error, "rows_bitwise_equal": same}
    return {"ok": error < _BOUND and same, **values}


def _logits(model: Decoder, most: int, *, both_ways: bool) -> np.ndarray:
    """Logits of a text with a picture, in passes of at most ``most`` rows."""
    config, rows = model.config, _SIDE * _SIDE
    ids = np.asarray(random_ids({"vocab_size": config.vocab_size}, _TEXT + rows), np.int64)
    begin, end = 20, 20 + rows
    seen = np.random.default_rng(1).standard_normal((rows, config.hidden_size), np.float32)
    axes = np.repeat(np.arange(len(ids))[None], 3, 0)
    axes[:, begin:end] = begin + np.stack(
        [np.zeros(rows, int), np.arange(rows) // _SIDE, np.arange(rows) % _SIDE]
    )
    axes[:, end:] += _SIDE - rows
    ahead = np.zeros(len(ids), np.int32)
    if both_ways:
        ahead[begin:end] = end - 1 - np.arange(begin, end)
    cache, parts = model.cache(256), []
    for first in range(0, len(ids), most):
        last = min(len(ids), first + most)
        index = np.arange(max(first, begin), min(last, end))
        pictures = None
        if len(index):
            own = seen[index - begin]
            pictures = PictureRows(index - first, own, (0.1 * own,))
        span = Span(cache, last - first, None, ahead[first:last] if both_ways else None)
        places = np.arange(first, last) if both_ways else axes[0, first:last].copy()
        batch = Batch(
            ids[first:last], places, (span,), pictures, None if both_ways else axes[:, first:last]
        )
        parts.append(model.forward(batch))
    return np.concatenate(parts)
