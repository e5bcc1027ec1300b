"""Sizes of models: against published totals, and against the files themselves."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import read_config
from localrt.offload.account import Budgets
from localrt.offload.shapes import shape_from_checkpoint
from localrt.planning.models import shape_from_config
from localrt.planning.plan import explain
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.kv_formats import parse_kv_format
from tests.models.tiny import save_tiny
from tests.models.tiny_configs import FAMILIES, FAMILY_MIXTURES
from tests.planner.models import CONFIGS, machine, planned, published

PUBLISHED = {  # billions, of the model cards
    "llama-3-70b": (70.6, 69.5),
    "qwen2.5-coder-1.5b": (1.54, 1.54),
    "phi-4-mini": (3.84, 3.84),
    "qwen3-30b-a3b": (30.53, 3.04),
    "gpt-oss-20b": (20.91, 3.61),
    "gpt-oss-120b": (116.83, 5.13),
    "deepseek-v3": (671.0, 36.6),
    "kimi-linear-48b-a3b": (49.1, 3.1),
    "qwen3.8-flash-next": (176.9, 6.67),  # 125 and a table of 51; its card leaves out the head
    "lfm2-1.2b": (1.17, 1.17),
    "llama-3.2-1b": (1.24, 1.24),
    "falcon-h1-7b": (7.59, 7.19),
    "nemotron-3-nano-30b-a3b": (31.6, 3.2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters(name: str) -> None:
    shape = published(name)
    total, active = PUBLISHED[name]
    assert shape.parameters == pytest.approx(total * 1e9, rel=0.01)
    assert shape.active_parameters == pytest.approx(active * 1e9, rel=0.01)
    lengths = (CONFIGS[name].get(key) for key in ("max_position_embeddings", "model_max_length"))
    assert shape.context_length in lengths


def test_format() -> None:
    small, large = (
        shape_from_config(CONFIGS["llama-3-70b"], name="m", format=name)
        for name in ("int4-g32", "bf16")
    )
    assert small.nbytes == pytest.approx(small.parameters * 4.5 / 8, rel=0.001)
    assert large.nbytes == pytest.approx(2 * large.parameters, rel=0.001)
    assert max(unit.nbytes for unit in small.units if unit.kind == "head") <= 8 << 20
    assert all(unit.nbytes % 4096 == 0 for unit in small.units)
    assert len({unit.name for unit in small.units}) == len(small.units)


def test_unknown_scheme() -> None:
    config = {**CONFIGS["llama-3-70b"], "quantization_config": {"quant_method": "quark"}}
    with pytest.raises(UnsupportedModelError, match="with quark, which localrt cannot read"):
        shape_from_config(config, name="m")
    assert shape_from_config(config, name="m", format="int4-g32").nbytes


def test_latent_attention() -> None:
    shape = published("deepseek-v3")
    assert sum(shape.kv_token_nbytes("bf16")) == 61 * 2 * (512 + 64)
    plain = published("qwen2.5-coder-1.5b")
    assert sum(plain.kv_token_nbytes("bf16")) == 28 * 2 * 2 * 2 * 128
    assert sum(plain.kv_token_nbytes("int8")) == 28 * 2 * 2 * (128 + 4)
    assert sum(plain.kv_token_nbytes("int4")) < sum(plain.kv_token_nbytes("int8"))


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek-v3", "deepseek-v4", "gemma4-keys-as-values", "phi3", "mixtral"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in (*FAMILIES, *FAMILY_MIXTURES)),
    ],
)
def test_config_and_store(name: str, tmp_path: Path) -> None:
    """Bytes, work and caches, from the config alone and from the weights."""
    save_tiny(name, tmp_path)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        exact = shape_from_checkpoint(checkpoint)
        specs = read_config(checkpoint).attention
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    planned = shape_from_config(config, name="m", format="f32")
    assert planned.parameters == exact.parameters
    assert (planned.kv, planned.context_length) == (exact.kv, exact.context_length)
    for ours, theirs in ((planned, exact), (exact, planned)):
        sizes = {u.name: (u.nbytes, u.macs) for u in theirs.units}
        found = {u.name: (u.nbytes, u.macs) for u in ours.units if u.layer is not None}
        assert found.items() <= sizes.items()
    ops = NativeOps(threads=1)
    assert ops.kv_nbytes(specs, 300) == sum(planned.kv_nbytes("bf16", 300))
    if name == "deepseek-v4":  # whose cache is bf16
        assert planned.kv_nbytes("int8", 300) == planned.kv_nbytes("bf16", 300)
        return
    int8 = NativeOps(threads=1, kv_format="int8")
    assert int8.kv_nbytes(specs, 300) == sum(planned.kv_nbytes("int8", 300))


def test_experts() -> None:
    shape = published("qwen3-30b-a3b")
    experts = [unit for unit in shape.units if unit.kind == "expert"]
    assert len(experts) == 48 * 128
    assert shape.routed == tuple(experts)
    assert sum(len(step) == 128 for step in shape.steps) == 48
    assert experts[0].use == 8 / 128
    assert shape.experts is not None
    assert shape.pass_nbytes < 0.12 * shape.nbytes


def test_quantized_experts() -> None:
    shape = published("gpt-oss-20b")
    formats = {unit.kind: unit.format for unit in shape.units if unit.kind != "norm"}
    assert formats.pop("expert") == "mxfp4"
    assert set(formats.values()) == {"bf16"}
    assert "experts in mxfp4" in shape.notes[0]
    assert shape.nbytes == pytest.approx(13.8e9, rel=0.01)  # the published files'
    other = shape_from_config(CONFIGS["gpt-oss-20b"], name="m", format="int4-g32")
    assert {unit.format for unit in other.units if unit.kind != "norm"} == {"int4-g32"}


def test_too_many_experts() -> None:
    config = {**CONFIGS["qwen3-30b-a3b"], "num_experts_per_tok": 129}
    with pytest.raises(UnsupportedModelError, match="129 experts for each token"):
        shape_from_config(config, name="m")
    config = {**CONFIGS["qwen3-30b-a3b"], "num_hidden_layers": 32, "num_experts": 4096}
    assert shape_from_config(config, name="m", experts=1).layers == 32
    with pytest.raises(CheckpointError, match="135168 experts are more than can be"):
        shape_from_config({**config, "num_hidden_layers": 33}, name="m", experts=1)


def test_bad_configs() -> None:
    with pytest.raises(UnsupportedModelError, match="model_type 'mamba'"):
        shape_from_config({"model_type": "mamba"}, name="m")
    with pytest.raises(CheckpointError, match="num_attention_heads must be"):
        shape_from_config({"model_type": "llama", "num_attention_heads": 0}, name="m")
    with pytest.raises(UnsupportedModelError, match="int3"):
        shape_from_config(CONFIGS["phi-4-mini"], name="m", format="int3")
    with pytest.raises(ValueError, match="kv_format"):
        parse_kv_format("fp8")


def test_layers_without_cache() -> None:
    shape = shape_from_config(CONFIGS["nemotron-3-nano-30b-a3b"], name="m")
    assert (len(shape.attending), sum(bool(layer.states) for layer in shape.kv)) == (6, 23)
    units = Counter(unit.kind for unit in shape.units if unit.layer is not None)
    assert units == {"attention": 29, "mlp": 23, "expert": 23 * 128}
    budgets = Budgets(ram=20 << 30, vram=16 << 30)
    plan = planned(shape, machine(gpu=True), budgets, ctx=512)
    assert "keys and values: 29 layers in GPU memory" in explain(plan)
