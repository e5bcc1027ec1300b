"""Encoders in ``mmproj`` files against llama.cpp's own library for them."""

from __future__ import annotations

import ctypes
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from localrt.models.checkpoints.gguf.vision import VisionGguf
from localrt.models.vision.encoder_cache import EncoderUnitReader
from localrt.models.vision.picture import Picture
from localrt.models.vision.registry import read_encoder
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.vision import VisionSteps
from localrt.quant.reference.ops import TorchOps
from tests.checkpoints.make_gguf import write_gguf
from tests.models.make_mmproj import write_mmproj
from tests.models.tiny import random_model, relative_error
from tests.models.vision.oracles import picture
from tests.models.vision.test_mmproj import MODELS

KEPT: list[object] = []  # callbacks that the library may call until the process ends
CHARACTERS = [chr(code) for code in range(33, 127)]


def _text_model(path: Path, columns: int) -> Path:
    """A model that llama.cpp takes for the one behind the encoder."""
    random = np.random.default_rng(0)
    tokens = ["<s>", *CHARACTERS]
    metadata = {
        "llama.embedding_length": columns,
        "llama.block_count": 1,
        "llama.context_length": 512,
        "llama.feed_forward_length": columns,
        "llama.attention.head_count": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * len(CHARACTERS),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    square = [f"attn_{part}" for part in ("q", "k", "v", "output")]
    square += [f"ffn_{part}" for part in ("gate", "up", "down")]
    shapes: dict[str, tuple[int, ...]] = {f"blk.0.{name}": (columns, columns) for name in square}
    shapes |= dict.fromkeys(("token_embd", "output"), (len(tokens), columns))
    shapes |= dict.fromkeys(("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"), (columns,))
    tensors = {
        f"{name}.weight": (random.normal(size=shape).astype(np.float32), "f32")
        for name, shape in shapes.items()
    }
    return write_gguf(path, "llama", metadata, tensors)[0]


def _theirs(text: Path, projector: Path, shown: Picture) -> Floats:
    """The rows that libmtmd makes of a picture."""
    import llama_cpp
    from llama_cpp import mtmd_cpp

    silent = llama_cpp.llama_log_callback(lambda *_: None)
    KEPT.append(silent)
    llama_cpp.llama_log_set(silent, None)
    mtmd_cpp.mtmd_log_set(silent, None)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        str(text).encode(), llama_cpp.llama_model_default_params()
    )
    params = mtmd_cpp.mtmd_context_params_default()
    params.use_gpu, params.warmup, params.n_threads, params.print_timings = False, False, 1, False
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = mtmd_cpp.mtmd_init_from_file(str(projector).encode(), model, params)
    assert context
    pixels = np.ascontiguousarray(shown.pixels)
    bitmap = mtmd_cpp.mtmd_bitmap_init(
        shown.width, shown.height, pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    )
    chunks = mtmd_cpp.mtmd_input_chunks_init()
    marker = mtmd_cpp.mtmd_default_marker()
    prompt = mtmd_cpp.mtmd_input_text(marker, len(marker), False, True)
    bitmaps = (mtmd_cpp.mtmd_bitmap_p_ctypes * 1)(bitmap)
    assert mtmd_cpp.mtmd_tokenize(context, chunks, ctypes.byref(prompt), bitmaps, 1) == 0
    rows = []
    columns = llama_cpp.llama_model_n_embd(model)
    for number in range(mtmd_cpp.mtmd_input_chunks_size(chunks)):
        chunk = mtmd_cpp.mtmd_input_chunks_get(chunks, number)
        if mtmd_cpp.mtmd_input_chunk_get_type(chunk) == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_TEXT:
            continue
        assert mtmd_cpp.mtmd_encode_chunk(context, chunk) == 0
        count = mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk)
        found = mtmd_cpp.mtmd_get_output_embd(context)
        rows.append(np.ctypeslib.as_array(found, (count * columns,)).reshape(count, -1).copy())
    mtmd_cpp.mtmd_input_chunks_free(chunks)
    mtmd_cpp.mtmd_bitmap_free(bitmap)
    mtmd_cpp.mtmd_free(context)
    llama_cpp.llama_model_free(model)
    return np.concatenate(rows)


def _class_token_last(folder: Path) -> None:
    """Move the class token's position behind the patches', where llama.cpp has the token: it adds
    published positions to the wrong rows.
    """
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith("position_embeddings"))
    tensors[name] = np.roll(tensors[name], -1, axis=1)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.llamacpp
@pytest.mark.parametrize(
    ("kind", "size"),  # sizes that nobody resizes
    [
        ("qwen2_vl", (64, 48)),
        ("qwen2_5_vl", (128, 136)),
        ("qwen3_5", (48, 64)),
        ("gemma3", (32, 32)),
        ("gemma4", (192, 192)),
        ("gemma4_unified", (192, 192)),
        ("mistral3", (32, 48)),
        ("llava", (32, 48)),
        ("lfm2_vl", (64, 64)),
        ("internvl", (32, 32)),
        ("idefics3", (32, 32)),
        ("paddleocr_vl", (64, 48)),
        ("glm4v", (160, 128)),
        ("glm_ocr", (160, 128)),
        ("minicpmv4_6", (48, 48)),
    ],
)
def test_rows(kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="needs the llamacpp extra")
    folder = tmp_path / "folder"
    config = MODELS[kind]()
    if kind == "qwen2_5_vl":
        config.vision_config.window_size = 112  # the only one that llama.cpp knows
    random_model(config).save_pretrained(folder)
    settings: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if kind.startswith(("qwen", "paddle")):
        settings["size"] = {"shortest_edge": 16 * 16, "longest_edge": 160 * 160}
    if kind == "idefics3":
        settings["size"] = {"longest_edge": 128}
    if kind == "minicpmv4_6":
        settings |= {"scale_resolution": 48, "patch_size": 4}
    if kind.startswith("gemma4"):
        settings = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    deaf = {"clip.has_audio_encoder": False}  # its tensors are not in the file
    path = write_mmproj(folder, tmp_path / "mmproj-F32.gguf", changes=deaf)
    shown = picture(*size)
    if kind == "idefics3":  # enlarged by another filter there, which leaves one colour as it is
        shown = Picture(np.full_like(shown.pixels, (200, 30, 90)))
    with closing(VisionGguf(path)) as source:
        ops = TorchOps(compute_format="f32", device="cpu")
        encoder = read_encoder(source.config, source.processor)
        steps = VisionSteps(ops)
        units = EncoderUnitReader(source, steps)
        prepared = encoder.prepare(shown)
        ours = encoder.encode(prepared, units, steps).rows
        if kind == "internvl":
            _class_token_last(folder)
            path = write_mmproj(folder, tmp_path / "mmproj-last-F32.gguf")
        theirs = _theirs(_text_model(tmp_path / "text.gguf", source.columns), path, shown)
    if kind in ("mistral3", "llava"):  # a row ends each line but the last; our prompts have tokens
        width = prepared.pieces[0]
        lines = np.concatenate([theirs, theirs[:1]]).reshape(-1, width + 1, ours.shape[1])
        theirs = lines[:, :-1].reshape(-1, ours.shape[1])
    assert theirs.shape == ours.shape
    assert relative_error(ours, theirs) < 1e-3
