"""Draft heads: what transformers' layers make of the same embeddings and features."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5TextConfig

from localrt.common.errors import LocalrtError, UnsupportedModelError
from localrt.drafts.heads.eagle3 import FeatureBlock
from localrt.drafts.heads.files import HeadConfig, open_head
from localrt.drafts.heads.load import Shared, load_head, read_head_config
from localrt.models.checkpoints import open_checkpoint
from localrt.models.checkpoints.opening import is_head
from localrt.models.decoder import Decoder, FinalNorm
from localrt.planning.models import shape_of
from localrt.quant.ops.arrays import AFTER_LAST, Features
from localrt.quant.ops.protocol import Batch, Span
from tests.checkpoints.make_gguf import packed_rows, write_gguf
from tests.models.make_gguf import write_tiny_gguf
from tests.models.tiny import CONFIGS, edited, load_ours, relative_error, save_tiny, tokens
from tests.models.tiny_heads import TinyBlock, TinyEagle3

BLOCKS = ("qwen3.5", "qwen3.5-moe", "qwen3-next", "glm4-moe", "deepseek-v3-plain")
IDS = tokens(14)


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


@pytest.fixture(scope="module", params=BLOCKS)
def block(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return TinyBlock(request.param, tmp_path_factory.mktemp(request.param))


def test_mtp_block_of_a_folder(block: TinyBlock) -> None:
    hidden, theirs = block.expected(IDS)
    found = block_logits(block.folder, load_ours(block.folder), hidden)
    assert relative_error(found, theirs) < 1e-4


def test_mtp_block_of_a_file_of_the_folder(tmp_path: Path) -> None:
    """Qwen3.5 and DeepSeek are also published with ``mtp.safetensors`` in the index."""
    block = TinyBlock("qwen3.5", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = {"model-00001.safetensors": {}, "mtp.safetensors": {}}
    for name, tensor in state.items():
        files["mtp.safetensors" if name.startswith("mtp.") else "model-00001.safetensors"][name] = (
            tensor
        )
    for file, tensors in files.items():
        save_file(tensors, tmp_path / file)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    hidden, theirs = block.expected(IDS)
    found = block_logits(tmp_path, load_ours(tmp_path), hidden)
    assert relative_error(found, theirs) < 1e-4


def write_block(block: TinyBlock, path: Path, **how: Any) -> Path:
    return write_tiny_gguf(block.folder, path, block.name, predicting=1, **how)


def test_mtp_block_of_a_gguf_file(block: TinyBlock, tmp_path: Path) -> None:
    """Within the model's file, and in one of its own."""
    path = write_block(block, tmp_path / "m.gguf")
    own = write_block(block, tmp_path / "mtp-m.gguf", only_block=True)
    hidden, theirs = block.expected(IDS)
    target = load_ours(path)
    for file in (path, own):
        assert relative_error(block_logits(file, target, hidden), theirs) < 1e-4
    assert not is_head(path)
    assert is_head(own)
    with pytest.raises(UnsupportedModelError, match=r"mtp-m\.gguf holds only the MTP block of a"):
        open_checkpoint(own)


@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
def test_packed_mtp_block(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with packed matrices computes what one with their values does."""
    sizes = {**CONFIGS["qwen3.5"]().to_dict(), "hidden_size": 256, "intermediate_size": 256}
    monkeypatch.setitem(CONFIGS, "qwen3.5", lambda: Qwen3_5TextConfig(**sizes))
    block = TinyBlock("qwen3.5", tmp_path)
    path = write_block(block, tmp_path / "m.gguf")
    reader = GGUFReader(path)
    keys = {key: field.contents() for key, field in reader.fields.items() if "GGUF." not in key}
    architecture = keys.pop("general.architecture")
    plain: dict[str, Any] = {each.name: (np.array(each.data), "f32") for each in reader.tensors}
    packed = dict(plain)
    for name, (array, _) in plain.items():
        if name.startswith("blk.3.") and array.ndim > 1 and array.shape[1] % 256 == 0:
            own = quantize(array, GGMLQuantizationType.Q8_0)
            if kind == "q4_k":
                own = packed_rows(kind, *array.shape)
                own.reshape(-1, 144)[:, :4] = np.array([2e-4, 1e-3], "<f2").view(np.uint8)
            packed[name] = own, kind
            plain[name] = dequantize(own, GGMLQuantizationType[kind.upper()]), "f32"
    assert len([name for name in packed if packed[name][1] == kind]) == 7
    files = [tmp_path / "packed.gguf", tmp_path / "plain.gguf"]
    for file, tensors in zip(files, (packed, plain), strict=True):
        write_gguf(file, architecture, keys, tensors)
    hidden, _ = block.expected(IDS)
    found, expected = (block_logits(file, load_ours(path), hidden) for file in files)
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("name", ["qwen3.5", "glm4-moe"])
def test_mtp_block_without_a_norm_of_its_own(name: str, tmp_path: Path) -> None:
    """It has the model's, which a file that holds only the block has for this."""
    block = TinyBlock(name, tmp_path)
    block.block.model.norm.weight = block.target.model.norm.weight
    without = ("shared_head_norm.weight",)
    path = write_block(block, tmp_path / "m.gguf", without=without)
    own = write_block(block, tmp_path / "mtp-m.gguf", without=without, only_block=True)
    hidden, theirs = block.expected(IDS)
    target = load_ours(path)
    for file in (path, own):
        assert relative_error(block_logits(file, target, hidden), theirs) < 1e-4


@pytest.mark.parametrize("form", ["folder", "speculators", "gguf", "gguf-i32"])
@pytest.mark.parametrize("flag", ["", "norm_before_fc", "norm_before_residual"])
def test_eagle3_head(flag: str, form: str, tmp_path: Path) -> None:
    model, own = save_tiny("llama", tmp_path / "target"), tmp_path / "head"
    own.mkdir()
    target = load_ours(tmp_path / "target")
    width = target.config.hidden_size
    tiny = TinyEagle3(own, width, target.config.vocab_size, **({flag: True} if flag else {}))
    if form == "speculators":
        tiny.save_speculators(own)
    elif form != "folder":
        own = tiny.save_gguf(tmp_path / "eagle3.gguf", kind=form[5:] or "i64")
    assert is_head(own)
    with pytest.raises(UnsupportedModelError, match="holds an EAGLE-3 head of a model, which"):
        open_checkpoint(own)
    with pytest.raises(UnsupportedModelError, match="which drafts for it"):
        shape_of(own)
    config, head = load_block(own, target)
    assert config.layers == (1, 2, AFTER_LAST)
    assert np.array_equal(config.tokens, tiny.tokens)
    features = Features(config.layers, np.empty((len(IDS), 3 * width), np.float32))
    target.forward(Batch.extend([(target.cache(32), IDS)]), rows=[], features=features)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(torch.tensor(IDS[1:]))
        theirs = tiny.expected(embedded, torch.tensor(features.rows[:-1])).numpy()
    cache, ids = head.cache(32), np.array(IDS[1:])
    batch = Batch(ids, np.arange(1, len(IDS)), (Span(cache, len(ids)),))
    assert relative_error(head.forward(batch, target_features=features.rows[:-1]), theirs) < 1e-4


@pytest.mark.parametrize(
    ("changes", "residual", "own"),
    [
        ({}, False, False),
        ({"norm_before_residual": None}, True, False),  # as vLLM reads it
        ({"norm_output": True}, False, True),
    ],
)
def test_norms_of_speculators(
    changes: dict[str, Any], residual: bool, own: bool, tmp_path: Path
) -> None:
    target = load_ours(save_to(tmp_path / "target"))
    tiny = TinyEagle3(tmp_path, target.config.hidden_size, target.config.vocab_size)
    folder = edited(tiny.save_speculators(tmp_path), **changes)
    with closing(open_head(folder)) as checkpoint:
        config = read_head_config(checkpoint, target.config)
    assert config.own_normed is own
    assert isinstance(config.decoder.block, FeatureBlock)
    assert config.decoder.block.residual_normed is residual


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 32}, "hidden numbers"),
        ({"num_hidden_layers": 2}, "one layer"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9]}}, "it reads layers"),
    ],
)
def test_another_models_head(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    target = load_ours(save_to(tmp_path / "target"))
    TinyEagle3(tmp_path, target.config.hidden_size, target.config.vocab_size)
    with pytest.raises(UnsupportedModelError, match=said):
        load_block(edited(tmp_path, **changes), target)


def save_to(folder: Path) -> Path:
    save_tiny("llama", folder)
    return folder


def test_without_a_block(tiny_folder: Path) -> None:
    with pytest.raises(LocalrtError, match="holds no MTP block"):
        open_head(tiny_folder)
