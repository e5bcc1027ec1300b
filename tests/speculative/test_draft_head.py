"""The draft head's arithmetic, against plain numpy in float64 and against the training's torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localrt.drafts.training_torch import HeadModel
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import read_config
from localrt.quant.formats import pack, unpack
from localrt.quant.ops.native.abi import find_library
from localrt.speculative.draft_head import DraftHead, target_parts
from localrt.speculative.draft_head_file import HeadConfig
from tests.speculative.tiny_head import random_weights, write_tiny_head

pytestmark = pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")

Weights = dict[str, np.ndarray]
TOKENS = [5, 17, 5, 200, 33, 8, 9, 120]


@pytest.fixture(scope="module")
def made(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The head, and its weights as they are on disk, in float64."""
    from localrt.quant.ops.native.ops import NativeOps

    config = write_tiny_head(tmp_path_factory.mktemp("head"), tiny_folder)
    ops = NativeOps(threads=2)
    checkpoint = open_checkpoint(tiny_folder)
    parts = target_parts(checkpoint, read_config(checkpoint), config.draft_tokens)
    head = DraftHead(config, parts, ops)
    # As int8 in memory, of float16 in the file.
    values = {n: _held(v, config) for n, v in random_weights(config).items()}
    target = {
        "embedding": unpack(checkpoint.read("model.embed_tokens.weight")).astype(np.float64),
        "head": unpack(checkpoint.read("lm_head.weight")).astype(np.float64)[config.draft_tokens],
        "norm": unpack(checkpoint.read("model.norm.weight")).reshape(-1).astype(np.float64),
    }
    return config, head, values, target


def _held(values: np.ndarray, config: HeadConfig) -> np.ndarray:
    if values.ndim == 2:
        values = unpack(pack(values.astype(np.float16).astype(np.float32), config.format))
    return values.astype(np.float64)


def random_features(count: int, config: HeadConfig, *, seed: int) -> np.ndarray:
    size = (count, config.decoder.hidden_size)
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def rms(x: np.ndarray, weight: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return np.asarray(x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight)


def silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1 + np.exp(-x)))


def plain_fusion(w: Weights, features: np.ndarray, embedded: np.ndarray) -> np.ndarray:
    """h1 = H W1; h2 = SiLU(E W2); z = sigmoid([h1; h2] Wz); z * h1 + (1 - z) * h2."""
    h1 = rms(features, w["fusion.feature_norm.weight"]) @ w["fusion.feature.weight"].T
    h2 = silu(rms(embedded, w["fusion.token_norm.weight"]) @ w["fusion.token.weight"].T)
    both = np.concatenate([h1, h2], axis=1)
    gates = np.concatenate([w["fusion.gate_feature.weight"], w["fusion.gate_token.weight"]], axis=1)
    z = 1 / (1 + np.exp(-both @ gates.T))
    return np.asarray(z * h1 + (1 - z) * h2)


def plain_head(
    config: HeadConfig,
    w: Weights,
    target: Weights,
    features: np.ndarray,
    tokens: Sequence[int],
    positions: Sequence[int],
    seen: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Features and logits of rows that see each other as ``seen`` says."""
    x = plain_fusion(w, features, target["embedding"][list(tokens)])
    angles = np.outer(positions, config.decoder.attention[0].rope.inv_freq)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def turned(y: np.ndarray) -> np.ndarray:
        a, b = np.split(y, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    spec = config.decoder.attention[0]
    size, group = spec.head_dim, spec.heads // spec.kv_heads
    for block in range(config.decoder.layers):
        own = {
            n.removeprefix(f"model.layers.{block}."): v
            for n, v in w.items()
            if n.startswith(f"model.layers.{block}.")
        }
        y = rms(x, own["input_layernorm.weight"])
        q, k, v = (
            (y @ own[f"self_attn.{n}_proj.weight"].T).reshape(len(x), -1, size) for n in "qkv"
        )
        q, k = turned(q), turned(k)
        k, v = (np.repeat(t, group, axis=1) for t in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) * size**-0.5
        scores = np.where(seen, scores, -np.inf)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        chances /= chances.sum(-1, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", chances, v).reshape(len(x), -1)
        x = x + mixed @ own["self_attn.o_proj.weight"].T
        y = rms(x, own["post_attention_layernorm.weight"])
        inner = silu(y @ own["mlp.gate_proj.weight"].T) * (y @ own["mlp.up_proj.weight"].T)
        x = x + inner @ own["mlp.down_proj.weight"].T
    return x, rms(x, target["norm"]) @ target["head"].T


def close(ours: np.ndarray, exact: np.ndarray) -> None:
    """As near as kernels come that quantize activations to 8 bits."""
    assert np.abs(ours - exact).max() < 0.03 * np.abs(exact).max()


def test_the_fusion_is_the_papers(made: Any) -> None:
    config, head, w, target = made
    features = random_features(8, config, seed=0)
    exact = plain_fusion(w, features.astype(np.float64), target["embedding"][TOKENS])
    ours = head.fuse(features, TOKENS)
    assert np.abs(ours - exact).max() < 2e-3 * np.abs(exact).max()
    again = head.fuse(features, TOKENS)  # with what is remembered of the tokens
    np.testing.assert_array_equal(ours, again)


def test_a_sequence_is_computed_as_plain_arithmetic_says(made: Any) -> None:
    config, head, w, target = made
    features = random_features(8, config, seed=2)
    exact, logits = plain_head(
        config, w, target, features, TOKENS, range(8), np.tril(np.ones((8, 8), bool))
    )
    cache = head.cache(32)
    whole, ours = head.forward(cache, features, TOKENS, np.arange(8), wanted=8)
    close(whole, exact)
    close(ours, logits)
    cache = head.cache(32)
    _, none = head.forward(cache, features[:3], TOKENS[:3], np.arange(3), wanted=0)
    assert none.shape == (0, len(config.draft_tokens))
    rest, last = head.forward(cache, features[3:], TOKENS[3:], np.arange(3, 8), wanted=1)
    np.testing.assert_array_equal(rest, whole[3:])
    np.testing.assert_array_equal(last, ours[7:])


def test_training_computes_the_same_head(made: Any) -> None:
    """Level by level: a deeper one sees true rows first, then its own line of guesses."""
    config, _, w, target = made
    length, levels = 8, 3
    features = random_features(length, config, seed=3).astype(np.float64)
    model = HeadModel(config)
    model.weights = {name: torch.tensor(value).float() for name, value in w.items()}
    embedded = torch.tensor(target["embedding"][TOKENS]).float()
    with torch.no_grad():
        outs = model(torch.tensor(features).float()[None], embedded[None], levels)
    known = features.copy()
    for row in range(levels - 1, length):
        # The line of guesses that ends in this row: true rows, then the head's own features.
        fed, tokens, positions = list(known[: row - levels + 2]), TOKENS[: row + 1], range(row + 1)
        for _ in range(levels - 1):
            count = len(fed)
            out, _ = plain_head(
                config,
                w,
                target,
                np.array(fed),
                tokens[:count],
                positions[:count],
                np.tril(np.ones((count, count), bool)),
            )
            fed.append(out[-1])
        out, _ = plain_head(
            config,
            w,
            target,
            np.array(fed),
            tokens,
            positions,
            np.tril(np.ones((row + 1, row + 1), bool)),
        )
        ours = outs[levels - 1][0, row].numpy()
        assert np.abs(ours - out[-1]).max() < 1e-3 * np.abs(out).max()
