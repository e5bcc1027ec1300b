"""Logits of real GGUF files against transformers' own loading of them, in float32."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest

from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import load_decoder, read_config
from localrt.models.tokenizers import load_tokenizer
from localrt.quant.ops.protocol import Batch
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny import oracle, relative_error
from tests.models.tiny_configs import hf
from tests.real_models import real_model

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1800)]

TEXT = """
The capital of France is Paris. Die Hauptstadt von Deutschland ist
def fibonacci(n):
    <html>
<body>
"""


@pytest.mark.parametrize("name", ["smollm2", "qwen0.5b", "gemma270m"])
def test_real_model(name: str) -> None:
    """Of a prompt beyond a block of the cache, and of tokens one by one behind it."""
    path = real_model(name)
    with closing(open_checkpoint(path)) as checkpoint:
        ops = TorchOps(compute_format="f32")
        ours = load_decoder(checkpoint, ops, read_config(checkpoint))
        ids = (load_tokenizer(checkpoint).encode(TEXT) * 20)[:300]
    theirs: Any = hf.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype="float32"
    )
    expected, cache, rows = oracle(theirs.eval(), ids), ours.cache(len(ids)), [*range(0, 290, 7)]
    got = ours.forward(Batch.extend([(cache, ids[:-3])]), rows=rows)
    assert relative_error(got, expected[rows]) < 1e-4
    got = np.concatenate([ours.forward(Batch.extend([(cache, [t])])) for t in ids[-3:]])
    assert relative_error(got, expected[-3:]) < 1e-4
