import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints import GgufCheckpoint
from localrt.quant.formats import unpack
from tests.checkpoints.make_gguf import (
    in_pairs,
    packed_rows,
    write_gguf,
)

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 64

SIZES = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": 96,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 0.25,
    "rope.freq_base": 500.0,
}


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def open_model(tmp_path, arch, tensors, metadata=None, sizes=SIZES):
    keys = {f"{arch}.{key}": value for key, value in sizes.items()} | (metadata or {})
    (path,) = write_gguf(tmp_path / "model.gguf", arch, keys, tensors)
    return GgufCheckpoint(path)


PREFIX = "model.layers.0.self_attn."
PACKED = packed_rows("q4_k", HEADS * HEAD_DIM, 256)


@pytest.fixture(scope="module")
def rotary_model(tmp_path_factory):
    """Queries in pairs."""
    tensors = {"blk.0.attn_q.weight": (in_pairs(PACKED, HEADS), "q4_k")}
    return open_model(tmp_path_factory.mktemp("rotary"), "llama", tensors)


@given(st.data())
def test_rotary_rows(rotary_model, data):
    start = data.draw(st.integers(0, len(PACKED)))
    stop = data.draw(st.integers(start, len(PACKED)))
    part = rotary_model.read(PREFIX + "q_proj.weight", start, stop)
    assert part.shape == (stop - start, 256)
    assert np.array_equal(part.data, PACKED[start:stop])


@pytest.mark.parametrize("rows", [0, 1, 11, 100])
def test_blocks_of_reordered_rows(rotary_model, rows):
    row = PACKED.shape[1]
    blocks = list(rotary_model.blocks(PREFIX + "q_proj.weight", max(1, rows * row)))
    assert np.array_equal(np.concatenate([block.data for block in blocks]), PACKED)
    assert all(block.nbytes <= max(rows, 1) * row for block in blocks)


def test_part_of_a_head(tmp_path):
    with pytest.raises(CheckpointError, match=r"30 rows of 'model.layers.0.self_attn.q_proj"):
        open_model(tmp_path, "llama", {"blk.0.attn_q.weight": (values(30, HIDDEN), "f32")})


@pytest.mark.parametrize(
    ("blocks", "told", "stored"),
    [
        (3, 1, True),
        (3, None, True),
        (3, 1, False),  # taken out of the file, still counted
    ],
)
def test_prediction_blocks(tmp_path, blocks, told, stored):
    plain = {f"blk.{n}.attn_norm.weight": (values(8), "f32") for n in range(2 + stored)}
    extra = {"blk.2.nextn.eh_proj.weight": (values(8, 16), "f32")} if stored else {}
    metadata = {"glm4moe.attention.head_count_kv": [2, 4, 1][:blocks]}
    metadata |= {} if told is None else {"glm4moe.nextn_predict_layers": told}
    sizes = SIZES | {"block_count": blocks}
    model = open_model(tmp_path, "glm4moe", plain | extra, metadata, sizes)
    assert set(model.tensors) == {f"model.layers.{n}.input_layernorm.weight" for n in range(2)}
    assert model.config["num_hidden_layers"] == 2
    assert model.config["num_key_value_heads"] == [2, 4]


def test_encoders(tmp_path):
    names = ("blk.0.attn_norm.weight", "v.blk.0.ln1.weight", "mm.0.weight", "a.blk.0.ln1.weight")
    model = open_model(tmp_path, "qwen3vl", {name: (values(8), "f32") for name in names})
    assert set(model.tensors) == {"model.layers.0.input_layernorm.weight"}


def test_plain_model(tmp_path):
    tensors = {
        "token_embd.weight": (values(40, HIDDEN), "q8_0"),
        "output_norm.weight": (values(HIDDEN), "f32"),
        "output.weight": (values(40, HIDDEN), "q4_0"),
        "rope_freqs.weight": (values(4), "f32"),
        "blk.0.ffn_gate.weight": (values(96, HIDDEN), "q4_1"),
        "something.else": (values(4), "f32"),
    }
    model = open_model(tmp_path, "llama", tensors)
    assert (model.kind, model.architecture) == ("gguf", "llama")
    assert model.path == tmp_path / "model.gguf"
    assert list(model.tensors) == [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "rope_freqs.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "something.else",
    ]
    assert model.tensors["lm_head.weight"].shape == (40, HIDDEN)
    assert model.tensors["lm_head.weight"].format.name == "q4_0"
    assert model.config == {
        "num_hidden_layers": 1,
        "max_position_embeddings": 128,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 0.25,
        "rope_theta": 500.0,
        "vocab_size": 40,
        "tie_word_embeddings": False,
        "sliding_window": None,
    }
    assert model.generation_config == {}


NORM = {"output_norm.weight": (values(8), "f32")}


@pytest.mark.parametrize(
    ("tensors", "keys", "found"),
    [
        (
            {"token_embd.weight": (values(40, HIDDEN), "f32")},
            {},
            {"tie_word_embeddings": True, "vocab_size": 40},
        ),
        (NORM, {"tokenizer.ggml.tokens": ["a", "b", "c"]}, {"vocab_size": 3}),
        (
            NORM,
            {
                "qwen3.block_count": 3,
                "qwen3.attention.head_count_kv": [2, 2, 2],
                "qwen3.feed_forward_length": [96, 64, 96],
                "qwen3.attention.sliding_window_pattern": [True, True, False],
            },
            {
                "num_key_value_heads": 2,
                "intermediate_size": [96, 64, 96],
                "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
            },
        ),
        (
            NORM,
            {
                "qwen3.rope.scaling.type": "linear",
                "qwen3.rope.scaling.factor": 8.0,
            },
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
    ],
    ids=["tied", "vocabulary", "lists", "linear"],
)
def test_config(tmp_path, tensors, keys, found):
    config = open_model(tmp_path, "qwen3", tensors, keys).config
    assert {key: config[key] for key in found} == found


def test_generation_config(tmp_path):
    metadata = {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.suppress_tokens": [5, 3],
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.75,
        "general.sampling.penalty_repeat": 1.25,
    }
    model = open_model(tmp_path, "qwen3", {"output_norm.weight": (values(8), "f32")}, metadata)
    assert model.generation_config == {
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
        "pad_token_id": 0,
        "suppress_tokens": [5, 3],
        "temperature": 0.5,
        "top_k": 20,
        "top_p": 0.75,
        "repetition_penalty": 1.25,
        "do_sample": True,
    }


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("qwen3.block_count", "three", "'qwen3.block_count' is not a number"),
        ("qwen3.block_count", ["a"], "'qwen3.block_count' is not a list of numbers"),
        ("qwen3.rope.scaling.type", 3, "'qwen3.rope.scaling.type' is not text"),
        ("tokenizer.ggml.eos_token_id", 0.5, "is not a whole number"),
        ("qwen3.expert_weights_norm", 1, "'qwen3.expert_weights_norm' is not true or false"),
    ],
)
def test_wrong_types(tmp_path, key, value, message):
    with pytest.raises(CheckpointError, match=message):
        open_model(tmp_path, "qwen3", {"output_norm.weight": (values(8), "f32")}, {key: value}, {})


def test_tensor_twice(tmp_path):
    tensors = {
        "output.weight": (values(8), "f32"),
        "lm_head.weight": (values(8), "f32"),
    }
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' appears twice"):
        open_model(tmp_path, "qwen3", tensors)


@pytest.mark.parametrize(("kind", "ours"), [("nvfp4", "nvfp4"), ("tq1_0", "tq2_0")])
def test_regrouped_types(tmp_path, kind, ours):
    packed = packed_rows(kind, 9, 512)
    if kind == "nvfp4":
        scales = packed.reshape(9, -1, 36)[..., :4]
        scales[...] = np.minimum(scales, 0xFE)
        scales[1, 0] = 0x7F  # 0, as ggml has it
    model = open_model(tmp_path, "llama", {"blk.0.ffn_up.weight": (packed, kind)})
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = model.read(name, 1, 8)
    assert tensor.format.name == ours
    info = model.tensors[name]
    assert info.nbytes == 9 * info.format.row_bytes(512)
    with np.errstate(all="ignore"):
        expected = dequantize(packed, GGMLQuantizationType[kind.upper()])
    np.testing.assert_array_equal(unpack(tensor), expected[1:8])
    assert np.array_equal(unpack(next(iter(model.blocks(name, 1)))), unpack(model.read(name, 0, 1)))


def nvfp4(*shape):
    """Packed bytes of the shape (..., columns), without scales that are no numbers."""
    rows = int(np.prod(shape[:-1]))
    packed = packed_rows("nvfp4", rows, shape[-1])
    scales = packed.reshape(rows, -1, 36)[..., :4]
    scales[...] = np.minimum(scales, 0x7E)
    return packed.reshape(*shape[:-1], -1), dequantize(packed, GGMLQuantizationType.NVFP4)


@pytest.mark.parametrize("name", ["scale", "weight.scale"])
def test_factors(tmp_path, name):
    """NVFP4's, as releases have them beside the weights; those of inputs are not needed."""
    packed, plain = nvfp4(16, 128)
    experts, each = nvfp4(3, 8, 128)
    factors = np.array([0.5, 2.0, 0.25], np.float32)
    scale = {f"blk.0.attn_q.{name}": (np.array([0.125], np.float32), "f32")}
    model = open_model(
        tmp_path,
        "qwen3moe",
        {
            "blk.0.attn_q.weight": (packed, "nvfp4"),
            **scale,
            "blk.0.attn_q.input_scale": (np.array([3.0], np.float32), "f32"),
            "blk.0.ffn_down_exps.weight": (experts, "nvfp4"),
            f"blk.0.ffn_down_exps.{name}": (factors, "f32"),
        },
        {"qwen3moe.expert_count": 3},
    )
    block = model.read(PREFIX + "q_proj.weight", 2, 7)
    np.testing.assert_allclose(unpack(block), 0.125 * plain[2:7], rtol=1e-6)
    assert not [tensor for tensor in model.tensors if "scale" in tensor]
    for expert, factor in enumerate(factors):
        block = model.read(f"model.layers.0.mlp.experts.{expert}.down_proj.weight")
        np.testing.assert_allclose(unpack(block), factor * each.reshape(3, 8, 128)[expert])
