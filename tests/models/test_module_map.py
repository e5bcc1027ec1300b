"""Adapters of matrices that checkpoints show under other names, in parts, or with moved rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints import Checkpoint, open_checkpoint
from localrt.models.checkpoints.adapters import (
    MergedCheckpoint,
    read_adapter,
    text_module,
    why_only_merged,
)
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.adapters import Adapter, LowRank
from localrt.quant.ops.protocol import Ops
from localrt.quant.reference.ops import TorchOps
from tests.checkpoints.make_gguf import write_gguf
from tests.conftest import needs_kernels
from tests.models.adapters import make_adapter, peft_logits
from tests.models.make_gguf import write_tiny_gguf
from tests.models.test_adapters import Tiny, cache, run
from tests.models.tiny import CONFIGS, MIXTURES, relative_error, tiny_model, tokens

IDS = tokens(11)
# Of every way in which a family's matrices are computed one.
FAMILIES = (
    *("gemma4", "phi3", "deepseek-v3", "glm4-moe", "qwen3.5", "lfm2-moe", "lfm3"),
    *("granite-hybrid-moe", "falcon-h1", "nemotron-h-latent", "olmo-hybrid", "kimi-linear"),
    *("gpt-oss", "gemma4-moe", "qwen4-exp", "cohere2-moe-dense-first", "apertus", "afmoe"),
    "llama4",
)


def linear_modules(model: Any) -> list[str]:
    """The modules of transformers' model that are adapted while a model runs.

    But for shared experts, with which PEFT adapts the others too.
    """
    return [
        name
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear
        and name != "lm_head"
        and "expert" not in name
        and not name.endswith(("kv_b_proj", "router.proj"))
    ]


def decoder_of(checkpoint: Checkpoint, ops: Ops, *adapters: Adapter[LowRank]) -> Decoder:
    decoder = load_decoder(checkpoint, ops, read_config(checkpoint))
    assert ops.adapters is not None
    for adapter in adapters:
        ops.adapters.add(ops.adapters.packed(adapter))
    return decoder


def adapted(checkpoint: Checkpoint, ops: Ops, adapter: Adapter[LowRank]) -> np.ndarray:
    decoder = decoder_of(checkpoint, ops, adapter)
    return run(decoder, cache(decoder, adapter), IDS)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ernie", {}),  # rows of queries and keys lie in pairs
        ("ernie", {"use_dora": True}),
        ("glm4", {}),  # in half of each head
        ("glm4v", {}),
        ("cohere2-bias", {}),  # attention and MLP in parallel
        ("apertus", {}),  # no gate
        ("granite-hybrid", {}),  # gate and up are one matrix
        ("qwen3-next", {}),  # rows of a key head lie together
        ("qwen3-next", {"use_dora": True}),
        ("kimi-linear", {}),
        ("gemma3-images", {}),  # modules of the encoder are left out
    ],
)
def test_logits_are_those_of_peft(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    tiny = Tiny(name, tmp_path)
    adapter, theirs = tiny.adapter("a", target_modules=linear_modules(tiny.base), **config)
    found = adapted(tiny.checkpoint, TorchOps(compute_format="f32"), adapter)
    assert relative_error(found, peft_logits(theirs, IDS)) < 1e-4


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("qwen3.5", {}),
        ("qwen3-next", {}),
        ("qwen3-next", {"together": True}),
        ("lfm2", {}),
        ("granite-hybrid", {}),
        ("nemotron-h", {}),
        ("glm4v", {}),  # rows of queries and keys lie in halves
    ],
)
def test_gguf_base(name: str, how: dict[str, bool], tmp_path: Path) -> None:
    tiny = Tiny(name, tmp_path)
    base = tiny_model(name).module
    base.config.model_type = "llama"  # PEFT leaves Mamba's modules out
    modules = linear_modules(tiny.base)
    theirs = make_adapter(base, tmp_path / "a", target_modules=modules, use_dora=True)
    path = write_tiny_gguf(tiny.folder / "base", tmp_path / "base.gguf", name, **how)
    with closing(open_checkpoint(path)) as checkpoint:
        adapter = read_adapter(tmp_path / "a", checkpoint)
        found = adapted(checkpoint, TorchOps(compute_format="f32"), adapter)
    assert relative_error(found, peft_logits(theirs, IDS)) < 1e-4


def test_gguf_base_with_factors(tmp_path: Path) -> None:
    tiny = Tiny("falcon-h1", tmp_path)
    make_adapter(tiny_model("falcon-h1").module, tmp_path / "a", target_modules=["q_proj"])
    path = write_tiny_gguf(tiny.folder / "base", tmp_path / "base.gguf", "falcon-h1")
    with (
        closing(open_checkpoint(path)) as checkpoint,
        pytest.raises(UnsupportedModelError, match=r"base.gguf has the model's factors in"),
    ):
        read_adapter(tmp_path / "a", checkpoint)


def everything(checkpoint: Checkpoint, size: float) -> Adapter[LowRank]:
    """Of all matrices that a running model adapts."""
    rng = np.random.default_rng(0)

    def low(shape: tuple[int, ...]) -> LowRank:
        a = rng.standard_normal((4, shape[1]), np.float32)
        return LowRank(a * size, rng.standard_normal((shape[0], 4), np.float32) * size)

    return Adapter(
        "everything",
        {
            name: low(info.shape)
            for name, info in checkpoint.tensors.items()
            if len(info.shape) == 2
            and name.endswith("_proj.weight")
            and why_only_merged(name) is None
        },
    )


def by_merging(name: str, size: float, ops: Callable[[], Ops]) -> tuple[float, float]:
    """How far logits are from those of merged weights, and how far these are from the base's."""
    with closing(open_checkpoint(tiny_model(name).folder)) as checkpoint:
        adapter = everything(checkpoint, size)
        found = adapted(checkpoint, ops(), adapter)
        merged = decoder_of(MergedCheckpoint(checkpoint, adapter), ops())
        wanted = run(merged, cache(merged), IDS)
        plain = decoder_of(checkpoint, ops())
        change = relative_error(run(plain, cache(plain), IDS), wanted)
        return relative_error(found, wanted), change


@pytest.mark.parametrize("name", FAMILIES)
def test_every_matrix(name: str) -> None:
    assert name in (*CONFIGS, *MIXTURES)
    error, change = by_merging(name, 0.15, lambda: TorchOps(compute_format="f32"))
    assert error < 1e-4
    assert change > 0.01


@needs_kernels
@pytest.mark.parametrize(
    "name",
    [
        *("gemma4", "qwen3.5", "lfm3", "granite-hybrid", "falcon-h1", "olmo-hybrid"),
        *("cohere2", "apertus"),
    ],
)
def test_kernels(name: str) -> None:
    error, change = by_merging(name, 0.15, lambda: NativeOps(threads=1))
    assert error < change / 5


def test_routers(tmp_path: Path) -> None:
    tiny = Tiny("qwen3-moe", tmp_path)
    theirs = make_adapter(
        tiny_model("qwen3-moe").module,
        tmp_path / "a",
        target_modules=["q_proj"],
        target_parameters=["mlp.gate.weight"],
    )
    with pytest.raises(UnsupportedModelError, match=r"routers cannot .* 'localrt quantize MODEL"):
        read_adapter(tmp_path / "a", tiny.checkpoint)
    adapter = read_adapter(tmp_path / "a", tiny.checkpoint, merging=True)
    merged = decoder_of(MergedCheckpoint(tiny.checkpoint, adapter), TorchOps(compute_format="f32"))
    assert relative_error(run(merged, cache(merged), IDS), peft_logits(theirs, IDS)) < 1e-4


def renamed(folder: Path, old: str, new: str) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({name.replace(old, new): each for name, each in load_file(path).items()}, path)


def test_experts(tmp_path: Path) -> None:
    tiny = Tiny("mixtral", tmp_path)
    make_adapter(tiny.base, tmp_path / "a", target_modules=["k_proj"])
    path = tmp_path / "a" / "adapter_model.safetensors"
    rows, columns = tiny.checkpoint.tensors["model.layers.0.mlp.experts.1.up_proj.weight"].shape
    stem = "base_model.model.model.layers.0.block_sparse_moe.experts.1.w3.lora_"
    b = np.ones((rows, 8), np.float32)
    save_file({f"{stem}A.weight": np.ones((8, columns), np.float32), f"{stem}B.weight": b}, path)
    with pytest.raises(UnsupportedModelError, match=r"routed experts cannot .* 'localrt quantize"):
        read_adapter(tmp_path / "a", tiny.checkpoint)
    (name,) = read_adapter(tmp_path / "a", tiny.checkpoint, merging=True).matrices
    assert name == "model.layers.0.mlp.experts.1.up_proj.weight"


@pytest.mark.parametrize(
    "module",
    [
        "model.layers.0.mlp.up_proj",
        "model.language_model.layers.0.mlp.up_proj",
        "language_model.model.layers.0.mlp.up_proj",
        "backbone.layers.0.mlp.up_proj",
    ],
)
def test_multimodal_names(module: str, tmp_path: Path) -> None:
    tiny = Tiny("llama", tmp_path)
    assert text_module(module, tiny.checkpoint) == "model.layers.0.mlp.up_proj.weight"


def test_wrong_size(tmp_path: Path) -> None:
    tiny = Tiny("qwen3-next", tmp_path)
    make_adapter(tiny.base, tmp_path / "a", target_modules=["out_proj"])
    renamed(tmp_path / "a", "out_proj", "in_proj_qkvz")
    with pytest.raises(CheckpointError, match=r"in_proj_qkvz' has .* the adapter is for another"):
        read_adapter(tmp_path / "a", tiny.checkpoint)


def test_gguf_adapter_of_folder(tmp_path: Path) -> None:
    tiny = Tiny("qwen3.5", tmp_path)
    keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 4.0}
    a, b = np.ones((2, 64), np.float32), np.ones((96, 2), np.float32)
    stem = "blk.0.ffn_up.weight.lora_"
    tensors: dict[str, Any] = {f"{stem}a": (a, "f32"), f"{stem}b": (b, "f32")}
    write_gguf(tmp_path / "a.gguf", "qwen35", keys, tensors)
    with pytest.raises(UnsupportedModelError, match="use the adapter's PEFT folder"):
        read_adapter(tmp_path / "a.gguf", tiny.checkpoint)
