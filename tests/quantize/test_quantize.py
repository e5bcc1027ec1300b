"""Quantizing whole models into stores: what is computed with them, and that runs can be ended."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import CancelledError, CheckpointError, LocalrtError, OptionError
from localrt.common.progress import Progress
from localrt.drafts.heads.files import prediction_notes
from localrt.models.checkpoints import Checkpoint, StoreCheckpoint, open_checkpoint
from localrt.models.registry import load_decoder, read_config
from localrt.offload.store import partial_folder
from localrt.quant.formats import PackedTensor
from localrt.quant.formats.tiled import TiledTensor
from localrt.quant.methods import restore
from localrt.quant.ops.protocol import Batch
from localrt.quant.reference.ops import TorchOps
from localrt.quantize.calibration import calibration_windows
from localrt.quantize.quantize import QuantizeReport, Recipe, quantize_model
from tests.conftest import needs_kernels
from tests.models.make_gguf import write_tiny_gguf
from tests.models.test_heads import IDS, block_logits
from tests.models.test_model import some
from tests.models.tiny import load_ours, relative_error, save_tiny, tokens
from tests.models.tiny_heads import TinyBlock
from tests.store.synthetic import SyntheticCheckpoint
from tests.store.test_writer import KilledError, contents, fail_at

TEXT = tokens(64 * 40, seed=9)
QKV = "model.layers.{}.self_attn.{}_proj.{}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Tiny models by name, made when they are first asked for."""

    class Folders(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name] = tmp_path_factory.mktemp(name)
            save_tiny(name, self[name])
            return self[name]

    return Folders()


def run(
    source: Path | Checkpoint, out: Path, format: str = "int4-g32", **options: Any
) -> QuantizeReport:
    if options.get("method") == "rtn":
        options.setdefault("calibration", None)
    defaults = {"calibration": TEXT, "calibration_tokens": 64 * 16, "threads": 1}
    options = {**defaults, **options}
    own = {key: options.pop(key) for key in list(options) if key in Recipe.__slots__}
    return quantize_model(source, out, Recipe(format, **own), **options)


def logits(checkpoint: Checkpoint | Path, ops: Any = None) -> np.ndarray:
    if isinstance(checkpoint, Path):
        with closing(open_checkpoint(checkpoint)) as opened:
            return logits(opened, ops)
    ops = ops or TorchOps(compute_format="f32")
    decoder = load_decoder(checkpoint, ops, read_config(checkpoint))
    return decoder.forward(Batch.extend([(decoder.cache(48), tokens(48, seed=5))]))


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def stored(folder: Path) -> StoreCheckpoint:
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, StoreCheckpoint)
    return checkpoint


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("llama", "gptq"),
        ("deepseek-v2-dense", "mr-gptq"),
        *(pytest.param(name, "mr-gptq", marks=pytest.mark.slow) for name in ("gemma3", "phi3")),
    ],
)
def test_eight_bits(folders: Mapping[str, Path], tmp_path: Path, name: str, method: str) -> None:
    report = run(folders[name], tmp_path / "s", "int8-g32", method=method)
    assert (report.method, report.format, report.path) == (method, "int8-g32", tmp_path / "s")
    assert 0 < distance(logits(tmp_path / "s"), logits(folders[name])) < 0.05


def test_folded_rotation(folders: Mapping[str, Path], tmp_path: Path) -> None:
    run(folders["llama-tied-bias"], tmp_path / "s", "int8-g32", method="mr-gptq")
    with closing(stored(tmp_path / "s")) as store:
        assert store.manifest.quantization is not None
        assert store.manifest.quantization.folded == 32
        rotations = {}
        for stem in ("q", "k", "v", "o"):
            (block,) = store.blocks(QKV.format(0, stem, "weight"))
            assert isinstance(block, TiledTensor)
            rotations[stem] = block.hadamard
        assert rotations == {"q": 32, "k": 32, "v": 32, "o": 0}
        # Stored v and o are other matrices, with which the model computes the same.
        with closing(open_checkpoint(folders["llama-tied-bias"])) as source:
            for name in ("v", "o"):
                tensor = QKV.format(1, name, "weight")
                assert distance(values_of(store, tensor), values_of(source, tensor)) > 0.5
        assert distance(logits(store), logits(folders["llama-tied-bias"])) < 0.05


@needs_kernels
@pytest.mark.parametrize(
    ("format_", "method"),
    [
        ("int4-g32m", "rtn"),
        ("int4-g32", "mr-gptq"),
        *(pytest.param(n, "mr-gptq", marks=pytest.mark.slow) for n in ("nf4", "mxfp4", "nvfp4")),
    ],
)
def test_kernels(folders: Mapping[str, Path], tmp_path: Path, format_: str, method: str) -> None:
    from localrt.quant.cpu.ops import NativeOps

    run(folders["llama-tied-bias"], tmp_path / "s", format_, method=method)
    assert relative_error(logits(tmp_path / "s", NativeOps()), logits(tmp_path / "s")) < 0.05


def test_shared_factors(folders: Mapping[str, Path], tmp_path: Path) -> None:
    run(folders["llama"], tmp_path / "s", "nvfp4", method="mr-gptq")
    with closing(stored(tmp_path / "s")) as store:
        for names in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
            blocks = [next(store.blocks(f"model.layers.1.{name}_proj.weight")) for name in names]
            assert all(isinstance(block, TiledTensor) for block in blocks)
            assert len({(b.scale, getattr(b, "hadamard", 0)) for b in blocks}) == 1
            assert blocks[0].scale != 1


def test_killed(
    folders: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(folders["llama"], tmp_path / "whole", method="mr-gptq")
    out, endings = tmp_path / "ended", 0
    while not out.exists():
        with monkeypatch.context() as patch:
            fail_at(patch, 9, KilledError())  # one file is finished by then
            try:
                run(folders["llama"], out, method="mr-gptq")
            except KilledError:
                endings += 1
    assert endings >= 2
    assert contents(out) == contents(tmp_path / "whole")


def test_cancelled(folders: Mapping[str, Path], tmp_path: Path) -> None:
    out, cancel = tmp_path / "s", threading.Event()

    def progress(step: Progress) -> None:
        if step.detail.startswith("layer 1"):
            cancel.set()

    with pytest.raises(CancelledError, match="the next run goes on from"):
        run(folders["llama"], out, method="gptq", progress=progress, cancel=cancel)
    assert (partial_folder(out) / "layer-0000.safetensors").exists()
    assert not (partial_folder(out) / "layer-0001.safetensors").exists()
    run(folders["llama"], out, method="gptq")
    run(folders["llama"], tmp_path / "whole", method="gptq")
    assert contents(out) == contents(tmp_path / "whole")


def test_head_format(tmp_path: Path) -> None:
    def head(published: str, out: str, format_: str = "int4-g32", **options: Any) -> str:
        source = SyntheticCheckpoint(tmp_path, formats={"lm_head": published})
        report = quantize_model(source, tmp_path / out, Recipe(format_, **options))
        return report.head_format

    assert head("q8_0", "1") == "q8_0"
    assert head("q5_0", "2", head_format="int4-g64") == "int4-g64"
    assert head("f16", "3") == "int8-g32"
    assert head("f32", "4", "bf16") == "bf16"


def test_fallbacks(folders: Mapping[str, Path], tmp_path: Path) -> None:
    source = SyntheticCheckpoint(tmp_path, hidden=128, inner=160)
    report = quantize_model(source, tmp_path / "s", Recipe("int4-g128"))
    assert set(report.fallbacks.values()) == {"int4-g32"}
    assert all("down_proj" in name for name in report.fallbacks)
    assert len(report.fallbacks) == 2
    assert report.layer_bits_per_weight > 4.125
    odd = SyntheticCheckpoint(tmp_path, hidden=64, inner=72, formats={"down_proj": "f32"})
    eight = quantize_model(odd, tmp_path / "o", Recipe("int8-g32"))
    assert set(eight.fallbacks.values()) == {"bf16"}


class Poisoned(SyntheticCheckpoint):
    """One weight of one matrix is not a number."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        tensor = super().read(name, start, stop)
        if name.endswith("layers.1.mlp.up_proj.weight") and start == 0:
            tensor.data.reshape(-1).view("<f4")[5] = np.nan
        return tensor


def test_nan_weights(tmp_path: Path) -> None:
    text = [token % 250 for token in TEXT]
    poisoned = Poisoned(tmp_path, formats={"proj": "f32"})
    with pytest.raises(
        LocalrtError, match=r"layers\.1\.mlp\.(up|down)_proj\.weight: .* hold NaN"
    ) as caught:
        run(poisoned, tmp_path / "s", "int4-g32", method="gptq", calibration=text)
    assert isinstance(caught.value, CheckpointError)
    assert not (tmp_path / "s").exists()


def test_errors(folders: Mapping[str, Path], tmp_path: Path) -> None:
    out, llama = tmp_path / "s", folders["llama"]
    gptq: dict[str, Any] = {"method": "gptq"}
    for message, format_, options in (
        (r"format must be one of int4-g32 .*, is 'int3'", "int3", {}),
        (r"format must be one of .*, is 'q4_k'", "int4-g32", {"head_format": "q4_k"}),
        ("gptq needs calibration text", "int4-g32", {**gptq, "calibration": None}),
        ("bf16 takes only rtn", "bf16", gptq),
        ("calibration_tokens must be from", "int4-g32", {**gptq, "calibration_tokens": 10}),
        ("token ids must be from 0", "int4-g32", {**gptq, "calibration": [10**6] * 999}),
    ):
        with pytest.raises(OptionError, match=message):
            run(llama, out, format_, **options)
    with pytest.raises(CheckpointError, match="does not exist"):
        run(tmp_path / "nothing", out)
    assert not list(tmp_path.iterdir())
    out.mkdir()
    with pytest.raises(OptionError, match="exists already"):
        run(llama, out)


@pytest.mark.parametrize("name", ["gemma4", pytest.param("deepseek-v4", marks=pytest.mark.slow)])
def test_layers_that_calibration_does_not_know(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "m")
    run(tmp_path / "m", tmp_path / "plain", "int8-g32", method="rtn")
    with pytest.raises(OptionError, match=r'do not know .*: use method="rtn"'):
        run(tmp_path / "m", tmp_path / "s", method="gptq")


def test_windows() -> None:
    text = list(range(10_000))
    windows = calibration_windows(text, length=100, count=5, seed=3)
    assert [len(window) for window in windows] == [100] * 5
    assert windows == sorted(windows)
    assert windows[-1][0] > 3000
    assert all(window == list(range(window[0], window[0] + 100)) for window in windows)
    assert windows != calibration_windows(text, length=100, count=5, seed=4)
    begun = calibration_windows(text[:250], length=100, bos=7)
    assert [window[0] for window in begun] == [7, 7]
    assert begun[1][1] == 101
    with pytest.raises(OptionError, match="has 31 tokens: at least 32"):
        calibration_windows(text[:31], length=32)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3.5", "folder"),
        pytest.param("deepseek-v3-plain", "gguf", marks=pytest.mark.slow),
        pytest.param("glm4-moe", "folder", marks=pytest.mark.slow),
    ],
)
def test_mtp_block_is_kept(name: str, kind: str, tmp_path: Path) -> None:
    """In 8 bits, which another run leaves as they are."""
    source = tmp_path / "source"
    block = TinyBlock(name, source)
    if kind == "gguf":
        source = write_tiny_gguf(source, tmp_path / "m.gguf", name, predicting=1)
    store = run(source, tmp_path / "store", "bf16", method="rtn").path
    again = run(store, tmp_path / "again", "int8-g32", method="rtn").path
    hidden, _ = block.expected(IDS)
    target = load_ours(source)
    theirs = block_logits(source, target, hidden)
    ours = block_logits(store, target, hidden)
    assert 0 < relative_error(ours, theirs) < 0.05
    assert np.array_equal(block_logits(again, target, hidden), ours)
    assert prediction_notes(store)
    with closing(open_checkpoint(store)) as checkpoint:
        assert not [name for name in checkpoint.tensors if name.startswith("mtp")]
    assert logits(store).shape == (48, 211)


EXPERT = "model.layers.1.mlp.experts.3.{}_proj.weight"
MIXTURES = [
    "qwen2-moe",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("granite-moe", "gpt-oss")),
]


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, path)
    return path


def values_of(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return np.concatenate([restore(block) for block in checkpoint.blocks(name)])


@pytest.mark.parametrize("format", ["int8-g32", "nvfp4"])
def test_rounding(mixture: Path, tmp_path: Path, format: str) -> None:
    report = run(mixture, tmp_path / "store", format, method="rtn")
    assert report.fallbacks == {}
    assert distance(logits(report.path), logits(mixture)) < (0.05 if format == "int8-g32" else 1.0)
    with (
        closing(open_checkpoint(report.path)) as store,
        closing(open_checkpoint(mixture)) as source,
    ):
        router = "model.layers.1.mlp.gate.weight"
        np.testing.assert_array_equal(values_of(store, router), values_of(source, router))
        for part in ("gate", "up", "down"):
            assert store.tensors[EXPERT.format(part)].format.name == format
        blocks = [next(iter(store.blocks(EXPERT.format(part)))) for part in ("gate", "up")]
        assert blocks[0].scale == blocks[1].scale  # they share their input


@some(("falcon-h1", "nemotron-h-moe", "kimi-linear", "lfm3", "olmo-hybrid"), ("lfm3",))
def test_recurrent_layers(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "model")
    report = run(tmp_path / "model", tmp_path / "store", "int8-g32", method="mr-gptq")
    ours, theirs = logits(report.path), logits(tmp_path / "model")
    # Of most rows: where two experts are close, rounding decides between them.
    assert np.median([distance(*rows) for rows in zip(ours, theirs, strict=True)]) < 0.05


def test_calibrating_all_but_the_experts(mixture: Path, tmp_path: Path) -> None:
    rounded = run(mixture, tmp_path / "rounded", method="rtn").path
    report = run(mixture, tmp_path / "store", method="gptq")
    exact = logits(mixture)
    assert distance(logits(report.path), exact) < 1.2 * distance(logits(rounded), exact)
    query = "model.layers.1.self_attn.q_proj.weight"
    shared = "model.layers.1.mlp.shared_experts.down_proj.weight"
    with closing(open_checkpoint(report.path)) as one, closing(open_checkpoint(rounded)) as two:
        for part in ("gate", "up", "down"):
            name = EXPERT.format(part)
            np.testing.assert_array_equal(values_of(one, name), values_of(two, name))
        assert not np.array_equal(values_of(one, query), values_of(two, query))
        assert (shared in one.tensors) == mixture.name.startswith("qwen2-moe")
        if shared in one.tensors:  # every token sees them
            assert not np.array_equal(values_of(one, shared), values_of(two, shared))
