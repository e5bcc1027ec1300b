"""Mixes: a format for each group of matrices by what it was measured to lose."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import LocalrtError, OptionError
from localrt.common.progress import Progress
from localrt.models.checkpoints import Checkpoint, StoreCheckpoint, open_checkpoint
from localrt.models.registry import load_decoder, read_config
from localrt.offload.store.pack import fingerprint
from localrt.planning.mix import (
    MIX_FORMATS,
    GroupLoss,
    LossTable,
    known_losses,
    table_path,
)
from localrt.quant.formats import CODECS, FORMATS
from localrt.quant.ops.protocol import Batch
from localrt.quant.reference.ops import TorchOps
from localrt.quantize.calibration import calibration_windows
from localrt.quantize.quantize import QuantizeReport, Recipe, quantize_model
from tests.models.tiny import tokens
from tests.store.synthetic import SyntheticCheckpoint

TEXT = [token % 250 for token in tokens(512 * 8, seed=9)]
GROUPS = st.builds(
    lambda size, nats: (size * 256, dict(zip(MIX_FORMATS, nats, strict=False))),
    st.integers(1, 40),
    st.lists(st.floats(0, 1), min_size=1, max_size=4),
)


def source(folder: Path) -> SyntheticCheckpoint:
    return SyntheticCheckpoint(folder, hidden=256, inner=512, formats={"proj": "f32"})


def quantized(checkpoint: Any, out: Path, bits: float, **options: Any) -> QuantizeReport:
    recipe = Recipe(None, bits=bits, calibration=TEXT, calibration_tokens=512 * 3)
    return quantize_model(checkpoint, out, recipe, threads=1, **options)


def table_of(groups: list[tuple[int, dict[str, float]]]) -> LossTable:
    made = (GroupLoss((str(n),), size, nats) for n, (size, nats) in enumerate(groups))
    return LossTable("mark", "text", 1024, tuple(made))


@given(st.lists(GROUPS, min_size=1, max_size=5), st.floats(0, 1))
def test_choose(groups: list[tuple[int, dict[str, float]]], share: float) -> None:
    table = table_of(groups)
    bits = table.least_bits + share * (6.5 - table.least_bits)
    chosen = table.choose(bits)
    assert table.bits(chosen) <= bits + 1e-6
    every = [list(mix) for mix in itertools.product(*(nats for _, nats in groups))]
    best = min(table.nats(mix) for mix in every if table.bits(mix) <= bits + 1e-9)
    step = max(max(nats.values()) - min(nats.values()) for _, nats in groups)
    assert best - 1e-9 <= table.nats(chosen) <= best + step + 1e-9
    with pytest.raises(OptionError, match="the smallest mix has"):
        table.choose(table.least_bits - 0.01)
    assert table.loss(table.least_bits - 0.01) is None


def test_kept_table(tmp_path: Path) -> None:
    table = table_of([(256, {"q2_k": 0.5, "q3_k": 0.1})])
    assert LossTable.from_json(table.to_json()) == table
    assert known_losses(tmp_path, "mark") is None
    table.save(tmp_path / "deep")
    assert known_losses(tmp_path / "deep", "mark") == table
    text = table.to_json()
    for damaged in (
        "",
        "[]",
        "{}",
        text[:-9],
        text.replace("0.5", '"x"'),
        text.replace("0.5", "NaN"),
    ):
        table_path(tmp_path, "mark").write_text(damaged)
        assert known_losses(tmp_path, "mark") is None


def answers(checkpoint: Checkpoint, windows: list[list[int]]) -> np.ndarray:
    """Logarithms of the probabilities of every fourth position, float64."""
    decoder = load_decoder(checkpoint, TorchOps(compute_format="f32"), read_config(checkpoint))
    found = []
    for window in windows:
        logits = decoder.forward(Batch.extend([(decoder.cache(len(window)), window)]))
        x = logits[3::4].astype(np.float64)
        found.append(x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)))
        found[-1] -= x.max(1, keepdims=True)
    return np.concatenate(found)


def naive_divergence(one: Checkpoint, other: Checkpoint, windows: list[list[int]]) -> float:
    a, b = answers(one, windows), answers(other, windows)
    return float((np.exp(a) * (a - b)).sum(1).mean())


def test_store(tmp_path: Path) -> None:
    model, losses = source(tmp_path), tmp_path / "losses"
    steps: list[Progress] = []
    report = quantized(model, tmp_path / "a", 4.0, losses=losses, progress=steps.append)
    assert report.format == "4 bits"
    assert 3.5 < report.layer_bits_per_weight <= 4.0
    assert sum(report.formats.values()) == 14
    assert {step.stage for step in steps} == {"losses", "quantize"}
    with closing(open_checkpoint(tmp_path / "a")) as store:
        assert isinstance(store, StoreCheckpoint)
        assert store.manifest.quantization is not None
        assert store.manifest.quantization.loss == report.loss
        for one, other in (("q", "k"), ("k", "v")):  # they share their input
            names = [f"model.layers.1.self_attn.{stem}_proj.weight" for stem in (one, other)]
            assert len({store.tensors[name].format for name in names}) == 1
        _, others = calibration_windows(TEXT, length=512, count=3)
        assert report.loss == pytest.approx(naive_divergence(model, store, others), rel=0.05)

    table = known_losses(losses, fingerprint(model))
    assert table is not None
    assert table.tokens == 1024
    assert table.loss(4.0) == pytest.approx(report.loss)
    for group in table.groups:
        fewer_first = [group.nats[f] for f in MIX_FORMATS]
        assert fewer_first == sorted(fewer_first, reverse=True)
    # Another size needs no other measurement, and loses more where it has fewer bits.
    steps.clear()
    less = quantized(model, tmp_path / "b", 3.0, losses=losses, progress=steps.append)
    assert {step.stage for step in steps} == {"quantize"}
    assert less.layer_bits_per_weight <= 3.0
    assert report.loss is not None
    assert less.loss is not None
    assert less.loss > report.loss
    assert not torch.is_inference_mode_enabled()  # the caller's thread is as it was


def test_losses(tmp_path: Path) -> None:
    """The sum over a layer's groups is what a naive run of the model with that layer loses."""
    model = source(tmp_path)
    quantized(model, tmp_path / "store", 4.0, losses=tmp_path / "losses")
    table = known_losses(tmp_path / "losses", fingerprint(model))
    assert table is not None
    rounded = quantize_model(model, tmp_path / "q3", Recipe("q3_k", method="rtn")).path
    windows = calibration_windows(TEXT, length=512, count=3)[0][::2]
    with closing(open_checkpoint(rounded)) as store:
        for layer in (0, 1):
            said = sum(
                group.nats["q3_k"]
                for group in table.groups
                if group.tensors[0].startswith(f"model.layers.{layer}.")
            )
            alone = OneLayer(model, store, layer)
            # Rounding weighs columns by their inputs in one and not in the other.
            assert said == pytest.approx(naive_divergence(model, alone, windows), rel=0.35)


class OneLayer:
    """A model with one layer of another."""

    def __init__(self, base: Checkpoint, other: Checkpoint, layer: int) -> None:
        self._of = lambda name: other if name.startswith(f"model.layers.{layer}.") else base
        for name in ("path", "kind", "architecture", "config", "generation_config", "metadata"):
            setattr(self, name, getattr(base, name))
        self.notes: tuple[str, ...] = ()
        self.tensors = {name: self._of(name).tensors[name] for name in base.tensors}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        return self._of(name).read(name, start, stop)

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Any:
        return self._of(name).blocks(name, max_bytes)

    def close(self) -> None:
        pass


def test_errors(tmp_path: Path) -> None:
    model, out = source(tmp_path), tmp_path / "s"
    for recipe, says in (
        (Recipe(None), "either format or bits"),
        (Recipe("q3_k", bits=3.5), "either format or bits"),
        (Recipe(None, bits=2.6, calibration=TEXT), "bits must be from 2.625 to 6.5, is 2.6"),
        (Recipe(None, bits=float("nan"), calibration=TEXT), "from 2.625 to 6.5, is nan"),
        (Recipe(None, bits=3.5, method="rtn"), "a mix is quantized by gptq"),
        (Recipe(None, bits=3.5), "give calibration"),
    ):
        with pytest.raises(OptionError, match=says):
            quantize_model(model, out, recipe)
    assert not out.exists()


def test_formats() -> None:
    widths = [CODECS[name].format.bits_per_weight for name in MIX_FORMATS]
    assert widths == sorted(widths)
    assert all(name in FORMATS for name in MIX_FORMATS)
    with pytest.raises(LocalrtError, match="damaged"):
        LossTable.from_json("{")
