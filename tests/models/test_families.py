"""Families from GGUF files: transformers and llama.cpp compute the same."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from transformers import Exaone4Config

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints import open_checkpoint
from localrt.offload.shapes import shape_from_checkpoint
from localrt.offload.store import pack_store
from localrt.quant.formats.tiled import tile_tensor
from tests.checkpoints.make_gguf import write_gguf
from tests.models.make_gguf import FILES, write_tiny_gguf
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

LENGTH = 40


# What older converters wrote otherwise
OLDER: dict[str, tuple[str, dict[str, bool]]] = {
    "qwen3-next, projections together": ("qwen3-next", {"together": True}),
    "mixtral, single experts": ("mixtral", {"stacked": False}),
    **{
        f"{name}, one kv_b": (name, {"absorbed": False})
        for name in FILES
        if name.startswith(("deepseek", "glm4-moe-lite"))
    },
}
FORMS = {
    name: (name, {}) for name in sorted(FILES.keys() - {"gemma4-assistant", "phi3-longrope"})
} | OLDER


@pytest.fixture(scope="module", params=FORMS)
def gguf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(GGUF file, transformers' model)."""
    name, how = FORMS[request.param]
    path = tmp_path_factory.mktemp(name)
    theirs = save_tiny(name, path)
    return write_tiny_gguf(path, path / "m.gguf", name, **how), theirs


def test_gguf(gguf: Any) -> None:
    path, theirs = gguf
    ids = tokens(LENGTH, seed=7)
    assert relative_error(logits_of(path, ids), oracle(theirs, ids)) < 1e-4


@pytest.mark.llamacpp
def test_llama_cpp(
    gguf: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly: the GELU of Gemma is of half precision there."""
    path, theirs = gguf
    ids, kind = tokens(LENGTH, seed=8), theirs.config.model_type
    name, how = FORMS[request.node.callspec.params["gguf"]]
    if FILES[name] == "deepseek2" or "stacked" in how:
        pytest.skip("V2 Lite is known by its layers: test_deepseek.py; experts have to be stacked")
    found = llama_cpp_logits(path, ids, monkeypatch)
    most = 2e-3 if kind.startswith("gemma") else 1e-3
    assert relative_error(logits_of(path, ids), found) < most


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3.5", "blk.0.ssm_conv1d.weight"),
        ("kimi-linear", "blk.0.ssm_dt.bias"),
        ("lfm2", "blk.0.shortconv.conv.weight"),
        ("granite-hybrid", "blk.0.ssm_a"),
    ],
)
def test_bad_recurrent_tensor(tmp_path: Path, name: str, tensor: str) -> None:
    architecture, own, tensors = tiny_contents(tmp_path, name)
    array, kind = tensors.pop(tensor)
    for changed, told in (
        (tensors, "tensor model.layers.0.* is missing"),
        ({**tensors, tensor: (array[:-1], kind)}, r"wrong shape: model.layers.0.*the config asks"),
    ):
        write_gguf(tmp_path / "bad.gguf", architecture, own, changed)
        with pytest.raises(CheckpointError, match=rf"^bad\.gguf: {told}"):
            load_ours(tmp_path / "bad.gguf")


def tiny_contents(folder: Path, name: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A tiny model's file: its architecture, keys and tensors."""
    save_tiny(name, folder)
    reader = GGUFReader(write_tiny_gguf(folder, folder / "m.gguf", name))
    own = {key: field.contents() for key, field in reader.fields.items() if "GGUF." not in key}
    architecture = own.pop("general.architecture")
    tensors = {each.name: (np.array(each.data), "f32") for each in reader.tensors}
    return architecture, own, tensors


@pytest.mark.llamacpp
def test_keys_that_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, own, tensors = tiny_contents(tmp_path, "llama")
    ids = tokens(LENGTH, seed=3)
    for key in ("rope.dimension_count", "rope.freq_base", "attention.key_length"):
        less = {whole: value for whole, value in own.items() if whole != f"{architecture}.{key}"}
        assert len(less) == len(own) - 1
        path = write_gguf(tmp_path / "less.gguf", architecture, less, tensors)[0]
        error = relative_error(logits_of(path, ids), llama_cpp_logits(path, ids, monkeypatch))
        assert error < 2e-3, key


@pytest.mark.llamacpp
def test_exaone_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the model that has them by its layers."""
    sizes = {**CONFIGS["exaone4"]().to_dict(), "num_hidden_layers": 64, "layer_types": None}
    sizes |= {"sliding_window": 16, "sliding_window_pattern": 4}
    monkeypatch.setitem(CONFIGS, "exaone4", lambda: Exaone4Config(**sizes))
    theirs = save_tiny("exaone4", tmp_path)
    path = write_tiny_gguf(tmp_path, tmp_path / "m.gguf", "exaone4")
    ids = tokens(LENGTH)
    ours = logits_of(path, ids)
    assert relative_error(ours, oracle(theirs, ids)) < 1e-4
    assert relative_error(ours, llama_cpp_logits(path, ids, monkeypatch)) < 1e-3


def test_first_files_of_qwen3_next(tmp_path: Path) -> None:
    """They keep a key head's query, key, values and gates together: in pieces as at once."""
    save_tiny("qwen3-next", tmp_path)
    path = write_tiny_gguf(tmp_path, tmp_path / "m.gguf", "qwen3-next", together=True)
    with closing(open_checkpoint(path)) as checkpoint:
        name = "model.layers.0.linear_attn.in_proj_qkv.weight"
        whole = checkpoint.read(name).data
        pieces = [piece.data for piece in checkpoint.blocks(name, max_bytes=7 * whole.shape[1])]
        np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_kimis_config_as_published(tmp_path: Path) -> None:
    """With an object for its delta layers, and layers that are counted from 1."""
    theirs = save_tiny("kimi-linear", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text("utf-8"))
    for key in ("layer_types", "mlp_layer_types"):
        del config[key]
    config["first_k_dense_replace"] = 1
    config["moe_router_activation_func"] = "sigmoid"
    config["linear_attn_config"] = {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    path.write_text(json.dumps(config))
    ids = tokens(LENGTH)
    assert relative_error(logits_of(tmp_path, ids), oracle(theirs, ids)) < 1e-4


def test_minimaxs_config_as_published(tmp_path: Path) -> None:
    """With the number of rotated dimensions instead of their share."""
    theirs = save_tiny("minimax-m2", tmp_path)
    edited(tmp_path, rope_parameters=None, rope_theta=5e4, rotary_dim=16)
    ids = tokens(LENGTH)
    assert relative_error(logits_of(tmp_path, ids), oracle(theirs, ids)) < 1e-4


@pytest.mark.parametrize("name", ["glm4-moe", "nemotron-h-moe"])
def test_prediction_block(name: str, tmp_path: Path) -> None:
    """It is neither read nor packed nor counted."""
    save_tiny(name, tmp_path)
    paths = [
        write_tiny_gguf(tmp_path, tmp_path / f"{blocks}.gguf", name, predicting=blocks)
        for blocks in (0, 1)
    ]
    plain, extended = (logits_of(path, tokens(LENGTH)) for path in paths)
    np.testing.assert_array_equal(extended, plain)
    shapes = []
    for path in paths:
        with closing(open_checkpoint(path)) as checkpoint:
            shapes.append(replace(shape_from_checkpoint(checkpoint), name=""))
            layers = checkpoint.config["num_hidden_layers"]
            store = pack_store(checkpoint, path.with_suffix(""), tiler=tile_tensor)
        assert not [file for file in store.iterdir() if str(layers) in file.name]
    assert shapes[0] == shapes[1]


def llama_cpp_logits(path: Path, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """What llama.cpp computes with a cache in single precision."""
    pytest.importorskip("llama_cpp", reason="needs the llamacpp extra")
    from localrt.engine.llamacpp.engine import LlamaCppEngine
    from localrt.engine.llamacpp.model import LlamaCppModel

    model = LlamaCppModel.load(path, threads=1)
    defaults = model.api.llama_context_default_params

    def precise() -> Any:
        params = defaults()
        params.type_k = params.type_v = model.api.GGML_TYPE_F32
        params.flash_attn_type = model.api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return params

    monkeypatch.setattr(model.api, "llama_context_default_params", precise)
    engine = LlamaCppEngine(model)
    try:
        return np.concatenate(list(engine.logits(ids)))
    finally:
        engine.close()
