"""Tiny random models of every architecture, written by Hugging Face transformers, our oracle."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.ops.protocol import Batch, Ops, Span
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny_configs import CONFIGS, MIXTURES, SIZES

_LISTED = ("layer_types", "mlp_layer_types", "num_attention_heads_per_layer", "layer_rope_theta")


def save_tiny(
    name: str, folder: Path, seed: int = 0, *, layers: int | None = None, vocab: int | None = None
) -> Any:
    """Write a random model as a Hugging Face folder; returns transformers' own, in float32.

    ``layers`` are the first that it keeps; ``vocab`` is another number of tokens.
    """
    config = (CONFIGS | MIXTURES)[name]()
    if vocab is not None:
        config.get_text_config().vocab_size = vocab
    if layers is not None:
        keep_layers(config.get_text_config(), layers)
    model = random_model(config, seed)
    model.save_pretrained(folder)
    return model


def keep_layers(text: Any, layers: int) -> None:
    """Leave a text model's first ``layers`` in its config."""
    text.num_hidden_layers = layers
    for listed in _LISTED:
        if getattr(text, listed, None) is not None:
            setattr(text, listed, getattr(text, listed)[:layers])


def auto_class(config: Any) -> Any:
    """Transformers' class that makes the model of a config."""
    auto = transformers.AutoModelForCausalLM
    text = config.get_text_config() is config and type(config) in auto._model_mapping
    return auto if text else transformers.AutoModelForImageTextToText


def random_model(config: Any, seed: int = 0) -> Any:
    """Transformers' model of a config, in float32."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = auto_class(config).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Random norms and biases too, so that none can be forgotten unseen.
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
            if parameter.ndim == 1:
                parameter.add_(0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
            if name.endswith("tid2eid"):
                order = torch.rand(len(buffer), config.n_routed_experts).argsort(1)
                buffer.copy_(order[:, : buffer.shape[1]])
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    return model.float().eval()


def load_ours(folder: Path, ops: Ops | None = None, *, context: int | None = None) -> Decoder:
    """The same folder through localrt, computing in float32 where nothing else is said."""
    with closing(open_checkpoint(folder)) as checkpoint:
        config = read_config(checkpoint, context=context)
        return load_decoder(checkpoint, ops or TorchOps(compute_format="f32", device="cpu"), config)


def oracle(model: Any, ids: list[int]) -> np.ndarray:
    """The logits of transformers' model."""
    if model.config.model_type == "llama4":  # whose class fails without pictures
        model = model.language_model
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return np.asarray(logits.float().numpy())


def logits_of(path: Path, ids: list[int]) -> np.ndarray:
    """The logits of the model at ``path`` in one pass, computed in float32."""
    ours = load_ours(path, context=len(ids))
    return ours.forward(Batch.extend([(ours.cache(len(ids)), ids)]))


def edited(folder: Path, **changes: Any) -> Path:
    """``folder`` with changes to its config."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}))
    return folder


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, SIZES["vocab_size"], count)]


def check_tree(decoder: Decoder, whole: np.ndarray) -> None:
    """A tree's path, and what follows it, have the bits of ``whole``, the logits of ``tokens``."""
    ids, held, cache = tokens(len(whole)), 41, decoder.cache(256)
    decoder.forward(Batch.extend([(cache, ids[:held])]))
    branch = [ids[held], 9, ids[held + 1], 11, ids[held + 2], ids[held + 3]]
    parents, path = [-1, -1, 0, 1, 2, 4], [0, 2, 4, 5]
    mask = np.eye(6, dtype=bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    places = held + mask.sum(1).astype(np.int64) - 1
    logits = decoder.forward(Batch(np.array(branch), places, (Span(cache, 6, mask),)))
    np.testing.assert_array_equal(logits[path], whole[held : held + 4])
    cache.select(held, path)
    behind = decoder.forward(Batch.extend([(cache, ids[held + 4 :])]))
    np.testing.assert_array_equal(behind, whole[held + 4 :])


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference over the largest magnitude."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())
