"""LoRA adapters against PEFT's own, alone and together in a pass, on weights here and streamed."""

from __future__ import annotations

import json
import re
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from localrt.common.errors import CheckpointError, LocalrtError, UnsupportedModelError
from localrt.models.checkpoints import Checkpoint, open_checkpoint
from localrt.models.checkpoints.adapters import (
    MergedCheckpoint,
    read_adapter,
    text_module,
    why_only_merged,
)
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.offload.store.pack import pack_store
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats.tiled import tile_tensor
from localrt.quant.ops.adapters import Adapter, LowRank, Mix
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch, Ops
from localrt.quant.reference.ops import TorchOps
from tests.checkpoints.make_gguf import in_pairs, write_gguf
from tests.models.adapters import make_adapter, peft_logits
from tests.models.test_model import some
from tests.models.tiny import relative_error, tiny_model, tokens
from tests.offload.placed import Model, needs_kernels, passing

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "ranks": {"rank_pattern": {"down_proj": 3}, "alpha_pattern": {"down_proj": 5}},
    "tokens": {"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]},
}


class Tiny:
    """A tiny model's folder, and the adapters that were made of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.tiny = name, folder, tiny_model(name)
        self.checkpoint = open_checkpoint(self.tiny.folder)

    @cached_property
    def base(self) -> Any:
        """Transformers' model, which an adapter that is made of it changes."""
        return tiny_model(self.name).module

    def adapter(self, label: str, seed: int = 0, **config: Any) -> tuple[Adapter[LowRank], Any]:
        """One that was read back, and PEFT's model with it."""
        base = tiny_model(self.name).module
        model = make_adapter(base, self.folder / label, seed, **config)
        return read_adapter(self.folder / label, self.checkpoint), model

    def decoder(self, ops: Ops, *adapters: Adapter[LowRank]) -> Decoder:
        """The base on ``ops``, with adapters to choose from."""
        return decoder_of(self.checkpoint, ops, *adapters)


def decoder_of(checkpoint: Checkpoint, ops: Ops, *adapters: Adapter[LowRank]) -> Decoder:
    decoder = load_decoder(checkpoint, ops, read_config(checkpoint))
    assert ops.adapters is not None
    for adapter in adapters:
        ops.adapters.add(ops.adapters.packed(adapter))
    return decoder


def cache(decoder: Decoder, *mix: Adapter[LowRank] | tuple[Adapter, float]) -> KVCache:
    """An empty cache for tokens with so much of each adapter."""
    made = decoder.cache(64)
    parts = [part if isinstance(part, tuple) else (part, 1.0) for part in mix]
    chosen: Mix = tuple((adapter.key, weight) for adapter, weight in parts)
    made.mix = chosen
    return made


def run(decoder: Decoder, made: KVCache, ids: list[int]) -> np.ndarray:
    return decoder.forward(Batch.extend([(made, ids)]))


@pytest.fixture
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Tiny:
    return Tiny(getattr(request, "param", "qwen2"), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "tiny", ["llama-tied-bias", pytest.param("gemma2", marks=pytest.mark.slow)], indirect=True
)
def test_logits_are_those_of_peft(tiny: Tiny, kind: str) -> None:
    adapter, theirs = tiny.adapter("a", **KINDS[kind])
    ids = tokens(11)
    decoder = tiny.decoder(TorchOps(compute_format="f32"), adapter)
    assert (
        relative_error(run(decoder, cache(decoder, adapter), ids), peft_logits(theirs, ids)) < 1e-4
    )


def test_an_adapter_of_mlx(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora"}))
    (tmp_path / "adapters.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"an adapter of mlx-lm, .*: take one of PEFT"):
        read_adapter(tmp_path, tiny.checkpoint)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "tiny", ["phi3", pytest.param("gemma2", marks=pytest.mark.slow)], indirect=True
)
def test_kernels(tiny: Tiny, kind: str) -> None:
    config = KINDS[kind]
    if tiny.name == "phi3" and kind == "tokens":  # its projections are joined
        config = {"target_modules": ["qkv_proj", "embed_tokens"]}
    adapter, theirs = tiny.adapter("a", **config)
    ids = tokens(11)
    decoder = tiny.decoder(NativeOps(threads=2), adapter)
    exact = tiny.decoder(TorchOps(compute_format="f32"), adapter)
    plain = relative_error(run(decoder, cache(decoder), ids), run(exact, cache(exact), ids))
    error = relative_error(run(decoder, cache(decoder, adapter), ids), peft_logits(theirs, ids))
    # A and B are rounded to bytes as activations are, and these adapters change the answer more
    # than the base's weights do.
    assert error < max(5 * plain, 5e-3)


def test_weighted_set(tiny: Tiny) -> None:
    first, second = (tiny.adapter(name, n, r=4 * n)[0] for n, name in enumerate("ab", 1))
    import peft

    theirs = peft.PeftModel.from_pretrained(tiny.base, tiny.folder / "a", adapter_name="a")
    theirs.load_adapter(tiny.folder / "b", "b")
    theirs.add_weighted_adapter(["a", "b"], [0.7, 0.3], "both", combination_type="cat")
    theirs.set_adapter("both")
    ids = tokens(9)
    decoder = tiny.decoder(TorchOps(compute_format="f32"), first, second)
    found = run(decoder, cache(decoder, (first, 0.7), (second, 0.3)), ids)
    assert relative_error(found, peft_logits(theirs, ids)) < 1e-4


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_batch(tiny: Tiny, threads: int) -> None:
    adapters = [tiny.adapter(f"{n}", n, r=4 + 9 * n, use_dora=n == 2)[0] for n in range(3)]
    decoder = tiny.decoder(NativeOps(threads=threads), *adapters)
    chosen: list[tuple[Adapter[LowRank], ...]] = [
        (),
        *((each,) for each in adapters),
        tuple(adapters),
    ]
    prompts = [tokens(3 + 2 * n, n) for n in range(len(chosen))]
    plain = load_decoder(tiny.checkpoint, NativeOps(threads=1), read_config(tiny.checkpoint))
    alone = [
        run(decoder if mix else plain, cache(decoder if mix else plain, *mix), ids)
        for mix, ids in zip(chosen, prompts, strict=True)
    ]
    caches = [cache(decoder, *mix) for mix in chosen]
    together = decoder.forward(Batch.extend(list(zip(caches, prompts, strict=True))))
    np.testing.assert_array_equal(together, np.concatenate(alone))


@needs_kernels
def test_streamed(tiny: Tiny) -> None:
    adapter, _ = tiny.adapter(
        "a", target_modules=["q_proj", "o_proj", "gate_proj", "embed_tokens", "lm_head"]
    )
    here = tiny.decoder(NativeOps(threads=1), adapter)
    want = run(here, cache(here, adapter), tokens(6))
    store = pack_store(tiny.checkpoint, tiny.folder / "store", tiler=tile_tensor)
    with closing(Model(store)) as model, model.placed(passing(model.store)) as placed:
        assert placed.ops.adapters is not None
        placed.ops.adapters.add(placed.ops.adapters.packed(adapter))
        np.testing.assert_array_equal(run(placed, cache(placed, adapter), tokens(6)), want)


def test_removed(tiny: Tiny) -> None:
    adapter, _ = tiny.adapter("a")
    decoder = tiny.decoder(TorchOps(compute_format="f32"), adapter)
    made = cache(decoder, adapter)
    run(decoder, made, [5])
    assert decoder.ops.adapters is not None
    decoder.ops.adapters.remove(adapter.key)
    with pytest.raises(LocalrtError, match="removed"):
        run(decoder, made, [6])
    run(decoder, cache(decoder), [5])


@pytest.mark.parametrize("tiny", ["qwen2", "llama-tied-bias", "glm-ocr"], indirect=True)
def test_gguf(tiny: Tiny) -> None:
    adapter, _ = tiny.adapter("a")
    architecture = {"qwen2": "qwen2", "llama-tied-bias": "llama", "glm-ocr": "glm4"}[tiny.name]
    stems = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "mlp.down_proj": "ffn_down",
    }
    tensors = {}
    for name, part in adapter.matrices.items():
        layer, stem = name.split(".")[2], ".".join(name.split(".")[3:5])
        if stem in stems:
            b = part.b / 2  # alpha is twice the rank
            if architecture == "llama" and stem != "mlp.down_proj":
                keys = "num_attention_heads" if "q_proj" in stem else "num_key_value_heads"
                b = in_pairs(b, tiny.checkpoint.config[keys])
            gguf = f"blk.{layer}.{stems[stem]}.weight"
            tensors |= {f"{gguf}.lora_a": (part.a, "f32"), f"{gguf}.lora_b": (b, "f32")}
    path = tiny.folder / "a.gguf"
    keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 16.0}
    write_gguf(path, architecture, keys, tensors)
    blob = path.rename(tiny.folder / "sha256-0123")  # as Ollama calls its files
    again = read_adapter(blob, tiny.checkpoint)
    assert len(again.matrices) == len(tensors) // 2
    for name, part in again.matrices.items():
        np.testing.assert_allclose(part.a, adapter.matrices[name].a)
        np.testing.assert_allclose(part.b, adapter.matrices[name].b, rtol=1e-6)


def edited(folder: Path, old: str, new: str) -> None:
    path = folder / "adapter_config.json"
    path.write_text(path.read_text("utf-8").replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"peft_type": "LORA"', '"peft_type": "IA3"', "IA3"),
        ('"r": 8', '"r": 4', "rank 8, the config.s r .* says 4"),
        ('"use_dora": false', '"use_dora": true', "has no magnitudes, though adapter_config"),
        ('"rank_pattern": {}', '"rank_pattern": {"([a-z.]+)+!": 4}', "too long to match"),
    ],
)
def test_bad_configs(tiny: Tiny, old: str, new: str, says: str) -> None:
    make_adapter(tiny.base, tiny.folder / "a")
    edited(tiny.folder / "a", old, new)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=says) as caught:
        read_adapter(tiny.folder / "a", tiny.checkpoint)
    assert "\n" not in str(caught.value)


# Keys of PEFT's LoRA config with a value that turns them on, whether they are refused then.
REFUSED: dict[str, Any] = {
    "alora_invocation_tokens": [5, 6],
    "arrow_config": {"top_k": 3},
    "bias": "lora_only",
    "fan_in_fan_out": True,
    "kasa_config": {"beta": 1e-4},
    "layer_replication": [[0, 2], [1, 3]],
    "lora_bias": True,
    "megatron_config": {"layers": 2},
    "monteclora_config": {"num_samples": 2},
    "trainable_token_indices": [5],
    "use_bdlora": {"nblocks": 2},
    "use_qalora": True,
    "velora_config": {"num_groups": 4},
}
TAKEN: dict[str, Any] = {
    "alpha_pattern": {"q_proj": 16},
    "init_lora_weights": "gaussian",
    "lora_alpha": 16,
    "peft_type": "LORA",
    "r": 8,
    "rank_pattern": {"q_proj": 8},
    "use_dora": False,  # true: ``KINDS``
    "use_rslora": True,
}
WITHOUT_EFFECT = """
    auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config exclude_modules
    inference_mode layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config
    megatron_core modules_to_save peft_version qalora_group_size revision target_modules
    target_parameters task_type
"""


def test_every_key_of_peft(tiny: Tiny) -> None:
    import peft

    taken = TAKEN | {key: ["q_proj"] for key in WITHOUT_EFFECT.split()}
    assert (REFUSED | taken).keys() == peft.LoraConfig().to_dict().keys()
    make_adapter(tiny.base, tiny.folder / "a", target_modules=["q_proj"])
    path = tiny.folder / "a" / "adapter_config.json"
    config = json.loads(path.read_text("utf-8"))
    taken |= {"merge_weights": True, "enable_lora": None}  # of the oldest PEFT
    for key, value in taken.items():
        path.write_text(json.dumps({**config, key: value}))
        assert read_adapter(path.parent, tiny.checkpoint).matrices
    for key, value in (REFUSED | {"invocation_string": "<r>", "use_mora": True}).items():
        path.write_text(json.dumps({**config, key: value}))
        with pytest.raises(UnsupportedModelError, match=key):
            read_adapter(path.parent, tiny.checkpoint, merging=True)


# Values of init_lora_weights: whether PEFT leaves the model's own matrices as they are.
STARTS: dict[object, bool] = {
    **dict.fromkeys((None, True, False, "gaussian", "Gaussian", "eva", "orthogonal"), True),
    **dict.fromkeys(("mica", "lora_ga"), True),
    **dict.fromkeys(("pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq"), False),
    **dict.fromkeys(("another", ("pissa",)), False),
}
QUICK = ("gaussian", "pissa_niter_16")


def test_every_start_of_peft_is_known() -> None:
    import peft

    named = re.findall(r"'(\w+?)(_\[.+?\])?'", peft.LoraConfig.__annotations__["init_lora_weights"])
    assert named
    for value, argument in named:
        assert value + ("_16" if argument else "") in STARTS


@pytest.mark.filterwarnings("ignore::UserWarning")  # that a start has no config of its own
@pytest.mark.parametrize(
    "start", [pytest.param(s, marks=() if s in QUICK else pytest.mark.slow) for s in STARTS]
)
def test_start(tiny: Tiny, start: object) -> None:
    make_adapter(tiny.base, tiny.folder / "a", target_modules=["q_proj", "down_proj"])
    path = tiny.folder / "a" / "adapter_config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**config, "init_lora_weights": start}))
    if not STARTS[start]:
        with pytest.raises(UnsupportedModelError, match=r"init_lora_weights is .*merge_and_unload"):
            read_adapter(path.parent, tiny.checkpoint, merging=True)
        return
    import peft

    adapter = read_adapter(path.parent, tiny.checkpoint)
    theirs = peft.PeftModel.from_pretrained(tiny_model("qwen2").module, path.parent)
    decoder, ids = tiny.decoder(TorchOps(compute_format="f32"), adapter), tokens(7)
    found = run(decoder, cache(decoder, adapter), ids)
    assert relative_error(found, peft_logits(theirs.eval(), ids)) < 1e-4


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        ("adapter.alora.invocation_tokens", [5, 6], True),
        ("adapter.lora.task_name", "retrieval", False),
        ("adapter.lora.prompt_prefix", "Query: ", False),
    ],
)
def test_keys_of_gguf(tiny: Tiny, key: str, value: Any, refused: bool) -> None:
    rows, columns = tiny.checkpoint.tensors["model.layers.0.mlp.down_proj.weight"].shape
    tensors: dict[str, Any] = {
        "blk.0.ffn_down.weight.lora_a": (np.ones((2, columns), np.float32), "f32"),
        "blk.0.ffn_down.weight.lora_b": (np.ones((rows, 2), np.float32), "f32"),
    }
    keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 4.0}
    write_gguf(tiny.folder / "a.gguf", "qwen2", {**keys, key: value}, tensors)
    if not refused:
        assert read_adapter(tiny.folder / "a.gguf", tiny.checkpoint).matrices
        return
    with pytest.raises(UnsupportedModelError, match=f"{key}: only plain LoRA"):
        read_adapter(tiny.folder / "a.gguf", tiny.checkpoint, merging=True)


def test_numbers_that_are_none(tiny: Tiny) -> None:
    make_adapter(tiny.base, tiny.folder / "a", target_modules=["q_proj"])
    path = tiny.folder / "a" / "adapter_model.safetensors"
    whole = load_file(path)
    name = next(iter(whole))
    save_file({**whole, name: whole[name].astype(np.int32)}, path)
    with pytest.raises(UnsupportedModelError, match="is I32, which localrt cannot read"):
        read_adapter(path.parent, tiny.checkpoint)
    save_file({**whole, name: whole[name] * np.float32("nan")}, path)
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors: .* no finite numbers"):
        read_adapter(path.parent, tiny.checkpoint)


def test_adapters_of_another_model(tiny: Tiny, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_adapter(tiny_model("llama-tied-bias").module, other / "a")
    with pytest.raises(CheckpointError, match="for another model"):
        read_adapter(other / "a", tiny.checkpoint)
    with pytest.raises(CheckpointError, match="no adapter"):
        read_adapter(tiny.tiny.folder, tiny.checkpoint)


@pytest.mark.parametrize("tiny", ["deepseek-v2-dense"], indirect=True)
def test_matrices_in_parts(tiny: Tiny) -> None:
    make_adapter(tiny.base, tiny.folder / "a", target_modules=["kv_b_proj"])
    with pytest.raises(CheckpointError, match=r"kv_b_proj': each head's .* merge it with PEFT"):
        read_adapter(tiny.folder / "a", tiny.checkpoint)


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
    import torch

    return [
        name
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear
        and name != "lm_head"
        and "expert" not in name
        and not name.endswith(("kv_b_proj", "router.proj"))
    ]


def adapted(checkpoint: Checkpoint, ops: Ops, adapter: Adapter[LowRank]) -> np.ndarray:
    decoder = decoder_of(checkpoint, ops, adapter)
    return run(decoder, cache(decoder, adapter), IDS)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ernie", {"use_dora": True}),  # rows of queries and keys lie in pairs
        pytest.param("glm4", {}, marks=pytest.mark.slow),  # in half of each head
        pytest.param("granite-hybrid", {}, marks=pytest.mark.slow),  # gate and up are one matrix
        ("qwen3-next", {"use_dora": True}),  # rows of a key head lie together
        pytest.param("gemma3-images", {}, marks=pytest.mark.slow),  # the encoder is left out
    ],
)
def test_families_are_those_of_peft(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    tiny = Tiny(name, tmp_path)
    adapter, theirs = tiny.adapter("a", target_modules=linear_modules(tiny.base), **config)
    found = adapted(tiny.checkpoint, TorchOps(compute_format="f32"), adapter)
    assert relative_error(found, peft_logits(theirs, IDS)) < 1e-4


# Rows of queries and keys of GLM-4.1V lie in halves.
@some(("qwen3.5", "qwen3-next", "granite-hybrid", "nemotron-h", "glm4v"), ("qwen3.5", "glm4v"))
def test_gguf_base(name: str, tmp_path: Path) -> None:
    tiny = Tiny(name, tmp_path)
    base = tiny_model(name).module
    base.config.model_type = "llama"  # PEFT leaves Mamba's modules out
    modules = linear_modules(tiny.base)
    theirs = make_adapter(base, tmp_path / "a", target_modules=modules, use_dora=True)
    with closing(open_checkpoint(tiny.tiny.gguf())) as checkpoint:
        adapter = read_adapter(tmp_path / "a", checkpoint)
        found = adapted(checkpoint, TorchOps(compute_format="f32"), adapter)
    assert relative_error(found, peft_logits(theirs, IDS)) < 1e-4


def test_gguf_base_with_factors(tmp_path: Path) -> None:
    tiny = Tiny("falcon-h1", tmp_path)
    make_adapter(tiny_model("falcon-h1").module, tmp_path / "a", target_modules=["q_proj"])
    path = tiny.tiny.gguf()
    with (
        closing(open_checkpoint(path)) as checkpoint,
        pytest.raises(UnsupportedModelError, match=r"gguf has the model's factors in"),
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


@some(FAMILIES, ("deepseek-v3", "gemma4", "qwen3.5"))
def test_every_matrix(name: str) -> None:
    """Logits are those of merged weights, which are not the base's."""

    def exact() -> Ops:
        return TorchOps(compute_format="f32")

    with closing(open_checkpoint(tiny_model(name).folder)) as checkpoint:
        adapter = everything(checkpoint, 0.15)
        found = adapted(checkpoint, exact(), adapter)
        merged, plain = (
            decoder_of(source, exact())
            for source in (MergedCheckpoint(checkpoint, adapter), checkpoint)
        )
    wanted = run(merged, cache(merged), IDS)
    assert relative_error(found, wanted) < 1e-4
    assert relative_error(run(plain, cache(plain), IDS), wanted) > 0.01


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


@pytest.mark.parametrize("prefix", ["model.language_model", "language_model.model", "backbone"])
def test_multimodal_names(prefix: str, tiny: Tiny) -> None:
    found = text_module(f"{prefix}.layers.0.mlp.up_proj", tiny.checkpoint)
    assert found == "model.layers.0.mlp.up_proj.weight"
