"""DeepSeek from every form that it is published in: the same logits, the same experts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import read_config
from localrt.quant.formats import F16, unpack
from localrt.quant.ops.attention import LatentSpec, Rope
from tests.models.make_gguf import write_tiny_gguf
from tests.models.tiny import (
    CONFIGS,
    edited,
    load_ours,
    logits_of,
    oracle,
    relative_error,
    save_tiny,
    tokens,
)

IDS = tokens(40)


def test_published_names_of_kimi(tmp_path: Path) -> None:
    model, path = save_tiny("kimi-k2.5", tmp_path), tmp_path / "model.safetensors"
    saved = load_file(path)
    assert any(".blocks." in name for name in saved)  # transformers' own
    named = {name.replace("model.blocks.", "model.layers."): rows for name, rows in saved.items()}
    save_file(named, path)
    assert relative_error(logits_of(tmp_path, IDS), oracle(model, IDS)) < 1e-4


@pytest.mark.llamacpp
@pytest.mark.parametrize(("absorbed", "groups"), [(True, True), (False, False)])
@pytest.mark.parametrize(
    "name", ["deepseek-v2-lite", "deepseek-v2-dense", "deepseek-v3", "glm4-moe-lite", "kimi-k2.5"]
)
def test_llama_cpp(
    name: str, absorbed: bool, groups: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp", reason="needs the llamacpp extra")
    from localrt.engine.llamacpp.engine import LlamaCppEngine
    from localrt.engine.llamacpp.model import LlamaCppModel

    if name == "deepseek-v2-lite":  # which it knows by its layers
        config = CONFIGS[name]()
        config.num_hidden_layers = 27
        monkeypatch.setitem(CONFIGS, name, lambda: config)
    save_tiny(name, tmp_path / "hf")
    path = write_tiny_gguf(
        tmp_path / "hf", tmp_path / "model.gguf", name, absorbed=absorbed, groups=groups
    )
    engine = LlamaCppEngine(LlamaCppModel.load(path, threads=1))
    session = engine.session(64)  # whose memory the logits are
    try:
        logits = session.extend(IDS).copy()
    finally:
        engine.close()
    assert relative_error(logits_of(path, IDS)[-1], logits) < 0.01


def test_quantized_kv_b(tmp_path: Path) -> None:
    """Values in their own bytes; keys, which have to be transposed, in f16."""
    theirs = save_tiny("deepseek-v2-dense", tmp_path / "hf")
    path = write_tiny_gguf(
        tmp_path / "hf",
        tmp_path / "model.gguf",
        "deepseek-v2-dense",
        absorbed=False,
        kind="q8_0",
    )
    config = theirs.config
    heads, nope, value = 4, config.qk_nope_head_dim, config.v_head_dim
    with closing(open_checkpoint(path)) as checkpoint:
        stem = "model.layers.0.self_attn."
        assert f"{stem}kv_b_proj.weight" not in checkpoint.tensors
        keys, values = (checkpoint.tensors[f"{stem}{n}_b_proj.weight"] for n in "kv")
        assert (keys.format, values.format.name) == (F16, "q8_0")
        assert (keys.shape, values.shape) == ((heads * 32, nope), (heads * value, 32))
        for info in (keys, values):
            pieces = [block.data for block in checkpoint.blocks(info.name, 1)]
            once = checkpoint.read(info.name)
            assert np.array_equal(np.concatenate(pieces), once.data)
            assert once.data.nbytes == info.nbytes
            for start, stop in ((0, 0), (3, 70), (64, 65), (100, info.shape[0])):
                part = checkpoint.read(info.name, start, stop)
                assert part.shape == (stop - start, info.shape[1])
                assert np.array_equal(part.data, once.data[start:stop])
            with pytest.raises(ValueError, match="rows"):
                checkpoint.read(info.name, 0, info.shape[0] + 1)
        both = theirs.model.layers[0].self_attn.kv_b_proj.weight.detach().numpy()
        both = both.reshape(heads, nope + value, 32)
        got = unpack(checkpoint.read(keys.name)).reshape(heads, 32, nope)
        np.testing.assert_allclose(got, both[:, :nope].swapaxes(1, 2), atol=0.01)
        got = unpack(checkpoint.read(values.name)).reshape(heads, value, 32)
        np.testing.assert_allclose(got, both[:, nope:], atol=0.01)
    assert relative_error(logits_of(path, IDS), oracle(theirs, IDS)) < 0.05


def test_prediction_layers(tmp_path: Path) -> None:
    """V3's checkpoints have a layer behind the last."""
    from safetensors.numpy import load_file, save_file

    save_tiny("deepseek-v3", tmp_path)
    expected = logits_of(tmp_path, IDS)
    path = tmp_path / "model.safetensors"
    extra = {"model.layers.3.enorm.weight": np.ones(64, np.float32)}
    save_file({**load_file(path), **extra}, path)
    assert np.array_equal(logits_of(tmp_path, IDS), expected)
    edited(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(UnsupportedModelError, match="not part of"):
        load_ours(tmp_path)


def test_published_scaling(tmp_path: Path) -> None:
    """DeepSeek-V3's own config: the softmax's scale grows, the turns do not."""
    save_tiny("deepseek-v3", tmp_path)
    scaling = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    edited(tmp_path, rope_parameters=None, rope_theta=10000, rope_scaling=scaling)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        spec = read_config(checkpoint).attention[0]
    assert isinstance(spec, LatentSpec)
    assert spec.rope is not None
    assert spec.rope.scale == 1.0
    assert spec.scale == pytest.approx(48**-0.5 * 1.3688879**2)


def test_a_v3_without_its_bias(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    save_tiny("deepseek-v3", tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if "correction" not in k}, path)
    with pytest.raises(CheckpointError, match=r"e_score_correction_bias.*missing"):
        load_ours(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 40}, "rotary and"),
        ({"rope": None}, "rotary keys"),
        ({"kv_heads": 2}, "one of them"),
        ({"window": 8}, "window"),
    ],
)
def test_a_spec_checks_itself(change: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 48,
        "scale": 1.0,
        "eps": 1e-6,
        "rope": Rope((1.0,) * 8),
        "latent": 32,
        "nope": 16,
        "value": 16,
    }
    assert LatentSpec(**values).query_rows == 4 * 32
    with pytest.raises(ValueError, match=message):
        LatentSpec(**{**values, **change})
