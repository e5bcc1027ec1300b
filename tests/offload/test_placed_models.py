"""Recurrent layers, pictures and a file of every type, placed: bit for bit as in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.random_store import random_packed
from localrt.common.errors import CancelledError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.models.tensor_source import Checkpoint
from localrt.offload.kv.cache import KvTier
from localrt.offload.shapes import shape_from_checkpoint
from localrt.offload.store.pack import pack_store
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.hybrid_cache import split_layers
from localrt.quant.ops.protocol import Batch, Ops, PictureRows, Span
from localrt.quant.reference.ops import TorchOps
from tests.checkpoints.make_gguf import Array, write_gguf
from tests.models.tiny import relative_error
from tests.offload.placed import (
    Model,
    assert_same,
    cancel_after,
    extend,
    needs_kernels,
    pack_tiny,
    passing,
    tokens,
)

pytestmark = needs_kernels

NAMES = ["qwen3.5-moe", "falcon-h1", "kimi-linear", "lfm3", "qwen4-exp"]


@pytest.fixture(scope="module", params=NAMES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    folder = pack_tiny(request.param, tmp_path_factory.mktemp("recurrent"))
    with closing(Model(folder)) as opened:
        yield opened


def test_cancelled_pass(model: Model) -> None:
    cache, twin = model.resident.cache(64), model.resident.cache(64)
    for part in (tokens(10), tokens(1)):
        extend(model.resident, cache, part)
        extend(model.resident, twin, part)
    for calls, count in ((2, 1), (4, 1), (3, 12)):
        with pytest.raises(CancelledError):
            model.resident.forward(
                Batch.extend([(cache, tokens(count, seed=calls))]), check=cancel_after(calls)
            )
        assert cache.length == 11
    want = extend(model.resident, twin, tokens(3, seed=1))
    np.testing.assert_array_equal(extend(model.resident, cache, tokens(3, seed=1)), want)


@pytest.mark.parametrize("model", ["qwen4-exp"], indirect=True)
def test_not_on_gpu(model: Model) -> None:
    """Our kernels there lack its index and n-grams: it is planned for the CPU alone."""
    assert shape_from_checkpoint(model.store).off_gpu


def test_kv_on_ssd(model: Model, tmp_path: Path) -> None:
    ops = NativeOps(threads=1)
    specs, _ = split_layers(model.config.memory)
    tier = KvTier(specs, ["ssd"] * len(specs), tmp_path, capacity=600, kv_format="bf16")
    ops.kv_maker = tier
    here = model.ops.kv_cache(model.config.memory, 600)
    there = ops.kv_cache(model.config.memory, 600)
    assert there.kv_layout == "", "what is on the SSD is not taken out"
    for part in (tokens(400), tokens(120, seed=2), [7]):
        want = extend(model.resident, here, part)
        np.testing.assert_array_equal(extend(model.resident, there, part), want)
    tier.close()


BEGIN, END, LENGTH = 5, 14, 24


def seen(decoder: Decoder, *, both_ways: bool) -> list[np.ndarray]:
    """Logits of a text with a picture, whose rows are given anew behind the first layer."""
    config, rows = decoder.config, END - BEGIN
    given = np.random.default_rng(1).standard_normal((rows, config.hidden_size), np.float32)
    axes = np.repeat(np.arange(LENGTH)[None], 3, 0)
    axes[1, BEGIN:END], axes[2, BEGIN:END] = BEGIN + 1, BEGIN + np.arange(rows)
    ahead = np.zeros(LENGTH, np.int32)
    ahead[BEGIN:END] = END - 1 - np.arange(BEGIN, END)
    cache = decoder.cache(LENGTH + 1)
    batch = Batch(
        np.asarray(tokens(LENGTH), np.int64),
        np.arange(LENGTH),
        (Span(cache, LENGTH, None, ahead if both_ways else None),),
        PictureRows(np.arange(BEGIN, END), given, (given[::-1].copy(),)),
        axes,
    )
    return [decoder.forward(batch), decoder.forward(Batch.extend([(cache, [7])]))]


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3", "glm-ocr"])
def test_streamed(name: str, tmp_path: Path) -> None:
    both_ways = name == "gemma3"
    with closing(Model(pack_tiny(name, tmp_path))) as model:
        expected = seen(model.resident, both_ways=both_ways)
        streamed = passing(model.store)
        for names in (streamed, streamed[1::2]):
            with model.placed(names) as placed:
                assert_same(seen(placed, both_ways=both_ways), expected)


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
