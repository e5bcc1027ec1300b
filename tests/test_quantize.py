"""The driver: layers are quantized in place, on what the quantized layers before them give."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from localrt.engine.types import Progress
from localrt.errors import OptionError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.formats import CODECS
from localrt.quant.methods import METHODS, Quantized, restore
from localrt.quant.ops.calibration import CalibrationOps
from localrt.quant.ops.protocol import Batch
from localrt.quantize import calibration_windows, quantize_decoder
from tests.models.tiny import save_tiny, tokens

Loader = Callable[[], tuple[Decoder, CalibrationOps]]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loader:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder)

    def load() -> tuple[Decoder, CalibrationOps]:
        with closing(open_checkpoint(folder)) as checkpoint:
            ops = CalibrationOps(compute_format="f32")
            return load_decoder(checkpoint, ops, read_config(checkpoint)), ops

    return load


def logits(decoder: Decoder) -> np.ndarray:
    return decoder.forward(Batch.extend([(decoder.cache(64), tokens(64, seed=5))]))


WINDOWS = calibration_windows(tokens(32 * 20, seed=9), length=32)


@pytest.mark.parametrize("method", METHODS)
def test_eight_bits_change_next_to_nothing(load: Loader, method: str) -> None:
    decoder, ops = load()
    before = logits(decoder)
    quantize_decoder(decoder, ops, CODECS["int8-g32"].format, method=method, windows=WINDOWS)
    wrong = np.linalg.norm(logits(decoder) - before) / np.linalg.norm(before)
    assert 0 < wrong < 0.05


def test_every_matrix_is_handed_over_and_is_what_the_model_computes_with(load: Loader) -> None:
    decoder, ops = load()
    taken: list[Quantized] = []
    steps: list[Progress] = []
    quantize_decoder(
        decoder,
        ops,
        CODECS["mxfp4"].format,
        method="mr-gptq",
        windows=WINDOWS,
        take=taken.append,
        progress=steps.append,
    )
    assert [q.tensor.name for q in taken[:4]] == [
        "model.layers.0.self_attn.qkv",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_up",
        "model.layers.0.mlp.down_proj",
    ]
    assert len(taken) == 4 * len(decoder.blocks)
    assert all(q.hadamard == 32 for q in taken)
    weight = decoder.blocks[1].attention.weights.out
    assert np.array_equal(ops.values(weight), restore(taken[5]))
    assert [(s.done, s.total) for s in steps] == [(1, 3), (2, 3), (3, 3)]


def test_calibration_beats_rounding_on_what_it_saw(load: Loader) -> None:
    errors = {}
    for method in ("rtn", "gptq"):
        decoder, ops = load()
        batch = Batch.extend([(decoder.cache(32), WINDOWS[0])])
        before = decoder.forward(batch)
        quantize_decoder(decoder, ops, CODECS["int4-g32"].format, method=method, windows=WINDOWS)
        after = decoder.forward(Batch.extend([(decoder.cache(32), WINDOWS[0])]))
        errors[method] = float(np.linalg.norm(after - before))
    assert errors["gptq"] < errors["rtn"]


def test_the_same_calibration_gives_the_same_bytes(load: Loader) -> None:
    runs = []
    for _ in range(2):
        decoder, ops = load()
        taken: list[Quantized] = []
        quantize_decoder(
            decoder,
            ops,
            CODECS["int4-g32"].format,
            method="gptq",
            windows=WINDOWS,
            take=taken.append,
        )
        runs.append(b"".join(q.tensor.data.tobytes() for q in taken))
    assert runs[0] == runs[1]


def test_text_that_is_too_short_is_refused(load: Loader) -> None:
    with pytest.raises(OptionError, match="the calibration text has 31 tokens: at least 32"):
        calibration_windows(tokens(31), length=32)
    decoder, ops = load()
    with pytest.raises(OptionError, match="gptq needs calibration text"):
        quantize_decoder(decoder, ops, CODECS["nf4"].format, method="gptq")
