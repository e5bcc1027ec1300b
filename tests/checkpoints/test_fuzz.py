"""Whatever the bytes, opening and reading a file ends quickly, in little memory, and plainly."""

import json
import struct
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints import open_checkpoint
from tests.checkpoints.make_gguf import (
    ARRAY,
    FLOAT32,
    STRING,
    UINT32,
    array,
    raw_gguf,
    string,
    tensor_entry,
)

MOST_MEMORY = 8 << 20


def number(value: int) -> bytes:
    return struct.pack("<I", value)


VALID_GGUF = raw_gguf(
    [
        ("general.architecture", STRING, string("llama")),
        ("general.alignment", UINT32, number(32)),
        ("llama.attention.head_count", UINT32, number(2)),
        ("llama.attention.head_count_kv", ARRAY, array(UINT32, 2, number(1) * 2)),
        ("llama.embedding_length", UINT32, number(32)),
        ("llama.rope.freq_base", FLOAT32, struct.pack("<f", 1e4)),
        ("tokenizer.ggml.tokens", ARRAY, array(STRING, 3, string("a") + string("b") + string("c"))),
        ("tokenizer.ggml.eos_token_id", UINT32, number(2)),
        ("nested", ARRAY, array(ARRAY, 1, array(UINT32, 1, number(5)))),
    ],
    [
        tensor_entry("token_embd.weight", [32, 3], 8, 0),
        tensor_entry("blk.0.attn_q.weight", [32, 4], 2, 128),
        tensor_entry("blk.0.attn_q.bias", [4], 0, 224),
    ],
    bytes(240),
)

HEADER = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "lm_head.weight": {"dtype": "BF16", "shape": [2, 4], "data_offsets": [16, 32]},
    }
).encode()
VALID_SAFETENSORS = struct.pack("<Q", len(HEADER)) + HEADER + bytes(32)


def mutations(valid: bytes) -> st.SearchStrategy[bytes]:
    """The valid file with bytes replaced, numbers made extreme, and pieces cut or doubled."""
    place = st.integers(0, len(valid))
    extreme = st.sampled_from([0, 1, 0x7F, 0xFF, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1])
    piece = st.one_of(st.binary(max_size=12), extreme.map(lambda n: struct.pack("<Q", n)))
    edits = st.lists(st.tuples(place, st.integers(0, 16), piece), min_size=1, max_size=4)

    def edit(changes: list[tuple[int, int, bytes]]) -> bytes:
        data = valid
        for at, removed, inserted in changes:
            data = data[:at] + inserted + data[at + removed :]
        return data

    overwrite = st.tuples(place, piece).map(
        lambda change: valid[: change[0]] + change[1] + valid[change[0] + len(change[1]) :]
    )
    truncation = place.map(lambda at: valid[:at])
    return st.one_of(edits.map(edit), overwrite, truncation, st.binary(max_size=4096))


def exercise(path: Path, max_bytes: int = 64) -> None:
    """Open, and use all that opened; or be told in one line why not."""
    refusal = ""
    try:
        checkpoint = open_checkpoint(path)
    except (CheckpointError, UnsupportedModelError) as error:
        refusal = str(error)
    if not refusal:
        try:
            for name in checkpoint.tensors:
                checkpoint.read(name)
                list(checkpoint.blocks(name, max_bytes=max_bytes))
        except CheckpointError as error:  # a tensor that is made of several, and does not fit them
            refusal = str(error)
    if refusal:
        assert "\n" not in refusal
        assert len(refusal) < 2000
        return
    for key in checkpoint.metadata:
        assert checkpoint.metadata[key] is not None
    checkpoint.close()


def bounded(path: Path, max_bytes: int = 64) -> None:
    tracemalloc.start()
    try:
        exercise(path, max_bytes)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_the_valid_files_open(folder):
    gguf = folder / "valid.gguf"
    gguf.write_bytes(VALID_GGUF)
    assert len(open_checkpoint(gguf).tensors) == 3
    exercise(gguf)


@given(data=mutations(VALID_GGUF))
def test_gguf_headers(folder, data):
    path = folder / "fuzz.gguf"
    path.write_bytes(data)
    bounded(path)


@given(data=mutations(VALID_SAFETENSORS))
def test_safetensors_headers(folder, data):
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (model / "model.safetensors").write_bytes(data)
    bounded(model)


@given(data=mutations(b'{"architectures": ["A"], "rope_parameters": {"rope_theta": 1}, "x": [1]}'))
def test_configs(folder, data):
    model = folder / "configured"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_bytes(data)
    (model / "model.safetensors").write_bytes(VALID_SAFETENSORS)
    bounded(model)
