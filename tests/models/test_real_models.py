"""Real GGUF files against transformers' own GGUF loading: logits, and greedy text, in float32."""

from __future__ import annotations

from contextlib import closing
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
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
NEW_TOKENS = 12
# Top two logits closer than this may swap between two correct float32 implementations.
TIE = 1e-3


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids])).logits[0].numpy())


def greedy(decoder: Decoder, prompts: list[list[int]]) -> list[list[int]]:
    """Every prompt's greedy continuation, all in one batch."""
    caches = [decoder.cache(len(ids) + NEW_TOKENS) for ids in prompts]
    last = np.cumsum([len(ids) for ids in prompts]) - 1
    step = decoder.forward(Batch.extend(list(zip(caches, prompts, strict=True))), rows=list(last))
    texts: list[list[int]] = [[] for _ in prompts]
    for _ in range(NEW_TOKENS):
        tokens = [int(t) for t in step.argmax(1)]
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        batch = Batch.extend([(c, [t]) for c, t in zip(caches, tokens, strict=True)])
        step = decoder.forward(batch)
    return texts


def check_logits(ours: Decoder, theirs: Any, ids: list[int]) -> None:
    """Of a prompt beyond a block of the cache, and of tokens one by one behind it."""
    expected = logits_of(theirs, ids)
    cache, rows = ours.cache(len(ids)), [*range(0, 290, 7)]
    got = ours.forward(Batch.extend([(cache, ids[:-3])]), rows=rows)
    assert relative_error(got, expected[rows]) < 1e-4
    got = np.concatenate([ours.forward(Batch.extend([(cache, [t])])) for t in ids[-3:]])
    assert relative_error(got, expected[-3:]) < 1e-4


def check_greedy(ours: Decoder, theirs: Any, prompts: list[list[int]]) -> None:
    """Given the same tokens so far, transformers' own best next token is ours at every step."""
    for prompt, text in zip(prompts, greedy(ours, prompts), strict=True):
        expected = logits_of(theirs, prompt + text)[len(prompt) - 1 : -1]
        best = expected.max(axis=1)
        chosen = expected[np.arange(NEW_TOKENS), text]
        assert (best - chosen < TIE).all()


@pytest.mark.parametrize("name", ["smollm2", "qwen0.5b", "gemma270m"])
def test_real_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test a model, as opening it in float32 takes longest."""
    import gguf
    import transformers

    reader = gguf.GGUFReader

    @cache  # it takes seconds, twice, and twice as long in pieces of a file that is mapped
    def read(path: str) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8))
            return reader(path)

    monkeypatch.setattr(gguf, "GGUFReader", read)
    path = real_model(name)
    with closing(open_checkpoint(path)) as checkpoint:
        ops = TorchOps(compute_format="f32")
        ours = load_decoder(checkpoint, ops, read_config(checkpoint))
        tokenizer = load_tokenizer(checkpoint)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    check_logits(ours, theirs, (tokenizer.encode(" ".join(PROMPTS)) * 20)[:300])
    check_greedy(ours, theirs, [tokenizer.encode(text) for text in PROMPTS])
