import struct

import gguf
import numpy as np
import pytest

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints.gguf.file import GgufFile, open_gguf_parts
from localrt.quant.formats import GGML_FORMATS
from tests.checkpoints.make_gguf import (
    ARRAY,
    STRING,
    UINT32,
    array,
    packed_rows,
    raw_gguf,
    string,
    tensor_entry,
    write_gguf,
)

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


def test_row_ranges(every_type):
    file = GgufFile(every_type)
    for tensor in file.tensors.values():
        whole = tensor.read()
        blocks = list(tensor.blocks(max_bytes=2 * whole.data.shape[1]))
        assert np.array_equal(np.concatenate([block.data for block in blocks]), whole.data)
        assert all(len(block.data) <= 2 for block in blocks)
        assert np.array_equal(tensor.read(1).data, whole.data[1:])
    part = file.tensors["experts.weight"].read(1, 3)
    assert part.shape == (2, 4, 32)
    assert part.data.shape == (2, 4 * 34)


def test_rows_outside(every_type):
    file = GgufFile(every_type)
    with pytest.raises(ValueError, match=r"'f32.weight' has 5 rows: 3 to 6 cannot be read"):
        file.tensors["f32.weight"].read(3, 6)
    with pytest.raises(ValueError, match=r"vector.bias"):
        file.tensors["vector.bias"].read(0, 7)


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
    "version 9": (raw_gguf(version=9), "GGUF version 9"),
    "big endian": (raw_gguf(version=3 << 24), "big-endian"),
    "many keys": (raw_gguf(counts=(0, 1 << 60)), "claims 1152921504606846976 metadata keys"),
    "many tensors": (raw_gguf(counts=(1 << 60, 1)), "claims 1152921504606846976 tensors"),
    "long key": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(40),
        "a metadata key is 4611686018427387904 bytes long",
    ),
    "key utf8": (raw_gguf([(b"\xff", UINT32, bytes(4))]), "a metadata key is not UTF-8"),
    "key twice": (raw_gguf([ARCH, ARCH]), "'general.architecture' appears twice"),
    "value type": (raw_gguf([("k", 13, bytes(8))]), "'k' has unknown type 13"),
    "long string": (raw_gguf([("k", STRING, struct.pack("<Q", 1 << 63))]), "truncated: .*'k'"),
    "long array": (raw_gguf([("k", ARRAY, array(UINT32, 1 << 61, b""))]), "truncated: .*'k'"),
    "many strings": (raw_gguf([("k", ARRAY, array(STRING, 1 << 50, b""))]), "strings in .*'k'"),
    "deep": (raw_gguf([("k", ARRAY, array(ARRAY, 1, b"") * 50)]), "nests arrays deeper"),
    "alignment 48": (
        raw_gguf([("general.alignment", UINT32, struct.pack("<I", 48))]),
        "alignment is 48, not a power of two",
    ),
    "long name": (one_tensor(tensor_entry("n" * 300, [4], 0, 0)), "name is 300 bytes long"),
    "five dims": (one_tensor(tensor_entry("t", [1] * 5, 0, 0)), "'t' has 5 dimensions"),
    "zero dim": (one_tensor(tensor_entry("t", [4, 0], 0, 0)), "'t' has no elements"),
    "huge dims": (one_tensor(tensor_entry("t", [1 << 63] * 4, 0, 0)), "truncated or damaged.*'t'"),
    "block": (one_tensor(tensor_entry("t", [33], 2, 0)), "'t': rows of 33 do not divide into q4_0"),
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
