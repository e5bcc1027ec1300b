"""A draft head on a GPU, for ``scripts/gpu_check``.

An EAGLE-3 head with a resident model, both of random weights: logits against the same head on the
CPU, and how many tokens decoded with its trees match plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from benchmarks.common.random_store import RandomCheckpoint, RandomPackedCheckpoint
from benchmarks.gpu.configs import largest_error, random_ids, resident_config
from benchmarks.gpu.timing import Check, Values
from localrt.drafts import head_draft
from localrt.drafts.head_draft import HeadDraft
from localrt.drafts.heads.config import HeadConfig
from localrt.drafts.heads.eagle3 import FeatureBlock
from localrt.drafts.heads.load import Shared, load_head
from localrt.engine.native.engine import NativeEngine
from localrt.engine.options import Options
from localrt.engine.protocol import EngineInfo
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.ops.features import AFTER_LAST
from localrt.quant.ops.protocol import Batch, Span, opaque
from localrt.speculative.acceptance import TreePass
from localrt.speculative.source import TreeSize
from localrt.speculative.tree import TokenTree

FORMAT = "int4-g32"
BOUND = 0.05  # for one layer: both use 8-bit rows, but sum in different orders
_VOCABULARY = 16_384
_TOKENS = 32


class RandomHead(RandomCheckpoint):
    """An EAGLE-3 head for ``target``; its vocabulary is the first tokens of the target's."""

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
        """The head's config, for a target of ``layers``."""
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


def check_heads(device: str) -> Iterator[Check]:
    """One head."""
    yield "head", partial(_check, device)


def engine_with_head(
    decoder: Decoder, source: RandomHead, context: int
) -> tuple[NativeEngine, HeadDraft]:
    """An engine of ``decoder``, and the head loaded for it."""
    config = decoder.config
    info: dict[str, Any] = {"engine": "native", "architecture": "", "device": decoder.ops.device}
    info |= {"format": FORMAT, "parameters": 0, "layers": config.layers, "weight_bytes": 1}
    info |= {"vocab_size": config.vocab_size, "context_length": context, "exactness": ""}
    engine = NativeEngine(decoder, EngineInfo(**info))
    loaded = cast(Any, SimpleNamespace(engine=engine, path=Path("target"), ctx=context))
    with (
        patch.object(head_draft, "open_head", lambda path: source),
        patch.object(head_draft, "read_head_config", lambda *_: source.head_config(config.layers)),
    ):
        return engine, HeadDraft(loaded)


def _check(device: str) -> Values:
    cuda = device.startswith("cuda")
    config = {**resident_config(device), **({} if cuda else {"num_hidden_layers": 2})}
    target = RandomPackedCheckpoint("Qwen2ForCausalLM", config, FORMAT)
    model = load_decoder(target, opaque(CudaOps(device=device)), read_config(target))
    source = RandomHead(config)
    engine, draft = engine_with_head(model, source, 256)
    head, own = draft.decoder, draft.config
    # Only the second target's embedding is used.
    first = RandomPackedCheckpoint("Qwen2ForCausalLM", {**config, "num_hidden_layers": 1}, FORMAT)
    plain_model = load_decoder(first, opaque(NativeOps()), read_config(first))
    plain = load_head(
        source, own, plain_model.ops, Shared(plain_model.weights.embedding_part, None)
    )
    count = 16 if cuda else 4
    ids = np.array(random_ids(config, count, seed=1))
    given = np.random.default_rng(2).standard_normal((count, 3 * config["hidden_size"]))
    found = [_logits(each, ids, given.astype(np.float32)) for each in (head, plain)]
    error = largest_error(*found)
    tokens = _TOKENS if cuda else 3
    said = [_answer(engine, each, ids.tolist(), tokens) for each in (None, draft)]
    # Nearly equal logits may swap, since a tree's rows are at other positions of the cache.
    same = next((n for n, (a, b) in enumerate(zip(*said, strict=False)) if a != b), tokens)
    ok = error < BOUND and same > 0
    return {"ok": ok, "same_tokens": same, "relative_error": error, "bound": BOUND}


def _answer(
    engine: NativeEngine, head: HeadDraft | None, prompt: list[int], count: int
) -> list[int]:
    """Greedy tokens after a prompt, drafted by the head if there is one."""
    session = engine.session(256)
    source = None if head is None else head.source(session, Options(draft="mtp"))
    said = [int(session.extend(prompt).argmax())]
    while len(said) < count:
        tree = TokenTree.empty()
        if source is not None:
            tree = source.propose([*prompt, *said], TreeSize(8, 4))
        if not len(tree):
            said.append(int(session.extend(said[-1:]).argmax()))
            continue
        done = TreePass(tree, session.extend_tree(said[-1], tree))
        following = done.likeliest()
        for token in following[:-1]:
            done.after(token)
        session.keep(done.rows)
        said += following
    return said[:count]


def _logits(decoder: Decoder, ids: np.ndarray, features: np.ndarray) -> np.ndarray:
    span = Span(decoder.cache(64), len(ids))
    return decoder.forward(Batch(ids, np.arange(len(ids)), (span,)), target_features=features)
