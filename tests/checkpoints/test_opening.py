"""Files and folders that are models or are not, and reading parts of a file."""

import json
import os
import re
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints import open_checkpoint, packed_strings
from localrt.models.tensor_source import RangedFile
from tests.checkpoints.make_gguf import write_gguf

TENSOR = np.ones((2, 32), np.float32)


def add_gguf(path, parts=False):
    tensors = {f"blk.{n}.ffn_up.weight": (TENSOR, "f32") for n in range(2)}
    return write_gguf(path, "qwen3", {}, tensors, tensors_per_part=1 if parts else 0)


def add_config(folder):
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))


def test_gguf_of_any_name(tmp_path):
    add_gguf(tmp_path / "m.gguf")
    renamed = (tmp_path / "m.gguf").rename(tmp_path / "sha256-0123")
    checkpoint = open_checkpoint(renamed)
    assert checkpoint.kind == "gguf"
    assert checkpoint.path == renamed


@pytest.mark.parametrize(
    ("others", "kind", "opened"),
    [
        (["README.md", "mmproj-m.gguf"], "gguf", "m.gguf"),
        (["m-eagle3-f16.gguf", "m-it-assistant.gguf", "m-DFlash2-f16.gguf"], "gguf", "m.gguf"),
        (["config.json"], "gguf", "m.gguf"),
        (["config.json", "model.safetensors", "pytorch_model.bin"], "safetensors", ""),
    ],
)
def test_folder(tmp_path, others, kind, opened):
    add_gguf(tmp_path / "m.gguf")
    for name in others:
        (tmp_path / name).write_bytes(b"\x80\x02")
    if "config.json" in others:
        add_config(tmp_path)
    if "model.safetensors" in others:
        save_file({"model.norm.weight": TENSOR}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.kind, checkpoint.path) == (kind, tmp_path / opened)


def test_split_gguf(tmp_path):
    parts = add_gguf(tmp_path / "m.gguf", parts=True)
    assert len(parts) == 2
    assert open_checkpoint(tmp_path).path == parts[0]
    assert open_checkpoint(parts[1]).path == parts[0]


def test_several_ggufs(tmp_path):
    add_gguf(tmp_path / "a.gguf")
    add_gguf(tmp_path / "b.gguf", parts=True)
    with pytest.raises(
        CheckpointError, match=r"holds 2 models, give one of: a.gguf, b-00001-of-00002.gguf"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "kind", "words"),
    [
        ("llama", "adapter", "is an adapter: .* and give this with `adapters`"),
        ("qwen2", "mmproj", "is an encoder of pictures or sounds .*: put it beside its model"),
        ("llama", "imatrix", "is an importance matrix"),
        ("flux", "model", "is a model for pictures, .*: localrt runs language models"),
    ],
)
def test_gguf_that_is_no_model(tmp_path, architecture, kind, words):
    metadata = {"general.type": kind}
    write_gguf(tmp_path / "m.gguf", architecture, metadata, {"v.weight": (TENSOR, "f32")})
    for path in (tmp_path, tmp_path / "m.gguf"):
        with pytest.raises(UnsupportedModelError) as caught:
            open_checkpoint(path)
        assert re.search(rf"m.gguf {words}", caught.value.marked)


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapters.safetensors"])
def test_adapter_folder_is_no_model(tmp_path, weights):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x02")
    save_file({"lora_A": TENSOR}, tmp_path / weights)
    for path in (tmp_path, tmp_path / weights):
        with pytest.raises(UnsupportedModelError, match="is an adapter: open the model"):
            open_checkpoint(path)
    add_config(tmp_path)  # a merged model beside its adapter
    save_file({"model.norm.weight": TENSOR}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).kind == "safetensors"


def test_missing_path(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")


def test_other_folders(tmp_path):
    with pytest.raises(CheckpointError, match="is an empty folder"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"is not a model: no config.json and no .gguf"):
        open_checkpoint(tmp_path)
    add_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"has a config.json but no weights"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles(tmp_path, name):
    add_config(tmp_path)
    (tmp_path / name).write_bytes(b"\x80\x02")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UnsupportedModelError, match="unpickling runs whatever code") as caught:
            open_checkpoint(path)
        assert name in str(caught.value)
        assert "safetensors or GGUF" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "it is empty"), (b"PK\x03\x04....", r"it begins with b'PK\\x03\\x04'")],
)
def test_other_files(tmp_path, data, message):
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "m.gguf")


def test_shard(tmp_path):
    add_config(tmp_path)
    save_file({"model.norm.weight": TENSOR}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is a part of a model: give its folder"):
        open_checkpoint(tmp_path / "model.safetensors")


DATA = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(DATA.tobytes())
    return RangedFile(path)


def test_bad_ranges(file):
    assert len(file.read(100_000, 0)) == 0
    for offset, count in ((0, 100_001), (99_999, 2), (0, 1 << 62), (-1, 1)):
        with pytest.raises(CheckpointError, match="is truncated"):
            file.read(offset, count)


def test_truncated_while_open(file):
    os.truncate(file.path, 10)
    with pytest.raises(CheckpointError, match="was cut short"):
        file.read(0, 20)


@given(
    st.lists(st.text("\0\1a", max_size=9).map(str.encode) | st.just(b"a" * 300), max_size=40),
    st.integers(8, 400),
    st.integers(0, 3000),
)
def test_offsets_are_those_of_each_length(strings: list[bytes], window: int, cut: int) -> None:
    """Also of lengths and zeros that look like another, and of data that ends too soon."""
    data = b"".join(struct.pack("<Q", len(text)) + text for text in strings)[:cut]
    offsets, count = [0], len(strings)
    while len(offsets) <= count and offsets[-1] + 8 <= len(data):
        offsets.append(offsets[-1] + 8 + len(strings[len(offsets) - 1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_strings, "_WINDOW", window)
        found = packed_strings.prefixed_offsets(np.frombuffer(data, np.uint8), count)
    assert found.tolist() == offsets
