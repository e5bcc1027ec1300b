"""Whole models as others publish them: logits of transformers', packed, streamed, mixtures too."""

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

from localrt.cli import main
from localrt.common.errors import UnsupportedModelError
from localrt.models.checkpoints import open_checkpoint
from localrt.offload.store import pack_store
from localrt.quant.formats import unpack
from localrt.quant.formats.tiled import TiledTensor, untile
from tests.checkpoints.published.schemes import (
    BF16,
    SCHEMES,
    Published,
    Tensors,
    awq,
    compressed,
    fp8,
    gptq,
    scheme,
)
from tests.models import tiny
from tests.models.tiny import logits_of, oracle, relative_error, save_tiny, tokens
from tests.offload.placed import Model, extend, needs_kernels, passing

SMALL: dict[str, Callable[[], Published]] = {
    "W4A16": SCHEMES["W4A16 g32"],
    "W4A16 asymmetric": lambda: scheme(
        "int4-g32z", compressed("pack-quantized", "W4A16_ASYM", BF16, group_size=32)
    ),
    "W8A8": lambda: scheme("int8-g32b", compressed("int-quantized", "INT8_W8A8", BF16)),
    "NVFP4": SCHEMES["NVFP4A16"],
    "MXFP4": SCHEMES["MXFP4A16"],
    "GPTQ": SCHEMES["GPTQ g32"],
    "GPTQ asymmetric": lambda: scheme("int4-g32z", gptq(4, 32, symmetric=False)),
    "GPTQ ordered": lambda: scheme("f32", gptq(4, 32, symmetric=True, ordered=True)),
    "AWQ": lambda: scheme("int4-g32z", awq(32)),
    "NF4": SCHEMES["NF4 twice"],
    "FP8": lambda: scheme("e4m3-g32", fp8((32, 32))),
    "ModelOpt NVFP4": SCHEMES["ModelOpt NVFP4"],
}
"""Schemes in the smallest groups they have."""


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Whether these models' quantizers take a tensor; the others keep their type."""
    left_out = ("embed_tokens", "lm_head", "mlp.gate.", "router", "kv_b_proj")
    return len(shape) == 2 and not any(word in name for word in left_out)


def publish(
    folder: Path,
    name: str,
    of: Callable[[], Published],
    *,
    taken: Callable[[str, tuple[int, ...]], bool] = is_quantized,
    shards: int = 1,
) -> tuple[Path, Any, dict[str, str]]:
    """A tiny model published, transformers' own of the same values, and what became of matrices."""
    published, plain = of(), folder / "plain"
    plain.mkdir()
    oracle = save_tiny(name, plain).module
    kept = load_file(plain / "model.safetensors")
    tensors: Tensors = {}
    formats: dict[str, str] = {}
    for key, tensor in kept.items():
        columns = tensor.shape[-1]
        fits = columns % 32 == 0 and ("nf4" not in published.format or columns % 64 == 0)
        if not (fits and tensor.shape[0] % 32 == 0 and taken(key, tuple(tensor.shape))):
            tensors[key] = tensor
            continue
        stem = key.removesuffix(".weight")
        parts, values = published.write(tensor)
        kept[key] = torch.from_numpy(np.ascontiguousarray(values))
        formats[key] = published.format
        tensors |= {f"{stem}.{part}": content.contiguous() for part, content in parts.items()}
    save_file(kept, plain / "model.safetensors", metadata={"format": "pt"})
    oracle = type(oracle).from_pretrained(plain, dtype=torch.float32).eval()
    out = folder / "published"
    out.mkdir()
    config = json.loads((plain / "config.json").read_text("utf-8"))
    (out / "config.json").write_text(json.dumps({**config, **published.config}))
    _save(out, tensors, shards)
    return out, oracle, formats


def _save(folder: Path, tensors: Tensors, shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    names = sorted(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        own = {name: tensors[name] for name in names[shard::shards]}  # a weight's lie apart
        save_file(own, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


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
            for name, kind in (
                *((name, "W4A16") for name in ("phi3", "qwen3.5-moe", "falcon-h1", "ernie-moe")),
                *((name, "ModelOpt NVFP4") for name in ("granite-moe-shared", "lfm2-moe")),
            )
        ),
    ],
)
def test_architectures(name: str, kind: str, tmp_path: Path) -> None:
    folder, theirs, formats = publish(tmp_path, name, SMALL[kind])
    assert formats
    assert error_of(folder, theirs) < 2e-5


def test_tied_quantized_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding counts, as the config says."""
    config = tiny.CONFIGS["qwen2"]()
    config.vocab_size = 224
    monkeypatch.setitem(tiny.CONFIGS, "qwen2", lambda: config)

    def taken(name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and "embed_tokens" not in name

    folder, theirs, formats = publish(tmp_path, "qwen2", SMALL["W4A16"], taken=taken)
    assert "lm_head.weight" in formats
    published = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**published, "tie_word_embeddings": True}))
    theirs.lm_head.weight = theirs.model.embed_tokens.weight
    assert error_of(folder, theirs) < 2e-5


def test_latent_attention(tmp_path: Path) -> None:
    def taken(name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and ("kv_b_proj" in name or "mlp" in name) and "gate." not in name

    folder, theirs, formats = publish(tmp_path, "deepseek-v3", SMALL["FP8"], taken=taken)
    assert any("kv_b_proj" in name for name in formats)
    with closing(open_checkpoint(folder)) as model:
        kinds = {
            part: model.tensors[f"model.layers.0.self_attn.{part}_b_proj.weight"].format.name
            for part in "kv"
        }
        assert kinds == {"k": "f32", "v": "e4m3-g32"}
    assert error_of(folder, theirs) < 2e-5


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("qwen3-moe", ".experts.0.", ".switch_mlp."),
        ("deepseek-v3", "kv_b_proj.", "embed_q."),
        ("qwen3-next", "conv1d.weight", None),
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
