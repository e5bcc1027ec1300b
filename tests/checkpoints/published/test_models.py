"""Whole models as others publish them: logits of transformers', packed, streamed, mixtures too."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from localrt.cli import main
from localrt.common.errors import UnsupportedModelError
from localrt.models.checkpoints import open_checkpoint
from localrt.offload.store import pack_store
from localrt.quant.formats import unpack
from localrt.quant.formats.tiled import TiledTensor, untile
from tests.checkpoints.published.models import SMALL, publish
from tests.checkpoints.published.schemes import Tensors
from tests.models import tiny
from tests.models.tiny import logits_of, oracle, relative_error, save_tiny, tokens
from tests.offload.placed import Model, extend, needs_kernels, passing

# One scale a row is that of the largest groups that divide it; one group is always in order.
ALSO = {"W8A8": ("int8-g64b", "int8-g128b"), "GPTQ ordered": ("int4-g32",)}


def error_of(folder: Path, theirs: Any) -> float:
    """Of our logits against transformers'."""
    ids = tokens(20)
    return relative_error(logits_of(folder, ids), oracle(theirs, ids))


def kinds(*quick: str) -> list[Any]:
    """All schemes; but for a few, of each way to pack one, in the whole check alone."""
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in SMALL]


@pytest.mark.parametrize("name", kinds("W4A16", "GPTQ ordered", "FP8"))
def test_logits(name: str, tmp_path: Path) -> None:
    folder, theirs, formats = publish(tmp_path, "qwen3-moe", SMALL[name], shards=3)
    with closing(open_checkpoint(folder)) as model:
        for key, info in model.tensors.items():
            wanted = formats.get(key, "f32")
            assert info.format.name in (wanted, *ALSO.get(name, ()) * (key in formats))
        assert set(formats) <= set(model.tensors)
    assert any(".experts.7.up_proj" in key for key in formats)
    assert error_of(folder, theirs) < 2e-5


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mixtral", "W4A16"),
        *(
            pytest.param(name, kind, marks=pytest.mark.slow)
            for names, kind in (
                ("llama phi3 qwen2-moe granite-moe-shared qwen3.5-moe falcon-h1", "W4A16"),
                ("ernie-moe lfm2-moe", "W4A16"),
                ("phi3 granite-moe-shared lfm2-moe", "ModelOpt NVFP4"),
            )
            for name in names.split()
        ),
    ],
)
def test_architectures(name: str, kind: str, tmp_path: Path) -> None:
    folder, theirs, formats = publish(tmp_path, name, SMALL[kind])
    assert formats
    assert error_of(folder, theirs) < 2e-5


@pytest.mark.parametrize("kind", ["W4A16", "GPTQ"])
def test_tied_quantized_head(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding counts, as the config says."""
    config = tiny.CONFIGS["qwen2"]()
    config.vocab_size = 224
    monkeypatch.setitem(tiny.CONFIGS, "qwen2", lambda: config)

    def taken(name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and "embed_tokens" not in name

    folder, theirs, formats = publish(tmp_path, "qwen2", SMALL[kind], taken=taken)
    assert "lm_head.weight" in formats
    published = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**published, "tie_word_embeddings": True}))
    theirs.lm_head.weight = theirs.model.embed_tokens.weight
    assert error_of(folder, theirs) < 2e-5


@pytest.mark.parametrize("kind", ["FP8", "W4A16"])
def test_latent_attention(kind: str, tmp_path: Path) -> None:
    def taken(name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and ("kv_b_proj" in name or "mlp" in name) and "gate." not in name

    folder, theirs, formats = publish(tmp_path, "deepseek-v3", SMALL[kind], taken=taken)
    assert any("kv_b_proj" in name for name in formats)
    with closing(open_checkpoint(folder)) as model:
        kinds = {
            part: model.tensors[f"model.layers.0.self_attn.{part}_b_proj.weight"].format.name
            for part in "kv"
        }
        assert kinds == {"k": "f32", "v": SMALL[kind].format}
    assert error_of(folder, theirs) < 2e-5


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("qwen3-moe", ".experts.0.", ".switch_mlp."),
        ("deepseek-v3", "kv_b_proj.", "embed_q."),
        ("qwen3-next", "conv1d.weight", None),
        ("falcon-h1", "conv1d.weight", None),
    ],
)
def test_converted_for_mlx(name: str, old: str, new: str | None, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    tensors = {
        key if new is None else key.replace(old, new): (
            tensor.movedim(2, 1).contiguous() if new is None and old in key else tensor
        )
        for key, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="was converted for MLX: take a GGUF file of"):
        open_checkpoint(tmp_path)


def test_layer_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny.CONFIGS["gemma4"]()
    plain.hidden_size_per_layer_input, plain.vocab_size_per_layer_input = 32, 224
    monkeypatch.setitem(tiny.CONFIGS, "gemma4", lambda: plain)

    def taken(name: str, shape: tuple[int, ...]) -> bool:
        return "embed_tokens_per_layer" in name

    folder, theirs, formats = publish(tmp_path, "gemma4", SMALL["W4A16"], taken=taken)
    assert formats
    assert error_of(folder, theirs) < 2e-5


def test_stacked_fp8_experts(tmp_path: Path) -> None:
    def stacked(tensors: Tensors) -> Tensors:
        found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        for name in tensors:
            if ".experts.0.gate_proj." not in name and ".experts.0.down_proj." not in name:
                continue
            head, _, tail = name.partition(".experts.0.")
            kind, _, part = tail.partition("_proj.weight")
            kinds = ("gate", "up") if kind == "gate" else ("down",)
            whole = [
                torch.cat([tensors[f"{head}.experts.{n}.{k}_proj.weight{part}"].float()
                           for k in kinds])
                for n in range(8)
            ]  # fmt: skip
            target = "gate_up_proj" if kind == "gate" else "down_proj"
            found[f"{head}.experts.{target}{part}"] = torch.stack(whole).to(tensors[name].dtype)
        return found

    folder, theirs, formats = publish(tmp_path, "qwen3-moe", SMALL["FP8"], renamed=stacked)
    with closing(open_checkpoint(folder)) as model:
        assert set(formats) <= set(model.tensors)
    assert error_of(folder, theirs) < 2e-5


@needs_kernels
@pytest.mark.parametrize("name", kinds("AWQ"))
def test_packed_and_streamed(name: str, tmp_path: Path) -> None:
    folder, _, formats = publish(tmp_path, "qwen3-moe", SMALL[name])
    with closing(open_checkpoint(folder)) as source:
        path = pack_store(source, tmp_path / "store")
        with closing(Model(path)) as model:
            for key in formats:
                (block,) = model.store.blocks(key)
                assert isinstance(block, TiledTensor)
                np.testing.assert_array_equal(unpack(untile(block)), unpack(source.read(key)))
            here = model.resident.cache(64)
            streamed = [n for n in passing(model.store) if not n.endswith(("expert.0", "expert.1"))]
            with model.placed(streamed) as placed:
                there = placed.cache(64)
                for part in (tokens(20), [5], [9]):
                    want = extend(model.resident, here, part)
                    np.testing.assert_array_equal(extend(placed, there, part), want)


@pytest.mark.usefixtures("quiet_machine")
def test_show_and_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _, _ = publish(tmp_path, "llama", SMALL["FP8"])
    for command in ("show", "plan"):
        assert main([command, str(folder)]) == 0
        said = capsys.readouterr().out
        assert "published in fp8, held exactly as e4m3-g32" in said
        assert "(W8A8): localrt runs it as weight-only" in said
