"""Which engine runs a file, what loading writes, and the name of a quantization."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import localrt
from localrt.cli import main
from localrt.common.progress import NOTE, Progress
from localrt.engine.llamacpp.model import LlamaCppModel
from localrt.hub.files import gguf_variants
from localrt.hub.names import shown_path
from localrt.loading import load
from localrt.loading.format_names import quantization_name
from localrt.loading.options import LoadOptions
from tests.checkpoints.make_gguf import packed_rows, write_gguf

WIDTH, LAYERS, INNER = 256, 2, 256


def byte_vocabulary() -> list[str]:
    from tokenizers import pre_tokenizers

    return ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]


def write_model(path: Path, architecture: str, weight_type: str) -> Path:
    """A tiny random model of llama's or OLMo's shape with a byte-level tokenizer."""
    rng = np.random.default_rng(0)
    vocabulary = byte_vocabulary()
    metadata: dict[str, Any] = {
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": WIDTH,
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.attention.head_count": 4,
        f"{architecture}.attention.head_count_kv": 4,
        f"{architecture}.attention.layer_norm_epsilon": 1e-5,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3] + [1] * (len(vocabulary) - 1),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }

    def matrix(rows: int) -> tuple[Any, str]:
        if weight_type != "F32":
            return packed_rows(weight_type, rows, WIDTH), weight_type
        return rng.standard_normal((rows, WIDTH), np.float32) * 0.05, "F32"

    ones = (np.ones(WIDTH, np.float32), "F32")
    tensors = {
        "token_embd.weight": matrix(len(vocabulary)),
        "output.weight": matrix(len(vocabulary)),
    }
    if architecture == "llama":
        tensors["output_norm.weight"] = ones
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            tensors[f"blk.{layer}.{name}.weight"] = matrix(WIDTH)
        if architecture == "llama":
            tensors[f"blk.{layer}.attn_norm.weight"] = ones
            tensors[f"blk.{layer}.ffn_norm.weight"] = ones
    (file,) = write_gguf(path, architecture, metadata, tensors)
    return file


def test_native(tmp_path: Path) -> None:
    with localrt.load(write_model(tmp_path / "m.gguf", "llama", "F32")) as model:
        assert model.info.engine == "native"
        assert not any("engine" in note for note in model.info.notes)
        assert len(model.generate("hi", max_tokens=4, ignore_eos=True).token_ids) == 4


@pytest.mark.parametrize(("architecture", "weight_type"), [("olmo", "F32"), ("llama", "Q1_0")])
def test_unsupported_by_native(tmp_path: Path, architecture: str, weight_type: str) -> None:
    path = write_model(tmp_path / "m.gguf", architecture, weight_type)
    with pytest.raises(localrt.UnsupportedModelError, match=r"engine=.llamacpp") as caught:
        localrt.load(path, engine="native")
    assert "\n" not in str(caught.value)


@pytest.mark.llamacpp
def test_fallback(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="needs the llamacpp extra")
    with localrt.load(write_model(tmp_path / "m.gguf", "olmo", "F32"), threads=1) as model:
        assert model.info.engine == "llamacpp"
        assert any("native does not know 'olmo'" in note for note in model.info.notes)
        result = model.generate("hi", max_tokens=4, ignore_eos=True)
        assert len(result.token_ids) == 4


def test_notes_of_llamacpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note, info = "llama.cpp: 2 layers on a GPU", SimpleNamespace(vocab_size=258)
    model = SimpleNamespace(notes=[note], info=info)
    monkeypatch.setattr(LlamaCppModel, "load", lambda *_, **__: model)
    options = LoadOptions(engine="llamacpp")
    loaded = load.load_model(write_model(tmp_path / "m.gguf", "llama", "F32"), options)
    assert note in loaded.notes


def test_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    with pytest.raises(localrt.MissingExtraError, match="-m pip install llama-cpp-python"):
        localrt.load(write_model(tmp_path / "m.gguf", "olmo", "F32"))


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "localrt" / "stores"


@pytest.mark.usefixtures("given_rates")
def test_packing_is_announced(tiny_folder: Path, stores: Path) -> None:
    told: list[tuple[Progress, bool]] = []

    def show(progress: Progress) -> None:
        told.append((progress, any(path.is_file() for path in stores.glob("*/**/*"))))

    localrt.load(tiny_folder, shrinkable=True, progress=show).close()
    note, anything_there = told[0]
    assert note.stage == NOTE
    assert note.detail.startswith(
        f"packing the model for streaming: 406 kB in {shown_path(stores)} ("
    )
    assert "`localrt rm --packed MODEL`" in note.detail
    assert not anything_there
    assert {"pack", "load"} <= {progress.stage for progress, _ in told}


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("intermediate_size", 32, r"wrong shape: .*mlp.gate_proj.weight"),
        ("num_hidden_layers", 9, "tensor .* is missing"),
    ],
)
def test_wrong_shapes(
    tmp_path: Path, tiny_folder: Path, stores: Path, key: str, value: int, told: str
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "wrong"))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    stages: list[str] = []
    with pytest.raises(localrt.CheckpointError, match=told):
        localrt.load(folder, shrinkable=True, progress=lambda step: stages.append(step.stage))
    assert NOTE not in stages
    assert not stores.exists()


def checkpoint(name: str, file_type: Any = None, kind: str = "gguf", **bytes_of: int) -> Any:
    tensors = {
        each: SimpleNamespace(
            name=each, shape=(4, 4), nbytes=size, format=SimpleNamespace(name=each)
        )
        for each, size in bytes_of.items()
    }
    metadata = {} if file_type is None else {"general.file_type": file_type}
    return SimpleNamespace(path=Path(name), kind=kind, metadata=metadata, tensors=tensors)


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (checkpoint("qwen-q4_k_m.gguf", 15, q5_0=9, q4_k=5), "Q4_K_M"),
        (checkpoint("m-UD-Q4_K_XL.gguf", 15, q4_k=5), "UD-Q4_K_XL"),
        (checkpoint("sha256-0123", 17, q5_k=5), "Q5_K_M"),  # Ollama's
        (checkpoint("model.gguf", 2000, q5_k=5), "q5_k"),
        (checkpoint("folder", kind="safetensors", bf16=3, int4=5), "int4"),
    ],
)
def test_names(of: Any, name: str) -> None:
    assert quantization_name(cast(Any, of)) == name
    label = next(iter(gguf_variants([of.path.name])), None)
    if label is not None and label.is_labelled:
        assert label.label == name, "as the list has it"


def test_show_and_loaded_model(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tiny_folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["quantization"]
    with localrt.load(str(tiny_folder)) as model:
        assert model.info.quantization == shown
    with localrt.load(str(tiny_folder), format="f32") as model:
        assert model.info.quantization == "f32"
