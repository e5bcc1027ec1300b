"""A draft head on a GPU, for ``scripts/gpu_check``: right, and what a step of it costs.

An EAGLE-3 head beside a resident model, both of random weights: logits against the same head in
float32, then the seconds of a step, and of the target's passes over a tree's rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common.random_store import RandomCheckpoint, RandomPackedCheckpoint
from benchmarks.gpu.configs import QWEN_1_5B, SMALLEST, TINY, largest_error, random_ids
from benchmarks.gpu.timing import RUNS, Result, guarded, timed
from localrt.models.decoder import Decoder
from localrt.models.heads import HeadConfig, Shared, load_head
from localrt.models.layers.heads import FeatureBlock
from localrt.models.registry import load_decoder, read_config
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.ops.features import AFTER_LAST
from localrt.quant.ops.protocol import Batch, Span
from localrt.quant.reference.ops import TorchOps

FORMAT = "int4-g32"
BOUND = 0.05  # of one layer in bf16
_VOCABULARY = 16_384
_ROWS = (1, 4, 8, 16, 32)


class RandomHead(RandomCheckpoint):
    """An EAGLE-3 head for a model of ``target``, with the first tokens of its vocabulary."""

    def __init__(self, target: Mapping[str, Any]) -> None:
        vocabulary = min(_VOCABULARY, target["vocab_size"])
        own = {**target, "num_hidden_layers": 1, "tie_word_embeddings": False}
        super().__init__("LlamaForCausalLM", {**own, "vocab_size": vocabulary})
        hidden, infos = target["hidden_size"], dict(self.tensors)
        for name in ("q", "k", "v"):
            key = f"model.layers.0.self_attn.{name}_proj.weight"
            infos[key] = _widened(infos[key], 2)
        square = infos["lm_head.weight"]
        infos["model.fc.weight"] = replace(
            _widened(square, 3), name="model.fc.weight", shape=(hidden, 3 * hidden)
        )
        norm = "model.layers.0.hidden_norm.weight"
        infos[norm] = replace(infos["model.norm.weight"], name=norm)
        del infos["model.embed_tokens.weight"]
        self.tensors = infos

    def head_config(self, layers: int) -> HeadConfig:
        """What a reader makes of such a head for a target of so many ``layers``."""
        own = read_config(self)
        block = FeatureBlock(features=3 * own.hidden_size)
        names = replace(own.names, attention_norm="")
        decoder = replace(own, block=block, names=names)
        return HeadConfig(
            decoder=decoder,
            layers=(1, layers // 2, AFTER_LAST),
            normed=False,
            own_normed=False,
            tokens=np.arange(own.vocab_size),
        )


def _widened(info: Any, times: int) -> Any:
    rows, columns = info.shape
    return replace(info, shape=(rows, times * columns), nbytes=times * info.nbytes)


def check_heads(device: str) -> list[Result]:
    """Results, then speeds."""
    return guarded("head", lambda: [_check(device)])


def _check(device: str) -> Result:
    cuda = device.startswith("cuda")
    config = QWEN_1_5B if cuda else {**TINY, **SMALLEST, "num_hidden_layers": 2}
    target = RandomPackedCheckpoint("Qwen2ForCausalLM", config, FORMAT)
    model = load_decoder(target, CudaOps(device=device), read_config(target))
    source = RandomHead(config)
    own = source.head_config(config["num_hidden_layers"])
    shared = Shared(model.weights.embedding_part, None)
    head = load_head(source, own, model.ops, shared)
    plain_model = load_decoder(target, TorchOps(compute_format="f32", device=device), model.config)
    plain = load_head(
        source, own, plain_model.ops, Shared(plain_model.weights.embedding_part, None)
    )
    count = 16 if cuda else 4
    ids = np.array(random_ids(config, count, seed=1))
    given = np.random.default_rng(2).standard_normal((count, 3 * config["hidden_size"]))
    found = [_logits(each, ids, given.astype(np.float32)) for each in (head, plain)]
    error = largest_error(*found)
    values: dict[str, Any] = {"relative_error": error}
    for rows in _ROWS if cuda else _ROWS[:1]:
        one = given[:rows, : config["hidden_size"]].astype(np.float32)
        values[f"us_step_{rows}"] = 1e6 * _seconds(head, ids, one, rows, cuda=cuda)
        values[f"us_pass_{rows}"] = 1e6 * _seconds(model, ids, None, rows, cuda=cuda)
    return Result("head", error < BOUND, values=values)


def _logits(decoder: Decoder, ids: np.ndarray, given: np.ndarray) -> np.ndarray:
    span = Span(decoder.cache(64), len(ids))
    return decoder.forward(Batch(ids, np.arange(len(ids)), (span,)), given=given)


def _seconds(
    decoder: Decoder, ids: np.ndarray, given: np.ndarray | None, rows: int, *, cuda: bool
) -> float:
    """A pass over ``rows`` siblings, which the cache forgets."""
    cache = decoder.cache(64 + rows)
    decoder.forward(Batch.extend([(cache, list(ids[:1]))]), rows=[], given=_wide(decoder, given))
    forward = decoder.forward if given is not None else decoder.ops.graphed(decoder.forward)
    mask = np.eye(rows, dtype=bool) if rows > 1 else None
    tokens = np.resize(ids, rows)
    more = {} if given is None else {"given": np.resize(given, (rows, given.shape[1]))}

    def step() -> None:
        cache.trim(1)
        forward(Batch(tokens, np.full(rows, 1), (Span(cache, rows, mask),)), **more)

    for _ in range(3 if cuda else 0):  # compiles, then records
        step()
    return statistics.median(timed(step) for _ in range(RUNS if cuda else 1))


def _wide(decoder: Decoder, given: np.ndarray | None) -> np.ndarray | None:
    """Features of one known token, if it is a head."""
    return None if given is None else np.resize(given, (1, 3 * decoder.config.hidden_size))
