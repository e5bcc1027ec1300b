"""A GGUF model of every type, at widths that not all take, in parts: packed and streamed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.common.random_store import random_packed
from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.models.tensor_source import Checkpoint
from localrt.offload.store.pack import pack_store
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.protocol import Ops
from localrt.quant.reference.ops import TorchOps
from tests.checkpoints.make_gguf import Array, write_gguf
from tests.models.tiny import relative_error
from tests.offload.placed import Model, extend, needs_kernels, passing, tokens

pytestmark = needs_kernels

HIDDEN, INNER, VOCAB = 288, 512, 200
# Those with blocks of 256 columns, for what is so wide; all others anywhere.
WIDE = (
    *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "tq2_0", "iq3_xxs"),
    *("iq3_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m"),
)
ODD = ("f16", "iq4_nl", "q5_0", "q4_1", "bf16", "q8_0", "q5_1", "q4_0", "mxfp4", "f32")
METADATA = {
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.block_count": len(WIDE),
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": VOCAB,
}


def every_type() -> dict[str, tuple[Array, str]]:
    """A layer's ``ffn_down`` in each of the wide types, all else in the others by turns."""
    odd = (name for _ in range(100) for name in ODD)

    def matrix(rows: int, columns: int = HIDDEN, name: str = "") -> tuple[Array, str]:
        name = name or next(odd)
        if name in ("f32", "f16", "bf16"):
            values = np.random.default_rng(rows).standard_normal((rows, columns), np.float32)
            return values / columns**0.5, name
        return random_packed(name, rows, columns).data, name

    ones = np.ones(HIDDEN, np.float32)
    tensors = {
        "token_embd.weight": matrix(VOCAB),
        "output.weight": matrix(VOCAB),
        "output_norm.weight": (ones, "f32"),
    }
    for layer, name in enumerate(WIDE):
        block = {
            "attn_norm.weight": (ones, "f32"),
            "attn_q.weight": matrix(HIDDEN),
            "attn_k.weight": matrix(HIDDEN // 3),
            "attn_v.weight": matrix(HIDDEN // 3),
            "attn_output.weight": matrix(HIDDEN),
            "ffn_norm.weight": (ones, "f32"),
            "ffn_gate.weight": matrix(INNER),
            "ffn_up.weight": matrix(INNER),
            "ffn_down.weight": matrix(HIDDEN, INNER, name),
        }
        tensors |= {f"blk.{layer}.{key}": value for key, value in block.items()}
    return tensors


def decoder(checkpoint: Checkpoint, ops: Ops) -> Decoder:
    return load_decoder(checkpoint, ops, read_config(checkpoint))


def test_every_type_in_parts(tmp_path: Path) -> None:
    parts = write_gguf(tmp_path / "m.gguf", "llama", METADATA, every_type(), tensors_per_part=40)
    assert len(parts) > 3
    with closing(open_checkpoint(parts[0])) as checkpoint:
        assert {info.format.name for info in checkpoint.tensors.values()} == {*WIDE, *ODD}
        exact = decoder(checkpoint, TorchOps(compute_format="f32"))
        ours = decoder(checkpoint, NativeOps(threads=1))
        store = pack_store(checkpoint, tmp_path / "store")
        prompt = tokens(12, vocab=VOCAB)
        wanted = extend(exact, exact.cache(64), prompt)
        here = ours.cache(64)
        first = extend(ours, here, prompt)
        assert relative_error(first, wanted) < 0.05
        with closing(Model(store)) as model, model.placed(passing(model.store)) as placed:
            there = placed.cache(64)
            np.testing.assert_array_equal(extend(placed, there, prompt), first)
            np.testing.assert_array_equal(extend(placed, there, [7]), extend(ours, here, [7]))
