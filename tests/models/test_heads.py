"""Draft heads: what transformers or plain torch makes of the same embeddings and features."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from localrt.common.errors import LocalrtError, UnsupportedModelError
from localrt.drafts.heads.dflash import BlockDecoder
from localrt.drafts.heads.files import HeadConfig, open_head
from localrt.drafts.heads.load import Shared, load_head, read_head_config
from localrt.models.checkpoints import open_checkpoint
from localrt.models.checkpoints.opening import is_head
from localrt.models.decoder import Decoder, FinalNorm
from localrt.planning.models import shape_of
from localrt.quant.ops.arrays import AFTER_LAST, CARRIED, Features
from localrt.quant.ops.protocol import Batch, Span
from tests.models.make_gguf import write_tiny_gguf
from tests.models.test_model import some
from tests.models.tiny import SIZES, edited, load_ours, relative_error, tiny_model, tokens
from tests.models.tiny_heads import (
    BLOCK,
    CLUSTERS,
    MASK,
    TinyAssistant,
    TinyBlock,
    TinyDFlash,
    TinyEagle3,
)

BLOCKS = ("qwen3.5-moe", "qwen3-next", "glm4-moe", "deepseek-v3-plain")
IDS = tokens(14)
WIDTH, VOCAB = SIZES["hidden_size"], SIZES["vocab_size"]


def load_block(folder: Path, target: Decoder) -> tuple[HeadConfig, Decoder]:
    shared = Shared(target.weights.embedding_part, target.weights.output_matrix)
    with closing(open_head(folder)) as checkpoint:
        config = read_head_config(checkpoint, target.config)
        return config, load_head(checkpoint, config, target.ops, shared)


def block_logits(path: Path, target: Decoder, hidden: np.ndarray) -> np.ndarray:
    """What the block at ``path`` makes of the target's features, which should be ``hidden``."""
    config, head = load_block(path, target)
    features = Features(config.layers, np.empty(hidden.shape, np.float32))
    target.forward(Batch.extend([(target.cache(32), IDS)]), rows=[], features=features)
    given = FinalNorm(target)(features.rows)
    assert relative_error(given, hidden) < 1e-4
    cache = head.cache(32)
    found = []
    for start, stop in ((1, 6), (6, len(IDS))):  # chunks
        batch = Batch.extend([(cache, IDS[start:stop])])
        found.append(head.forward(batch, target_features=given[start - 1 : stop - 1]))
    return np.concatenate(found)


@pytest.fixture(scope="module")
def llama() -> Decoder:
    return load_ours(tiny_model("llama").folder)


@pytest.fixture(scope="module")
def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    """Llama's embedding and its output matrix."""
    tensors = load_file(tiny_model("llama").folder / "model.safetensors")
    return tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]


@pytest.fixture(
    scope="module",
    params=["qwen3.5", *(pytest.param(name, marks=pytest.mark.slow) for name in BLOCKS)],
)
def block(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return TinyBlock(request.param, tmp_path_factory.mktemp(request.param))


def write_block(block: TinyBlock, path: Path, **how: Any) -> Path:
    return write_tiny_gguf(block.folder, path, block.name, predicting=1, **how)


def test_mtp_block(block: TinyBlock, tmp_path: Path) -> None:
    """In a folder, within the model's GGUF file, and in one of its own."""
    hidden, theirs = block.expected(IDS)
    found = block_logits(block.folder, load_ours(block.folder), hidden)
    assert relative_error(found, theirs) < 1e-4
    path = write_block(block, tmp_path / "m.gguf")
    own = write_block(block, tmp_path / "mtp-m.gguf", only_block=True)
    target = load_ours(path)
    for file in (path, own):
        assert relative_error(block_logits(file, target, hidden), theirs) < 1e-4
    assert not is_head(path)
    assert is_head(own)
    with pytest.raises(UnsupportedModelError, match=r"mtp-m\.gguf holds only the MTP block of a"):
        open_checkpoint(own)


def test_mtp_block_of_a_file_of_the_folder(tmp_path: Path) -> None:
    """Qwen3.5 and DeepSeek are also published with ``mtp.safetensors`` in the index."""
    block = TinyBlock("qwen3.5", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    index = {
        name: "mtp.safetensors" if name.startswith("mtp.") else "model-00001.safetensors"
        for name in state
    }
    for file in set(index.values()):
        own = {name: tensor for name, tensor in state.items() if index[name] == file}
        save_file(own, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    hidden, theirs = block.expected(IDS)
    found = block_logits(tmp_path, load_ours(tmp_path), hidden)
    assert relative_error(found, theirs) < 1e-4


def test_mtp_block_without_a_norm_of_its_own(tmp_path: Path) -> None:
    """It has the model's, which a file that holds only the block has for this."""
    block = TinyBlock("glm4-moe", tmp_path)
    block.block.model.norm.weight = block.target.model.norm.weight
    without = ("shared_head_norm.weight",)
    path = write_block(block, tmp_path / "m.gguf", without=without)
    own = write_block(block, tmp_path / "mtp-m.gguf", without=without, only_block=True)
    hidden, theirs = block.expected(IDS)
    target = load_ours(path)
    for file in (path, own):
        assert relative_error(block_logits(file, target, hidden), theirs) < 1e-4


def check_is_head(path: Path, told: str) -> None:
    """It is no model, and says so where one is asked for."""
    assert is_head(path)
    with pytest.raises(UnsupportedModelError, match=f"holds {told} of a model, which"):
        open_checkpoint(path)
    with pytest.raises(UnsupportedModelError, match="which drafts for it"):
        shape_of(path)


@pytest.mark.parametrize(
    ("form", "flag"),
    [
        *((form, "") for form in ("folder", "speculators", "gguf", "gguf without d2t")),
        *(("gguf", flag) for flag in ("norm_before_fc", "norm_before_residual")),
        ("speculators", "norm_before_fc"),
    ],
)
def test_eagle3_head(form: str, flag: str, llama: Decoder, matrices: Any, tmp_path: Path) -> None:
    own, divisors = tmp_path, torch.ones(8)
    tiny = TinyEagle3(own, WIDTH, VOCAB, **({flag: True} if flag else {}))
    if form == "speculators":
        tiny.save_speculators(own)
    elif form != "folder":
        if form == "gguf without d2t":  # nor an output matrix: all tokens, and the model's
            tiny.tokens = np.arange(VOCAB)
            del tiny.weights["lm_head.weight"]
        divisors = torch.linspace(1, 8, 8)
        how = {"mapped": form == "gguf", "more": {"rope_freqs": divisors.numpy()}}
        own = tiny.save_gguf(tmp_path / "eagle3.gguf", **how)
        tiny.weights.setdefault("lm_head.weight", matrices[1])
    check_is_head(own, "an EAGLE-3 head")
    config, head = load_block(own, llama)
    assert config.layers == (1, 2, AFTER_LAST)
    if form == "gguf without d2t":
        assert config.tokens is None
    else:
        assert np.array_equal(config.tokens, tiny.tokens)
    features = Features(config.layers, np.empty((len(IDS), 3 * WIDTH), np.float32))
    llama.forward(Batch.extend([(llama.cache(32), IDS)]), rows=[], features=features)
    given = matrices[0][IDS[1:]], torch.tensor(features.rows[:-1])
    theirs = tiny.expected(*given, divisors).numpy()
    cache, ids = head.cache(32), np.array(IDS[1:])
    batch = Batch(ids, np.arange(1, len(IDS)), (Span(cache, len(ids)),))
    assert relative_error(head.forward(batch, target_features=features.rows[:-1]), theirs) < 1e-4


@pytest.mark.parametrize("form", ["folder", "gguf"])
@pytest.mark.parametrize("window", [8, 1 << 20])
def test_dflash(window: int, form: str, llama: Decoder, matrices: Any, tmp_path: Path) -> None:
    own, known = tmp_path, len(IDS) - 1
    tiny = TinyDFlash(own, WIDTH, VOCAB, window=window)
    if form == "gguf":
        own = tiny.save_gguf(tmp_path / "dflash.gguf")
    check_is_head(own, "a DFlash draft")
    config, head = load_block(own, llama)
    assert isinstance(head, BlockDecoder)
    assert (config.layers, config.block, config.mask) == ((1, 2, AFTER_LAST), BLOCK, MASK)
    features = Features(config.layers, np.empty((known, 3 * WIDTH), np.float32))
    llama.forward(Batch.extend([(llama.cache(32), IDS[:-1])]), rows=[], features=features)
    block = np.array([IDS[-1], *[MASK] * (BLOCK - 1)])
    theirs = tiny.expected(torch.tensor(features.rows), matrices[0][block], matrices[1])
    cache = head.cache(32)
    for start, stop in ((0, 5), (5, known)):
        batch = Batch.extend([(cache, IDS[start:stop])])
        head.context.forward(batch, rows=[], target_features=features.rows[start:stop])
    assert head.pairs is None
    for _ in range(2):  # a block leaves nothing behind
        span = Span(cache, BLOCK, np.ones((BLOCK, BLOCK), np.bool_))
        ours = head.forward(Batch(block, np.arange(known, known + BLOCK), (span,)))
        assert relative_error(ours, theirs) < 1e-4
        cache.trim(known)


NESTED = {
    "mask_token_id": MASK,
    "target_layer_ids": [0, 1, 2],
    "num_target_layers": 3,
    "projector_type": "dspark",
    "attention_mode": "gqa",
    "markov_rank": 24,
    "enable_confidence_head": True,
}
"""As Liquid's and SpecForge's configs."""

FORMS: dict[str, dict[str, Any]] = {
    "folder": {},
    "causal": {"is_causal": True, "window": 8},
    "bonus anchor": {"sample_from_anchor": False},
    "speculators": {"aux_hidden_state_layer_ids": [1, 2, 3], "target_layer_ids": None},
    "nested": {"dflash_config": NESTED, "target_layer_ids": None, "block_size": BLOCK},
    "dflash 2": {"choices": 9},
    "gguf": {},
    "gguf, dflash 2": {"choices": 9},
    "gguf, causal": {"is_causal": True},
    "gguf, bonus anchor": {"sample_from_anchor": False},
}


@pytest.mark.parametrize("form", FORMS)
def test_dspark(form: str, llama: Decoder, matrices: Any, tmp_path: Path) -> None:
    """Logits of a block, and what they gain by the token before each."""
    own, options, known = tmp_path, FORMS[form], len(IDS) - 1
    tiny = TinyDFlash(own, WIDTH, VOCAB, rank=24, **options)
    if form.startswith("gguf"):
        keys: dict[str, Any] = {"attention.causal": tiny.causal} | (
            {"sample_from_anchor": False} if "bonus" in form else {}
        )
        own = tiny.save_gguf(tmp_path / "dspark.gguf", **keys)
    config, head = load_block(own, llama)
    assert isinstance(head, BlockDecoder)
    assert (config.layers, config.causal) == ((1, 2, AFTER_LAST), "causal" in form)
    assert config.first == (form == "speculators" or "bonus" in form or "2" in form)
    features = np.random.default_rng(2).normal(size=(known, 3 * WIDTH)).astype(np.float32)
    block = np.array([IDS[-1], *[MASK] * (BLOCK - 1)])
    theirs = tiny.expected(torch.tensor(features), matrices[0][block], matrices[1])
    cache, seen = head.cache(32), np.ones((BLOCK, BLOCK), np.bool_)
    batch = Batch.extend([(cache, IDS[:-1])])
    head.context.forward(batch, rows=[], target_features=features)
    span = Span(cache, BLOCK, np.tril(seen) if config.causal else seen)
    last = Features((AFTER_LAST,), np.empty((BLOCK, WIDTH), np.float32))
    ours = head.forward(Batch(block, np.arange(known, known + BLOCK), (span,)), features=last)
    assert relative_error(ours, theirs) < 1e-4
    before = [IDS[-1], 0, VOCAB - 1, 9, 9, 7]
    assert head.pairs is not None
    with head.ops.scope():
        changed = head.pairs.add(head.ops, ours, before, last.rows)
    wanted = tiny.after(theirs, before, np.arange(BLOCK))
    kept = np.isfinite(wanted)
    assert np.array_equal(np.isfinite(changed), kept)
    assert kept.sum(1).tolist() == [options.get("choices", VOCAB)] * BLOCK
    assert relative_error(changed[kept], wanted[kept]) < 1e-4
    assert relative_error(changed[kept], theirs[kept]) > 0.1


ASSISTANTS: dict[str, dict[str, Any]] = {
    "gemma4": {},
    "gemma4-double-wide": {"use_ordered_embeddings": True},
    "gemma4-unified": {},
    "gemma4-unified-whole": {"use_ordered_embeddings": True},
}


@some(ASSISTANTS, ("gemma4", "gemma4-unified-whole"))
@pytest.mark.parametrize("form", ["folder", "gguf"])
@pytest.mark.parametrize("held", [5, 23])
def test_assistant(name: str, held: int, form: str, tmp_path: Path) -> None:
    """Gemma 4's, which reads the target's keys and values, as transformers does."""
    clusters = CLUSTERS
    if form == "gguf":  # which does not say how many clusters get logits
        clusters = {**CLUSTERS, "centroid_intermediate_top_k": 32}
    own, options = tmp_path / "own", ASSISTANTS[name]
    tiny = TinyAssistant(name, tmp_path / "target", own, **options, **clusters)
    ids, drafts = tokens(24)[: held + 1], [9, 4, 140]  # more than the window
    theirs = tiny.levels(ids, drafts)
    target = load_ours(tmp_path / "target")
    if form == "gguf":
        own = write_tiny_gguf(own, tmp_path / "assistant.gguf", "gemma4-assistant")
    check_is_head(own, "an assistant")
    config, head = load_block(own, target)
    width = target.config.hidden_size
    seen = Features(config.layers, np.empty((held, width), np.float32))
    cache = target.cache(64)
    target.forward(Batch.extend([(cache, ids[:-1])]), rows=[], features=seen)
    given = FinalNorm(target)(seen.rows[-1:])
    cache.trim(held - 1)
    for token, expected in zip((ids[-1], *drafts), theirs, strict=True):
        span = Span(cache, 1, np.ones((1, 1), np.bool_))
        batch = Batch(np.array([token]), np.array([held]), (span,))
        made = Features((CARRIED,), np.empty((1, width), np.float32))
        logits = head.forward(batch, target_features=given, features=made)
        cache.trim(held - 1)
        given = made.rows
        assert relative_error(logits[0], expected) < 1e-4


def eagle3(folder: Path, **changes: Any) -> Path:
    TinyEagle3(folder, WIDTH, VOCAB)
    return edited(folder, **changes)


def dflash(folder: Path, **changes: Any) -> Path:
    TinyDFlash(folder, WIDTH, VOCAB)
    return edited(folder, **changes)


def dflash_file(folder: Path, **keys: Any) -> Path:
    return TinyDFlash(folder, WIDTH, VOCAB).save_gguf(folder / "dflash.gguf", **keys)


@pytest.mark.parametrize(
    ("make", "changes", "said"),
    [
        (eagle3, {"hidden_size": 32}, "hidden numbers"),
        (eagle3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9]}}, "it reads layers"),
        (dflash, {"dflash_config": {"mask_token_id": 7}}, "layers that it reads are None"),
        (dflash, {"markov_head_type": "gated"}, "with its markov_head_type is not supported"),
        (dflash_file, {"target_layers": [0, 4]}, r"it reads layers \[-1, 3\], and the model has 3"),
        (dflash_file, {"hyper_connection.count": 4}, "its hyper_connection is not supported"),
    ],
)
def test_heads_that_do_not_fit(
    make: Callable[..., Path], changes: dict[str, Any], said: str, llama: Decoder, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        load_block(make(tmp_path, **changes), llama)


def test_without_a_block(tiny_folder: Path) -> None:
    with pytest.raises(LocalrtError, match="holds no MTP block"):
        open_head(tiny_folder)
