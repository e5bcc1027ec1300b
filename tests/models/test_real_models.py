"""Real GGUF files against transformers' own GGUF loading: logits, and greedy text, in float32."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import load_decoder, read_config
from localrt.models.tokenizers import load_tokenizer
from localrt.quant.ops.protocol import Batch
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny import relative_error
from tests.real_models import real_model

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Die Hauptstadt von Deutschland ist",
    "<html>\n<body>\n<h1>",
]


@pytest.fixture(scope="module", params=["smollm2", "qwen0.5b", "gemma270m"])
def pair(request: pytest.FixtureRequest) -> Any:
    """(our decoder, our tokenizer, transformers' model), float32."""
    import transformers

    path = real_model(request.param)
    with closing(open_checkpoint(path)) as checkpoint:
        ops = TorchOps(compute_format="f32")
        ours = load_decoder(checkpoint, ops, read_config(checkpoint))
        tokenizer = load_tokenizer(checkpoint)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return ours, tokenizer, theirs.eval()


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids])).logits[0].numpy())


def test_logits(pair: Any) -> None:
    """Of a prompt beyond a block of the cache, and of tokens one by one behind it."""
    ours, tokenizer, theirs = pair
    ids = (tokenizer.encode(" ".join(PROMPTS)) * 20)[:300]
    expected = logits_of(theirs, ids)
    cache, rows = ours.cache(len(ids)), [*range(0, 290, 7)]
    got = ours.forward(Batch.extend([(cache, ids[:-3])]), rows=rows)
    assert relative_error(got, expected[rows]) < 1e-4
    got = np.concatenate([ours.forward(Batch.extend([(cache, [t])])) for t in ids[-3:]])
    assert relative_error(got, expected[-3:]) < 1e-4
