"""The trained fixture as a GGUF file, as it is or wider: the same function in more bytes.

    python -m benchmarks.moe.fixture_gguf FOLDER OUT.gguf [--experts 1500000000]

``--experts BYTES`` pads the experts' intermediate width with columns of zeros until they take so
many bytes: gate and up then give zeros, which down multiplies by zeros, so that logits and
routing stay what they were while every expert costs what a large one costs. Experts are Q4_0, the
rest Q8_0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from benchmarks.common.command import make_parser
from benchmarks.moe.fixture_text import encode, read_texts
from benchmarks.moe.gguf_writer import Kind, Tensor, write_qwen3_moe
from localrt.models.checkpoints import Checkpoint, open_checkpoint
from localrt.quant.formats import unpack

__all__ = ["FIXTURE", "fixture_model", "held_out", "widened", "widened_inner", "write_fixture"]

FIXTURE = Path(__file__).parent / "fixture"
"""The one that comes with the benchmarks."""

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


def held_out(folder: Path, count: int, size: int, apart: int) -> list[list[int]]:
    """Texts of ``size`` tokens that the fixture has not learnt; one begins every ``apart``."""
    ids = encode(Tokenizer.from_file(str(folder / "tokenizer.json")), read_texts().held_out)
    return [ids[i * apart : i * apart + size].tolist() for i in range(count)]


def widened(folder: Path, experts: int, kept: Path) -> Path:
    """The fixture of ``folder`` with ``experts`` bytes of experts, written to ``kept`` once."""
    path = kept / f"{folder.name}-{experts}.gguf"
    if not path.exists():
        kept.mkdir(parents=True, exist_ok=True)
        write_fixture(folder, path, experts=experts)
    return path


def widened_inner(config: Mapping[str, Any], nbytes: int) -> int:
    """The least width, in whole blocks, at which all experts take at least ``nbytes``."""
    experts = config["num_experts"] * config["num_hidden_layers"]
    block = experts * 3 * config["hidden_size"] * _BLOCK_BYTES  # of 32 columns of width
    return max(config["moe_intermediate_size"], -(-nbytes // block) * _BLOCK)


def write_fixture(folder: Path, out: Path, *, experts: int = 0) -> Path:
    """Write ``folder``'s model with experts of at least ``experts`` bytes; returns ``out``."""
    config = json.loads((folder / "config.json").read_text())
    config["moe_intermediate_size"] = widened_inner(config, experts)
    bpe = json.loads((folder / "tokenizer.json").read_text())["model"]
    with closing(open_checkpoint(fixture_model(folder))) as source:
        return write_qwen3_moe(
            out,
            config,
            _tensors(source, config),
            tokens=sorted(bpe["vocab"], key=bpe["vocab"].__getitem__),
            controls=range(1),
            merges=[pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]],
        )


def _tensors(source: Checkpoint, config: Mapping[str, Any]) -> Iterator[Tensor]:
    def tensor(name: str, stem: str, kind: Kind = Kind.Q8_0) -> Tensor:
        values = unpack(source.read(f"model.{stem}.weight"))
        if values.ndim == 1 or kind == Kind.F32:
            return f"{name}.weight", values, Kind.F32
        return f"{name}.weight", gguf.quants.quantize(values, kind), kind

    yield tensor("token_embd", "embed_tokens")
    yield tensor("output_norm", "norm")
    for layer in range(config["num_hidden_layers"]):
        for name, stem in _LAYER.items():
            kind = Kind.F32 if name == "ffn_gate_inp" else Kind.Q8_0
            yield tensor(f"blk.{layer}.{name}", f"layers.{layer}.{stem}", kind)
        for name, stem in _EXPERTS.items():
            # One expert at a time: widened, all of them are larger than memory.
            packed = []
            for expert in range(config["num_experts"]):
                full = f"model.layers.{layer}.mlp.experts.{expert}.{stem}.weight"
                wide = _widen(unpack(source.read(full)), stem, config["moe_intermediate_size"])
                packed.append(gguf.quants.quantize(wide, Kind.Q4_0))
            yield f"blk.{layer}.{name}.weight", np.stack(packed), Kind.Q4_0


def _widen(values: npt.NDArray[np.float32], stem: str, inner: int) -> npt.NDArray[np.float32]:
    axis = 1 if stem == "down_proj" else 0
    missing = [(0, 0), (0, 0)]
    missing[axis] = (0, inner - values.shape[axis])
    return np.pad(values, missing)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the options and write."""
    parser = make_parser(__doc__, json=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, default=0)
    args = parser.parse_args(arguments)
    path = write_fixture(args.folder, args.out, experts=args.experts)
    print(f"{path}: {path.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
