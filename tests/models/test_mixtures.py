"""Mixtures: the choices of routers, GGUF's and packed forms, and what is wrong with a bad one."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import localrt
from localrt.common.errors import CheckpointError
from localrt.evaluate import evaluate
from localrt.models.checkpoints import open_checkpoint
from localrt.models.layers.moe import Routed
from localrt.models.registry import load_decoder, read_config
from localrt.offload.store import pack_store
from localrt.quant.formats.tiled import tile_tensor
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Batch
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny import (
    edited,
    load_ours,
    logits_of,
    oracle,
    relative_error,
    save_tiny,
    tokens,
)
from tests.models.tiny_configs import DEEPSEEK_SPARSE, MIXTURES

TOLERANCE = 1e-4
TRAINED = Path(__file__).parents[1] / "data" / "mixture"
PERPLEXITY = 5.2752  # of transformers in float32, of the weights as they were trained
LENGTH = 40


@pytest.mark.parametrize("name", sorted(MIXTURES | DEEPSEEK_SPARSE))
def test_routing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = save_tiny(name, tmp_path)
    ours, ids = load_ours(tmp_path, context=LENGTH), tokens(LENGTH, seed=5)
    found: list[Routing] = []
    monkeypatch.setattr(Routed, "read", lambda routed: found.append(routed.routing))
    expected: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def listen(module: Any, _inputs: Any, output: Any) -> None:
        first, *rest = (part.detach().float() for part in output)
        first = first.log() if type(module).__name__.startswith("Gemma4") else first
        expected.append(tuple(part.numpy() for part in (first, *rest)))

    names = ("TopKRouter", "TopkRouter", "HashRouter", "Gemma4TextRouter")
    routers = [m for m in theirs.modules() if type(m).__name__.endswith(names)]
    handles = [router.register_forward_hook(listen) for router in routers]
    ours.forward(Batch.extend([(ours.cache(LENGTH), ids)]), rows=[])
    oracle(theirs, ids)
    for handle in handles:
        handle.remove()
    assert len(found) == len(expected) == len(routers) > 0
    # Where a bias or groups count too, ranks are by other numbers than logits.
    mixtures = [spec for spec in ours.config.mixtures if spec is not None]
    by_logits = all(not spec.choice_bias and spec.router.groups == 1 for spec in mixtures)
    for routing, (logits, weights, experts) in zip(found, expected, strict=True):
        # Some of theirs give them in no order.
        got, wanted = (
            [np.take_along_axis(part, np.argsort(pair[0], axis=1), 1) for part in pair]
            for pair in ((routing.chosen, routing.weights), (experts, weights))
        )
        np.testing.assert_array_equal(got[0], wanted[0])
        np.testing.assert_allclose(got[1], wanted[1], atol=1e-5)
        assert routing.loads(logits.shape[1]).sum() == experts.size
        if not by_logits:
            continue
        ranked = np.argsort(-logits, axis=1, kind="stable")[:, : routing.experts.shape[1]]
        np.testing.assert_array_equal(routing.experts, ranked)
        shares = torch.tensor(logits).softmax(-1).numpy()
        expected_scores = np.take_along_axis(shares, ranked, 1)
        np.testing.assert_allclose(routing.scores, expected_scores, atol=1e-5)


def test_gpt_oss_as_published(tmp_path: Path) -> None:
    """Experts in MXFP4, in a folder and in a store of it, against transformers' dequantization."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = save_tiny("gpt-oss", tmp_path)
    file, rng = tmp_path / "model.safetensors", np.random.default_rng(3)
    tensors = load_file(file)
    for layer, block in enumerate(theirs.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            experts, columns, rows = tensors.pop(stem).shape
            packed = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
            scales = rng.integers(122, 126, packed.shape[:3], np.uint8)
            tensors[f"{stem}_blocks"], tensors[f"{stem}_scales"] = packed, scales
            values = convert_moe_packed_tensors(
                torch.from_numpy(packed), torch.from_numpy(scales), dtype=torch.float32
            )
            getattr(block.mlp.experts, name).data = values
    save_file(tensors, file)
    edited(tmp_path, quantization_config={"quant_method": "mxfp4"})
    ids = tokens(LENGTH, seed=4)
    assert relative_error(logits_of(tmp_path, ids), oracle(theirs, ids)) < TOLERANCE
    with closing(open_checkpoint(tmp_path)) as source:
        store = pack_store(source, tmp_path / "store", tiler=tile_tensor)
    with closing(open_checkpoint(store)) as opened:
        formats = {i.format.name for n, i in opened.tensors.items() if ".experts." in n}
    assert formats == {"mxfp4", "f32"}  # matrices and biases
    np.testing.assert_array_equal(logits_of(store, ids), logits_of(tmp_path, ids))


def test_qwen3_vl_as_published(tmp_path: Path) -> None:
    """Its experts are stacked the other way round than transformers writes them."""
    theirs = save_tiny("qwen3-vl-moe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {
        name: np.ascontiguousarray(t.swapaxes(1, 2)) if ".experts." in name else t
        for name, t in load_file(file).items()
    }
    assert any(".experts." in name for name in tensors)
    save_file(tensors, file)
    ids = tokens(LENGTH, seed=4)
    assert relative_error(logits_of(tmp_path, ids), oracle(theirs, ids)) < TOLERANCE


def test_missing_expert(tmp_path: Path) -> None:
    save_tiny("qwen3-moe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    message = rf"layer 1 lacks expert 5: tensor {re.escape(name)} is missing; download"
    with pytest.raises(CheckpointError, match=message):
        load_ours(tmp_path)
    with (
        closing(open_checkpoint(tmp_path)) as source,
        pytest.raises(CheckpointError, match=message),
    ):
        pack_store(source, tmp_path / "store", tiler=tile_tensor)
    assert not (tmp_path / "store").exists()


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A mixture whose second router has a NaN in it."""
    theirs = save_tiny("qwen3-moe", tmp_path)
    with torch.no_grad():
        theirs.model.layers[1].mlp.gate.weight[3, 5] = float("nan")
    theirs.save_pretrained(tmp_path)
    return tmp_path


def test_router_of_nan(damaged: Path) -> None:
    ours = load_ours(damaged)
    cache = ours.cache(LENGTH)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp: .*not numbers"):
        ours.forward(Batch.extend([(cache, tokens(4))]))
    assert cache.length == 0


def test_bf16(tmp_path: Path) -> None:
    """Roughly: rounding moves some choices, not the text's sense."""
    theirs = save_tiny("gpt-oss", tmp_path)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        ours = load_decoder(checkpoint, TorchOps(compute_format="bf16"), read_config(checkpoint))
    ids = tokens(12)
    logits = ours.forward(Batch.extend([(ours.cache(16), ids)]))
    assert relative_error(logits, oracle(theirs, ids)) < 0.2


def test_a_trained_mixture_in_four_bits() -> None:
    text = (TRAINED / "held_out.txt").read_text("utf-8")
    with localrt.load(TRAINED) as model:
        assert evaluate(model, text, ctx=256).perplexity == pytest.approx(PERPLEXITY, rel=0.01)
