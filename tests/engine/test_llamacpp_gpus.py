"""Builds of llama.cpp: which layers their GPUs take; one that dies on this machine is found out
once, in another process.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from localrt.common.errors import MemoryBudgetError, MissingExtraError
from localrt.engine.llamacpp import gpus, trial
from localrt.engine.llamacpp.gpus import LlamaGpu, with_layers
from localrt.engine.llamacpp.trial import check_build

LAYERS, HIDDEN, VOCAB, CTX = 4, 256, 512, 1024
MATRIX = HIDDEN * HIDDEN // 32 * 18  # Q4_0
CACHE = 2 * CTX * 2 * HIDDEN  # keys and values of 16 bits in each layer
LAYER, HEAD = 7 * MATRIX + 2 * 4 * HIDDEN + CACHE, VOCAB * HIDDEN // 32 * 18 + 4 * HIDDEN
BESIDE = 4 * gpus.CHUNK * (4 * CTX + 4 * HIDDEN + 3 * HIDDEN) + gpus._SPARE
ALL = BESIDE + LAYERS * LAYER + HEAD


def device(room: int, name: str = "Vulkan0", handle: int = 0) -> LlamaGpu:
    return LlamaGpu(handle, name, f"a GPU at {name}", room)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers of zeros, whose embedding is its output matrix too."""
    path = tmp_path_factory.mktemp("zeros") / "zeros.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(CTX)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(4)
    writer.add_rope_dimension_count(HIDDEN // 4)
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    matrices = {f"blk.{n}.{part}": HIDDEN for n in range(LAYERS) for part in parts}
    for name, rows in {"token_embd": VOCAB, **matrices}.items():
        zeros = np.zeros((rows, HIDDEN // 32 * 18), np.uint8)
        writer.add_tensor(f"{name}.weight", zeros, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    norms = [f"blk.{n}.{part}_norm" for n in range(LAYERS) for part in ("attn", "ffn")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("rooms", "expected"),
    [
        pytest.param([1 << 40], [5], id="all, and the head"),
        pytest.param([ALL - 1], [4], id="a byte less"),
        pytest.param([BESIDE + HEAD + 2 * LAYER], [3], id="some"),
        pytest.param([0], [], id="no memory"),
        pytest.param([BESIDE + LAYER, BESIDE + HEAD + 2 * LAYER], [1, 3], id="two, not all"),
        pytest.param([], [], id="no GPU"),
    ],
)
def test_layers_that_fit(model: Path, rooms: list[int], expected: list[int]) -> None:
    placed = with_layers([device(room) for room in rooms], model, ctx=CTX)
    assert [each.layers for each in placed] == expected


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that loads models, and llama.cpp's CPU in the place of GPUs."""
    pytest.importorskip("llama_cpp", reason="needs the llamacpp extra")
    from localrt.engine.llamacpp import model as library

    get = gpus._function(library.load_library().api, "by_type", ctypes.c_void_p, ctypes.c_int)
    stand_in = [device(1 << 40, handle=get(0))]
    monkeypatch.setattr(gpus, "find_devices", lambda _api: stand_in)
    return library


def answer(library: Any, path: Path, **options: Any) -> tuple[str, list[str], int]:
    """Return the device, what was noted, and the likeliest token after a prompt."""
    from localrt.engine.llamacpp.engine import LlamaCppSession

    model = library.LlamaCppModel.load(path, threads=1, **options)
    session = LlamaCppSession(model, 64)
    token = int(np.argmax(session.extend(list(range(40)))))
    session.close()
    model.close()
    return model.info.device, model.notes, token


@pytest.mark.llamacpp
@pytest.mark.parametrize("most", [3, 0])
def test_memory_that_runs_out(
    library: Any, model: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Fewer layers are tried, and the CPU computes all in the end; each try is one line."""
    placed = 0
    place, new_context = gpus.place, library.LlamaCppModel.new_context

    def counted(api: Any, params: Any, devices: Any) -> None:
        nonlocal placed
        placed = sum(each.layers for each in devices)
        place(api, params, devices)

    def scarce(self: Any, *arguments: Any, **options: Any) -> Any:
        if placed > most:
            raise MemoryBudgetError("ErrorOutOfDeviceMemory")
        return new_context(self, *arguments, **options)

    monkeypatch.setattr(gpus, "place", counted)
    monkeypatch.setattr(library.LlamaCppModel, "new_context", scarce)
    where, notes, _ = answer(library, model, ctx=CTX)
    assert where == ("vulkan" if most else "cpu")
    assert notes[0] == (
        "llama.cpp has no room for 5 layers on a GPU at Vulkan0: trying 3 layers on a GPU at "
        "Vulkan0"
    )
    assert notes[-1].endswith(": 3 layers on a GPU at Vulkan0, of 5" if most else "trying the CPU")


posix = pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
DIES = "import os, signal; os.kill(os.getpid(), signal.{})"


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Sets what the trial runs; the list that it returns grows by a line with each run of it."""
    runs: list[str] = []

    def set_child(code: str) -> list[str]:
        def command(*_: str) -> list[str]:
            runs.append(code)
            return [sys.executable, "-c", code]

        monkeypatch.setattr(trial, "helper_command", command)
        return runs

    monkeypatch.setattr(trial, "_build", lambda: ["one build"])
    return set_child


@posix
def test_build_dies(
    child: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = child(DIES.format("SIGILL"))
    for _ in range(2):
        with pytest.raises(MissingExtraError, match=r"an illegal instruction.*GGML_NATIVE") as told:
            check_build(tmp_path / "cache")
        assert "\n" not in str(told.value)
    assert len(runs) == 1
    # Another build, or the same on another machine, is tried again.
    child("")
    monkeypatch.setattr(trial, "_build", lambda: ["another build"])
    check_build(tmp_path / "cache")
    check_build(tmp_path / "cache")
    assert len(runs) == 2
    child(DIES.format("SIGSEGV"))
    monkeypatch.setattr(trial, "identity", lambda: ["another processor"])
    with pytest.raises(MissingExtraError, match="dies of SIGSEGV"):
        check_build(tmp_path / "cache")
