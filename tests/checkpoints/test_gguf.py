"""GGUF files: metadata, tensors and their names, parts, and what is wrong with damaged ones."""

import struct

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints import GgufCheckpoint
from localrt.models.checkpoints.gguf.file import GgufFile, open_gguf_parts
from localrt.quant.formats import GGML_FORMATS, unpack
from tests.checkpoints.make_gguf import (
    ARRAY,
    STRING,
    UINT32,
    array,
    in_pairs,
    packed_rows,
    raw_gguf,
    string,
    tensor_entry,
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
    ("told", "stored"),
    [(1, True), (None, True), (1, False)],  # taken out of the file, still counted
)
def test_prediction_blocks(tmp_path, told, stored):
    plain = {f"blk.{n}.attn_norm.weight": (values(8), "f32") for n in range(2 + stored)}
    extra = {"blk.2.nextn.eh_proj.weight": (values(8, 16), "f32")} if stored else {}
    metadata = {"glm4moe.attention.head_count_kv": [2, 4, 1]}
    metadata |= {} if told is None else {"glm4moe.nextn_predict_layers": told}
    sizes = SIZES | {"block_count": 3}
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


def test_linear_scaling(tmp_path):
    keys = {"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": 8.0}
    tensors = {"output_norm.weight": (values(8), "f32")}
    config = open_model(tmp_path, "qwen3", tensors, keys).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


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
        ("qwen3.rope.scaling.type", 3, "'qwen3.rope.scaling.type' is not text"),
        ("qwen3.expert_weights_norm", 1, "'qwen3.expert_weights_norm' is not true or false"),
    ],
)
def test_wrong_types(tmp_path, key, value, message):
    with pytest.raises(CheckpointError, match=message):
        open_model(tmp_path, "qwen3", {"output_norm.weight": (values(8), "f32")}, {key: value}, {})


def test_tensor_twice(tmp_path):
    tensors = {"output.weight": (values(8), "f32"), "lm_head.weight": (values(8), "f32")}
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


ARCH = ("general.architecture", STRING, string("llama"))


def weights(rows=8, columns=64, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)


@pytest.fixture
def every_type(tmp_path):
    tensors = {
        f"{format_.name}.weight": (packed_rows(format_.name, 5, 512, seed), format_.name)
        for seed, format_ in enumerate(GGML_FORMATS.values())
        if format_.name not in ("f32", "f16")
    }
    tensors["f32.weight"] = (weights(5, 512), "f32")
    tensors["f16.weight"] = (weights(5, 512), "f16")
    tensors["vector.bias"] = (weights(1, 7)[0], "f32")
    tensors["experts.weight"] = (weights(12, 32).reshape(3, 4, 32), "q8_0")
    (path,) = write_gguf(tmp_path / "m.gguf", "llama", {}, tensors)
    return path


def test_tensors(every_type):
    file = GgufFile(every_type)
    reader = gguf.GGUFReader(every_type)
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for theirs in reader.tensors:
        ours = file.tensors[theirs.name].read()
        assert ours.shape == tuple(int(n) for n in reversed(theirs.shape))
        assert ours.format is GGML_FORMATS[theirs.tensor_type]
        assert ours.data.tobytes() == theirs.data.tobytes()
        assert file.tensors[theirs.name].info.nbytes == theirs.n_bytes


def test_metadata_of_every_type(tmp_path):
    metadata = {
        "a.int": 7,
        "a.negative": -7,
        "a.float": 0.5,
        "a.true": True,
        "a.text": "héllo\n",
        "a.ints": [1, 2, 3],
        "a.floats": [0.5, 0.25],
        "a.flags": [True, False],
        "a.words": ["one", "", "three"],
        "a.nested": [[1, 2], [3]],
    }
    (path,) = write_gguf(tmp_path / "m.gguf", "llama", metadata, {"w": (weights(), "f32")})
    found = GgufFile(path).metadata
    assert list(found["a.words"]) == metadata.pop("a.words")
    assert {key: found[key] for key in metadata} == metadata
    assert found["general.architecture"] == "llama"
    assert found.count("a.words") == 3
    assert "b" not in found
    with pytest.raises(KeyError):
        found["b"]


def test_malformed_utf8(tmp_path):
    tokens = [b"ok", b"\xff\xfe", "é".encode()]
    body = array(STRING, 3, b"".join(string(token) for token in tokens))
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_gguf([ARCH, ("tokenizer.ggml.tokens", ARRAY, body)]))
    found = GgufFile(path).metadata["tokenizer.ggml.tokens"]
    assert list(found) == ["ok", "��", "é"]
    assert [found.encoded(index) for index in range(3)] == tokens


def one_tensor(entry: bytes, data: bytes = bytes(64), **kwargs) -> bytes:
    return raw_gguf([ARCH], [entry], data, **kwargs)


BAD = {
    "magic": (b"GGML" + bytes(100), "begins with b'GGML'"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "big endian": (raw_gguf(version=3 << 24), "big-endian"),
    "many tensors": (raw_gguf(counts=(1 << 60, 1)), "claims 1152921504606846976 tensors"),
    "key twice": (raw_gguf([ARCH, ARCH]), "'general.architecture' appears twice"),
    "long string": (raw_gguf([("k", STRING, struct.pack("<Q", 1 << 63))]), "truncated: .*'k'"),
    "many strings": (raw_gguf([("k", ARRAY, array(STRING, 1 << 50, b""))]), "strings in .*'k'"),
    "deep": (raw_gguf([("k", ARRAY, array(ARRAY, 1, b"") * 50)]), "nests arrays deeper"),
    "alignment 48": (
        raw_gguf([("general.alignment", UINT32, struct.pack("<I", 48))]),
        "alignment is 48, not a power of two",
    ),
    "zero dim": (one_tensor(tensor_entry("t", [4, 0], 0, 0)), "'t' has no elements"),
    "type 99": (one_tensor(tensor_entry("t", [256], 99, 0)), "'t' is of ggml type 99"),
    "iq4_k": (one_tensor(tensor_entry("t", [256], 139, 0)), "'t' is IQ4_K, .* such as Q4_K_M"),
    "offset": (one_tensor(tensor_entry("t", [4], 0, 4)), "'t' begins at 4, not a multiple of 32"),
    "outside": (one_tensor(tensor_entry("t", [4], 0, 64)), "truncated or damaged: tensor 't'"),
    "twice": (
        raw_gguf([ARCH], [tensor_entry("t", [4], 0, 0), tensor_entry("t", [4], 0, 32)], bytes(64)),
        "tensor 't' appears twice",
    ),
    "overlap": (
        raw_gguf([ARCH], [tensor_entry("a", [9], 0, 0), tensor_entry("b", [4], 0, 32)], bytes(64)),
        "tensors 'a' and 'b' overlap",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(tmp_path, case):
    data, message = BAD[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated(tmp_path):
    whole = raw_gguf(
        [ARCH, ("words", ARRAY, array(STRING, 2, string("one") + string("two")))],
        [tensor_entry("t", [8], 0, 0)],
        bytes(32),
    )
    path = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            GgufFile(path)
    path.write_bytes(whole)
    GgufFile(path).close()


def split_model(tmp_path):
    tensors = {f"t{n}": (weights(seed=n), "f32") for n in range(5)}
    return write_gguf(tmp_path / "big.gguf", "llama", {"a.b": 1}, tensors, tensors_per_part=2)


def test_split(tmp_path):
    paths = split_model(tmp_path)
    assert len(paths) == 3
    for path in paths:
        parts = open_gguf_parts(path)
        assert [part.path for part in parts] == paths
        assert [name for part in parts for name in part.tensors] == ["t0", "t1", "t2", "t3", "t4"]
        assert parts[0].metadata["a.b"] == 1
        assert np.array_equal(parts[2].tensors["t4"].read().data.view(np.float32), weights(seed=4))


def test_a_missing_part_is_named(tmp_path):
    paths = split_model(tmp_path)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"big-00002-of-00003.gguf is missing"):
        open_gguf_parts(paths[2])


def test_wrong_part(tmp_path):
    paths = split_model(tmp_path)
    renamed = paths[0].rename(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match="is one of 3 parts, but is not named like one"):
        open_gguf_parts(renamed)
    renamed.rename(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(CheckpointError, match="is not part 2 of 3"):
        open_gguf_parts(paths[0])
