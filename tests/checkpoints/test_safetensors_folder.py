"""Hugging Face folders: how their files are laid out and described, and what is wrong there."""

from __future__ import annotations

import json
import struct
from contextlib import closing

import numpy as np
import pytest
from safetensors.numpy import save_file

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints import SafetensorsCheckpoint, open_checkpoint
from localrt.quant.formats import unpack

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8}


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


TENSORS = {
    "model.embed_tokens.weight": values(6, 8),
    "model.layers.0.mlp.up_proj.weight": values(4, 8, seed=1).astype(np.float16),
    "model.norm.weight": values(8, seed=2),
}


def make_folder(path, tensors=TENSORS, config=CONFIG, generation=None):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def raw_safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors(tmp_path):
    model = SafetensorsCheckpoint(make_folder(tmp_path / "m"))
    assert (model.kind, model.architecture) == ("safetensors", "LlamaForCausalLM")
    assert set(model.tensors) == set(TENSORS)
    for name, array in TENSORS.items():
        assert model.tensors[name].shape == array.shape
        assert model.tensors[name].nbytes == array.nbytes
        assert np.array_equal(unpack(model.read(name)), array.astype(np.float32))
    assert np.array_equal(
        unpack(model.read("model.embed_tokens.weight", 2, 5)),
        TENSORS["model.embed_tokens.weight"][2:5],
    )
    blocks = list(model.blocks("model.embed_tokens.weight", max_bytes=100))
    assert [block.shape for block in blocks] == [(3, 8), (3, 8)]
    assert dict(model.metadata) == {}


def test_a_model_without_a_head(tmp_path):
    """Its tensors may lack the prefix, as Qwen3-Embedding's do."""
    bare = {name.removeprefix("model."): array for name, array in TENSORS.items()}
    model = SafetensorsCheckpoint(make_folder(tmp_path / "m", bare))
    assert set(model.tensors) == set(TENSORS)


def make_sharded(path):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for number, name in enumerate(TENSORS, 1):
        shard = f"model-{number:05d}-of-00003.safetensors"
        save_file({name: TENSORS[name]}, path / shard)
        weight_map[name] = shard
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ODD = "model.safetensors-00001-of-00001.safetensors"
SIX = tuple(f"model-{part:06d}-of-000002.safetensors" for part in (1, 2))
# The files of a folder, those that its index lists, and those that are read (or the error).
LAYOUTS = {
    "whole": ([WHOLE], None, [WHOLE]),
    "odd-name": ([ODD], [ODD], [ODD]),
    "six-digits-without-index": (SIX, None, SIX),
    "mtp": ([*SIX, "mtp.safetensors"], [*SIX, "mtp.safetensors"], SIX),
    "stray-whole": ([*SIX, WHOLE], SIX, SIX),
    "whole-beside-half-of-shards": ([SIX[0], WHOLE], SIX, [WHOLE]),
    "adapter": ([WHOLE, "adapter_model.safetensors"], None, [WHOLE]),
    "consolidated": ([*SIX, "consolidated.safetensors"], None, SIX),
    "half-of-shards": ([SIX[0]], SIX, "model-000002-of-000002.safetensors is missing"),
    "two-sets-without-index": ([*SIX, ODD], None, "no weights"),
}


@pytest.mark.parametrize(("files", "listed", "read"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(tmp_path, files, listed, read):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def tensor(file):
        return "mtp.fc.weight" if file == "mtp.safetensors" else f"model.of.{file}"

    for number, file in enumerate(files, 1):
        save_file({tensor(file): np.full((4, 32), number, np.float32)}, tmp_path / file)
    if listed is not None:
        index = {"weight_map": {tensor(file): file for file in listed}}
        (tmp_path / INDEX).write_text(json.dumps(index))
    if isinstance(read, str):
        with pytest.raises(CheckpointError, match=read):
            open_checkpoint(tmp_path)
        return
    with closing(open_checkpoint(tmp_path)) as model:
        found = {int(unpack(model.read(name)).flat[0]) for name in model.tensors}
        assert found == {list(files).index(file) + 1 for file in read}
        stray = WHOLE in files and WHOLE not in read
        assert model.notes == (
            (f"{WHOLE} is not read: {INDEX} lists other files",) if stray else ()
        )


def test_shard_without_tensor(tmp_path):
    folder = make_sharded(tmp_path / "m")
    save_file({"other": values(2)}, folder / "model-00002-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor 'model.layers.0.mlp.up_proj.weight'"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/x.safetensors", 3])
def test_index_outside_folder(tmp_path, shard):
    folder = make_sharded(tmp_path / "m")
    index = {"weight_map": {"w": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="tensor 'w' lies in no file of this folder"):
        SafetensorsCheckpoint(folder)


def test_generation_config(tmp_path):
    config = CONFIG | {"bos_token_id": 1, "eos_token_id": 2}
    folder = make_folder(tmp_path / "m", config=config)
    assert SafetensorsCheckpoint(folder).generation_config == {"bos_token_id": 1, "eos_token_id": 2}
    generation = {"temperature": 0.5, "eos_token_id": [2, 3]}
    folder = make_folder(tmp_path / "n", config=config, generation=generation)
    assert SafetensorsCheckpoint(folder).generation_config == {
        "temperature": 0.5,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
    }


def test_prediction_blocks(tmp_path):
    """Below a prefix of their own (Qwen), or as layers behind the last (GLM, DeepSeek)."""
    extra = ("mtp.fc.weight", "model.mtp_block.weight", "model.layers.1.eh_proj.weight")
    tensors = TENSORS | {name: values(2, 2) for name in extra}
    config = CONFIG | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    model = SafetensorsCheckpoint(make_folder(tmp_path / "m", tensors, config))
    assert set(model.tensors) == set(TENSORS)


def test_other_types(tmp_path):
    folder = make_folder(tmp_path / "m", {"w": np.arange(4, dtype=np.int64)})
    with pytest.raises(UnsupportedModelError, match="tensor 'w' is I64, which localrt cannot read"):
        SafetensorsCheckpoint(folder)


GOOD = {"w": entry([2], 0, 8)}
BAD_HEADERS = {
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "long header": (struct.pack("<Q", 1 << 60) + b"{}", "is not a safetensors file"),
    "not json": (raw_safetensors(b"{not json"), "is malformed"),
    "entry": (raw_safetensors({"w": 3}), "entry for 'w' is malformed"),
    "huge": (raw_safetensors({"w": entry([1 << 61], 0, 8)}, bytes(8)), "but has 8 bytes"),
    "hole": (raw_safetensors({"w": entry([2], 4, 12)}, bytes(12)), "should begin at 0"),
    "overlap": (
        raw_safetensors({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
        "tensor 'b' has bytes 4 to 12",
    ),
    "truncated": (raw_safetensors(GOOD, bytes(7)), "is truncated: it has 7 bytes of data"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers(tmp_path, case):
    data, message = BAD_HEADERS[case]
    folder = make_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsCheckpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "[]", "its JSON is not an object"),
        ("config.json", '{"architectures": [7]}', "names no architecture"),
        ("generation_config.json", "{", "generation_config.json is malformed"),
        ("model.safetensors.index.json", "{}", "has no weight_map"),
    ],
)
def test_bad_json(tmp_path, name, text, message):
    folder = make_sharded(tmp_path / "m")
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsCheckpoint(folder)


def test_unknown_tensor_and_closed_file(tmp_path):
    model = SafetensorsCheckpoint(make_folder(tmp_path / "m"))
    with pytest.raises(CheckpointError, match="has no tensor 'nope'"):
        model.read("nope")
    model.close()
    with pytest.raises(CheckpointError, match="is closed"):
        model.read("model.norm.weight")
