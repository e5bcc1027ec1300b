"""The trained fixture as a GGUF file, as it is or wider: the same function in more bytes.

    .venv/bin/python benchmarks/fixture_gguf.py FOLDER OUT.gguf [--experts 1500000000]

``--experts BYTES`` pads the experts' intermediate width with columns of zeros until they take so
many bytes: gate and up then give zeros, which down multiplies by zeros, so that logits and
routing stay what they were while every expert costs what a large one costs. Experts are Q4_0, the
rest Q8_0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import gguf  # noqa: E402
import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402
from gguf import GGMLQuantizationType as Kind  # noqa: E402

from localrt.models.checkpoints import open_checkpoint  # noqa: E402
from localrt.quant.formats import unpack  # noqa: E402

__all__ = ["fixture_model", "widened_inner", "write_fixture"]

Floats = npt.NDArray[np.float32]

_BLOCK = 32  # weights of a Q4_0 block
_BLOCK_BYTES = 18
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


def fixture_model(folder: Path) -> Path:
    """The fixture's weights: as they were trained, or packed as they lie in the repository."""
    packed = folder / "fixture-moe.gguf"
    return folder if (folder / "model.safetensors").exists() else packed


def widened_inner(config: Mapping[str, Any], nbytes: int) -> int:
    """The least width, in whole blocks, at which all experts take at least ``nbytes``."""
    experts = config["num_experts"] * config["num_hidden_layers"]
    block = experts * 3 * config["hidden_size"] * _BLOCK_BYTES  # of 32 columns of width
    return max(config["moe_intermediate_size"], -(-nbytes // block) * _BLOCK)


def write_fixture(folder: Path, out: Path, *, experts: int = 0) -> Path:
    """Write ``folder``'s model with experts of at least ``experts`` bytes; returns ``out``."""
    source = open_checkpoint(fixture_model(folder))
    config = json.loads((folder / "config.json").read_text())
    inner = widened_inner(config, experts)
    writer = gguf.GGUFWriter(out, "qwen3moe", use_temp_file=True)
    _write_config(writer, config, inner)
    _write_tokenizer(writer, folder / "tokenizer.json")

    def values(name: str) -> Floats:
        return unpack(source.read(name))

    def put(name: str, array: Floats, kind: Kind) -> None:
        if array.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(name, array)
        else:
            packed = gguf.quants.quantize(array, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)

    put("token_embd.weight", values("model.embed_tokens.weight"), Kind.Q8_0)
    put("output_norm.weight", values("model.norm.weight"), Kind.F32)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, stem in _LAYER.items():
            kind = Kind.F32 if name == "ffn_gate_inp" else Kind.Q8_0
            put(f"blk.{layer}.{name}.weight", values(f"{prefix}{stem}.weight"), kind)
        for name, stem in _EXPERTS.items():
            # One expert at a time: widened, all of them are larger than memory.
            stacked = [
                gguf.quants.quantize(
                    _widen(values(f"{prefix}mlp.experts.{n}.{stem}.weight"), stem, inner), Kind.Q4_0
                )
                for n in range(config["num_experts"])
            ]
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.stack(stacked), raw_dtype=Kind.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source.close()
    return out


def _widen(values: Floats, stem: str, inner: int) -> Floats:
    axis = 1 if stem == "down_proj" else 0
    missing = [(0, 0), (0, 0)]
    missing[axis] = (0, inner - values.shape[axis])
    return np.pad(values, missing)


def _write_config(writer: Any, config: Mapping[str, Any], inner: int) -> None:
    writer.add_name("localrt routing fixture")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(inner)
    writer.add_expert_feed_forward_length(inner)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)


def _write_tokenizer(writer: Any, path: Path) -> None:
    model = json.loads(path.read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokens) - 1))
    writer.add_token_merges(
        [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    )
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def main() -> None:
    """Parse the options and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, default=0)
    args = parser.parse_args()
    path = write_fixture(args.folder, args.out, experts=args.experts)
    print(f"{path}: {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
