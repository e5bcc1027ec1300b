"""GGUF files of random weights in published shapes, in the mix of types that Q4_K_M is.

Weights of these models are not needed to measure them: speed does not depend on values. Tensors and
keys are those of llama.cpp's converter, as in the tests that compare logits; the vocabulary is
SmolLM2's, filled up with unused tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from benchmarks.common.command import find_model
from benchmarks.common.random_weights import random_packed
from tests.models.gguf_gemma import gemma_metadata, gemma_tensors
from tests.models.gguf_hybrid import hybrid_metadata, hybrid_tensors

__all__ = ["MODELS", "model_file"]

Array = npt.NDArray[Any]

_DIFFERENT = 1 << 20  # rows of a matrix, which repeat in larger ones


def _qwen35_4b() -> tuple[str, Any]:
    """Half of the layers of Qwen3.5-4B."""
    from transformers import Qwen3_5TextConfig

    return "qwen35", Qwen3_5TextConfig(
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=16,
        max_position_embeddings=262_144,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    )


def _lfm2() -> tuple[str, Any]:
    from transformers import Lfm2Config

    attending = (2, 5, 8, 10, 12, 14)
    return "lfm2", Lfm2Config(
        hidden_size=2048,
        num_hidden_layers=16,
        max_position_embeddings=131_072,
        layer_types=["full_attention" if n in attending else "conv" for n in range(16)],
    )


def _granite() -> tuple[str, Any]:
    from transformers import GraniteMoeHybridConfig

    attending = (5, 15, 25, 35)
    return "granitehybrid", GraniteMoeHybridConfig(
        vocab_size=100_352,
        hidden_size=1536,
        intermediate_size=512,
        shared_intermediate_size=1024,
        num_hidden_layers=40,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=131_072,
        layer_types=["full_attention" if n in attending else "linear_attention" for n in range(40)],
        num_local_experts=64,
        num_experts_per_tok=6,
        mamba_n_heads=48,
        mamba_d_state=128,
        embedding_multiplier=12.0,
        attention_multiplier=1 / 128,
        residual_multiplier=0.22,
        logits_scaling=6.0,
        tie_word_embeddings=True,
    )


def _gemma4_e4b() -> tuple[str, Any]:
    """24 of the 42 layers of Gemma 4 E4B, of which 10 and not 18 share keys and values."""
    from transformers import Gemma4TextConfig

    return "gemma4", Gemma4TextConfig(
        hidden_size=2560,
        intermediate_size=10_240,
        num_hidden_layers=24,
        num_key_value_heads=2,
        num_kv_shared_layers=10,
        final_logit_softcapping=30.0,
    )


def _flash_next() -> tuple[str, Any]:
    """Half of the 48 layers of Qwen3.8-Flash-Next with 32 of their 512 experts, and 100 of the 320
    million rows of its table.
    """
    from transformers import Qwen4ExpTextConfig

    return "qwen4exp", Qwen4ExpTextConfig(
        hidden_size=2560,
        num_hidden_layers=24,
        num_attention_heads=24,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_value_heads=48,
        moe_intermediate_size=640,
        shared_expert_intermediate_size=640,
        num_experts=32,
        max_position_embeddings=262_144,
        output_gate_type="sigmoid",
        ple_layer_ids=[2],
        ngram_vocab_size_base=6_250_000,
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=128,
        indexer_budget=2048,
        indexer_compress_ratio=4,
        eos_token_id=248_044,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    )


MODELS: Mapping[str, Callable[[], tuple[str, Any]]] = {
    "Qwen3.5-4B": _qwen35_4b,
    "LFM2-1.2B": _lfm2,
    "Granite-4-H-Tiny": _granite,
    "Gemma-4-E4B": _gemma4_e4b,
    "Qwen3.8-Flash-Next": _flash_next,
}
"""What makes the config of each, as transformers has it."""


def model_file(name: str, folder: Path) -> Path:
    """The file of a model, written if it is not there yet."""
    path = folder / f"{name.lower()}-random-q4_k_m.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        architecture, config = MODELS[name]()
        part = path.with_suffix(".part")
        _write(part, architecture, config)
        part.replace(path)
    return path


def _write(path: Path, architecture: str, config: Any) -> None:
    shapes = _shapes(config)
    if architecture == "gemma4":
        values = config.to_dict()
        tensors = gemma_tensors(shapes, architecture, values)
        metadata = gemma_metadata(architecture, values)
    else:
        tensors = hybrid_tensors(shapes, architecture, config)
        metadata = hybrid_metadata(architecture, config)
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in [*metadata.items(), *_vocabulary(config.vocab_size)]:
        if isinstance(value, np.ndarray):
            kind = gguf.GGUFValueType[value.dtype.name.upper()]
            writer.add_key_value(key, value.tolist(), gguf.GGUFValueType.ARRAY, sub_type=kind)
        elif isinstance(value, list | tuple):
            writer.add_array(key, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            writer.add_uint32(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    layers = config.num_hidden_layers
    whole = {name: (_kind(name, like.shape, layers), like) for name, like in tensors.items()}
    for name, (kind, like) in whole.items():
        wide = like.dtype if kind is None else np.dtype(np.uint8)
        shape = like.shape if kind is None else _packed_shape(kind, like.shape)
        nbytes = int(np.prod(shape)) * wide.itemsize
        writer.add_tensor_info(name, shape, wide, nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None, "it was opened for the header"
    out = writer.fout[0]
    for name, (kind, like) in whole.items():  # one in memory at a time, of large ones some rows
        writer.write_padding(out, out.tell())
        for part in [_vector(name, like)] if kind is None else _packed(name, kind, like.shape):
            part.tofile(out)
    writer.write_padding(out, out.tell())
    writer.close()


def _shapes(config: Any) -> dict[str, Array]:
    """Arrays that take no memory, in the shapes of transformers' tensors."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    zero = np.zeros((), np.float32)
    return {name: np.broadcast_to(zero, t.shape) for name, t in model.state_dict().items()}


def _vocabulary(size: int) -> Iterator[tuple[str, Any]]:
    reader = gguf.GGUFReader(find_model("smollm2"))
    for name, field in reader.fields.items():
        if name.startswith("tokenizer.ggml.") or name == "tokenizer.chat_template":
            value = field.contents()
            if name.endswith(".tokens"):
                value = [*value, *(f"<unused{n}>" for n in range(size - len(value)))]
            elif name.endswith(".token_type"):
                value = [*value, *[int(gguf.TokenType.UNUSED)] * (size - len(value))]
            yield name, value


def _kind(name: str, shape: tuple[int, ...], layers: int) -> gguf.GGMLQuantizationType | None:
    """A matrix's type as in Q4_K_M; None of what is not quantized."""
    kinds = gguf.GGMLQuantizationType
    if len(shape) == 1 or "norm" in name or "conv1d" in name or "shortconv.conv" in name:
        return None
    if name.endswith(("ffn_gate_inp.weight", "ssm_a", "ssm_d")):
        return None
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return kinds.Q8_0 if shape[-1] % 256 else kinds.Q6_K
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    wide = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    more = wide and ("attn_v" in name or "ffn_down" in name)
    if shape[-1] % 256:  # what llama.cpp takes in their place
        return kinds.Q8_0 if more else kinds.Q5_0
    if more:
        return kinds.Q6_K
    return kinds.Q8_0 if shape[-2] < 64 else kinds.Q4_K


def _packed_shape(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> tuple[int, ...]:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return (*shape[:-1], shape[-1] // block * size)


def _packed(
    name: str, kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]
) -> Iterator[npt.NDArray[np.uint8]]:
    """The rows of all matrices of a tensor; those of a large one repeat."""
    rows, seed = int(np.prod(shape[:-1])), sum(name.encode())
    some = random_packed(kind.name.lower(), min(rows, _DIFFERENT), shape[-1], seed=seed).data
    for start in range(0, rows, _DIFFERENT):
        yield some[: rows - start]


def _vector(name: str, like: Array) -> npt.NDArray[np.float32]:
    """What is not quantized, in sizes at which states neither vanish nor grow."""
    if name == "rope_freqs.weight":
        return np.asarray(like, np.float32)
    rng = np.random.default_rng(sum(name.encode()))
    if name.endswith("ssm_a"):
        values = -rng.uniform(1.0, 16.0, like.shape)
    elif name.endswith("ssm_dt.bias"):
        values = rng.uniform(-6.0, -2.0, like.shape)
    elif "norm" in name or name.endswith(("ssm_d", "scale.weight")):
        values = np.ones(like.shape)
    elif like.ndim > 1:
        values = rng.standard_normal(like.shape) / like.shape[-1] ** 0.5
    else:
        values = np.zeros(like.shape)
    return values.astype(np.float32)
