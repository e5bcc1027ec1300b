"""Logits of real GGUF files against those of transformers' own loading of them, in float32.

``python -m tests.models.test_real_models`` computes transformers' anew.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import load_decoder, read_config
from localrt.models.tokenizers import load_tokenizer
from localrt.quant.ops.protocol import Batch
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny import oracle, relative_error
from tests.real_models import find_real_model, real_model

NAMES = ("smollm2", "qwen0.5b")
THEIRS = Path(__file__).with_name("real_logits.npz")
"""Of each model the token ids, and of some rows the likeliest tokens and their logits."""
ROWS, KEPT = np.asarray([*range(0, 290, 7), 297, 298, 299]), 64

TEXT = """
The capital of France is Paris. Die Hauptstadt von Deutschland ist
def fibonacci(n):
    <html>
<body>
"""


@pytest.mark.real
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.slow)])
def test_real_model(name: str) -> None:
    """Of a prompt beyond a block of the cache, and of tokens one by one behind it."""
    with np.load(THEIRS) as kept:
        expected, tokens = kept[f"{name} logits"], kept[f"{name} tokens"]
        ids = kept[f"{name} ids"].tolist()
    with closing(open_checkpoint(real_model(name))) as checkpoint:
        ops = TorchOps(compute_format="f32")
        ours = load_decoder(checkpoint, ops, read_config(checkpoint))
        assert (load_tokenizer(checkpoint).encode(TEXT) * 20)[:300] == ids
    cache = ours.cache(len(ids))
    parts = [ours.forward(Batch.extend([(cache, ids[:-3])]), rows=ROWS[:-3].tolist())]
    parts += [ours.forward(Batch.extend([(cache, [token])])) for token in ids[-3:]]
    got = np.concatenate(parts)
    assert relative_error(np.take_along_axis(got, tokens, axis=1), expected) < 1e-4
    assert (got.argmax(axis=1) == tokens[:, 0]).all()


def write() -> None:
    """Compute transformers' logits."""
    from tests.models.tiny_configs import hf

    arrays: dict[str, Any] = {}
    for name in NAMES:
        path = find_real_model(name)
        assert path is not None, name
        with closing(open_checkpoint(path)) as checkpoint:
            ids = (load_tokenizer(checkpoint).encode(TEXT) * 20)[:300]
        model = hf.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype="float32"
        )
        logits = oracle(model.eval(), ids)[ROWS]
        tokens = np.argsort(-logits, axis=1)[:, :KEPT].astype(np.int32)
        arrays[f"{name} ids"] = np.asarray(ids, np.int32)
        arrays[f"{name} tokens"] = tokens
        arrays[f"{name} logits"] = np.take_along_axis(logits, tokens, axis=1)
    np.savez_compressed(THEIRS, **arrays)


if __name__ == "__main__":
    write()
