"""``Model.embed`` against transformers, over passes and engines."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localrt
from localrt.engine.native.engine import NativeEngine
from tests.conftest import write_tiny_model
from tests.inside import engine_of
from tests.models.tiny import save_tiny
from tests.real_models import real_model

TEXTS: list[list[int]] = [
    [5, 6, 7],
    [9],
    [int(t) for t in np.random.default_rng(0).integers(3, 211, 90)],
]
JOINED = {"mean": lambda r: r.mean(0), "last": lambda r: r[-1], "cls": lambda r: r[0]}


def hidden(reference: Any, tokens: list[int]) -> Any:
    import torch

    with torch.no_grad():
        found = reference(torch.tensor([tokens]), output_hidden_states=True)
    return found.hidden_states[-1][0].numpy()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_vectors_as_transformers(name: str, tmp_path: Path) -> None:
    reference = save_tiny(name, tmp_path).module
    with localrt.load(tmp_path, format="f32") as model:
        rows = [hidden(reference, text) for text in TEXTS]
        for pooling, joined in JOINED.items():
            wanted = np.stack(list(map(joined, rows)))
            found = model.embed(TEXTS, pooling=pooling, normalize=False)
            assert found.dtype == np.float32
            assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()
            unit = model.embed(TEXTS, pooling=pooling)
            assert np.allclose(np.linalg.norm(unit, axis=1), 1.0, atol=1e-5)


def test_embed_together_and_alone(tiny_folder: Path) -> None:
    texts = ["a" * n for n in (3, 500, 40, 511, 1)]
    with localrt.load(tiny_folder) as model:
        together = model.embed(texts)
        for text, vector in zip(texts, together, strict=True):
            assert (model.embed([text])[0] == vector).all()
        alone = engine_of(model).pass_rows  # type: ignore[attr-defined]
        engine_of(model).pass_rows = 64  # type: ignore[attr-defined]
        assert (model.embed(texts) == together).all()
        assert alone == 512
        assert model.embed([]).shape == (0, 64)
        # A generation does not notice.
        assert model.generate("hi", max_tokens=3, ignore_eos=True).token_ids


def test_few_rows_while_others_wait(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors and logits are the same; each pass takes its turn."""
    texts, rows, held = ["a" * n for n in (3, 500, 40)], list[int](), list[bool]()
    run = NativeEngine.run

    def noted(self: NativeEngine, batch: Any, **options: Any) -> Any:
        rows.append(len(batch.tokens))
        assert held == [True]
        return run(self, batch, **options)

    @contextmanager
    def turn() -> Iterator[int]:
        held.append(True)
        yield 1
        held.clear()

    with localrt.load(tiny_folder) as model:
        engine = engine_of(model)
        wanted = model.embed(texts)
        logits = np.concatenate([*model.logits([5] * 100, first=90)])
        monkeypatch.setattr(NativeEngine, "run", noted)
        engine.turn = turn
        assert (model.embed(texts) == wanted).all()
        assert np.array_equal(np.concatenate([*model.logits([5] * 100, first=90)]), logits)
        assert max(rows) == 64
        assert sum(rows) == 543 + 100
        monkeypatch.undo()
        with model.live():
            assert engine.turn not in (None, turn)
            assert (model.embed(texts) == wanted).all()
        assert engine.turn is None


def test_pooling_of_model(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    with localrt.load(folder) as model:
        assert (model.embed(["abc"]) == model.embed(["abc"], pooling="mean")).all()
    (folder / "1_Pooling").mkdir()
    config = folder / "1_Pooling" / "config.json"
    modes = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    config.write_text(json.dumps(modes))
    with localrt.load(folder) as model:
        assert (model.embed(["abc"]) == model.embed(["abc"], pooling="last")).all()
    config.write_text(json.dumps({"pooling_mode_cls_token": True}))
    with localrt.load(folder) as model:
        assert (model.embed(["abc"]) == model.embed(["abc"], pooling="cls")).all()


def test_embed_errors(tiny: localrt.Model) -> None:
    for texts, options, kind, message in (
        ("one text", {}, localrt.OptionError, "a list of texts"),
        (["a", ""], {}, localrt.OptionError, "text 1"),
        ([[]], {}, localrt.OptionError, "text 0"),
        ([[100000]], {}, localrt.OptionError, "token ids"),
        (["a"], {"pooling": "max"}, localrt.OptionError, "pooling must be auto, mean, last or cls"),
        (["a" * 600], {}, localrt.ContextOverflowError, "600 tokens"),
    ):
        with pytest.raises(kind, match=message):
            tiny.embed(texts, **options)  # type: ignore[arg-type]
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(localrt.CancelledError):
        tiny.embed(["a"], cancel=cancel)


@pytest.mark.llamacpp
@pytest.mark.real
def test_engines_agree() -> None:
    pytest.importorskip("llama_cpp", reason="needs the llamacpp extra")
    path = real_model("smollm2")
    texts = ["A cat sleeps.", "A kitten is asleep.", "The stock market fell by two percent. " * 40]
    with localrt.load(path, engine="native", ctx=1024) as model:
        ours = model.embed(texts)
    with localrt.load(path, engine="llamacpp", ctx=1024) as model:
        theirs = model.embed(texts)
    assert ((ours * theirs).sum(axis=1) > 0.98).all()
    likeness = ours @ ours.T
    assert likeness[0, 1] > likeness[0, 2]
