"""The examples and the guide's code run: with the tiny model where that does, else the real one."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import localrt
from tests.conftest import write_tiny_model
from tests.inside import engine_of
from tests.real_models import real_model

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def example(name: str) -> dict[str, Any]:
    """What the example defines."""
    return runpy.run_path(str(EXAMPLES / name), run_name="example")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("example"), context=1024)


# -- the window ----------------------------------------------------------------------------------


_apps: list[Any] = []  # an application must outlive its widgets, so it lives to the end


@pytest.fixture
def qt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("QT_QPA_PLATFORM", "offscreen")
    widgets = pytest.importorskip("PySide6.QtWidgets", reason="needs PySide6", exc_type=ImportError)
    if not _apps:
        _apps.append(widgets.QApplication.instance() or widgets.QApplication([]))
    yield _apps[0]
    _apps[0].processEvents()
    gc.collect()  # widgets in cycles: here, in their own thread


def until(app: Any, ready: Callable[[], bool], seconds: float = 240.0) -> None:
    """Turn the event loop until ``ready``."""
    ends = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < ends, "nothing happened"
        app.processEvents()
        time.sleep(0.002)


def test_the_window_answers(qt: Any, folder: Path) -> None:
    window = example("qt_chat.py")["ChatWindow"](str(folder))
    window.show()
    until(qt, window.line.isEnabled)
    assert window.chat is not None
    window.chat.set(max_tokens=30, ignore_eos=True)
    window.line.setText("hello")
    window.line.returnPressed.emit()
    assert window.button.text() == "Stop"
    until(qt, lambda: window.thread is None)
    log = window.log.toPlainText()
    assert "> hello" in log
    assert len(log) > len("\n> hello\n\n")
    engine: Any = engine_of(window.loading.result())
    compute = engine.run

    def slowly(*parts: Any, **options: Any) -> Any:
        time.sleep(0.02)  # else an answer may be over before it is stopped
        return compute(*parts, **options)

    engine.run = slowly
    # Stopping keeps the text and gives the line back.
    window.chat.set(max_tokens=None, ignore_eos=True)
    window.line.setText("go on")
    window.send()
    until(qt, lambda: len(window.log.toPlainText()) > len(log) + 20)
    window.button.click()
    until(qt, lambda: window.thread is None)
    assert window.log.toPlainText().endswith("[stopped]\n")
    assert len(window.chat.messages) == 4
    # Closing in the middle of an answer ends it.
    window.line.setText("again")
    window.send()
    model = window.loading.result()
    window.close()
    with pytest.raises(localrt.LocalrtError, match="closed"):
        model.generate("hi")


def test_the_window_says_what_is_wrong(qt: Any, tmp_path: Path) -> None:
    window = example("qt_chat.py")["ChatWindow"](str(tmp_path / "nothing"))
    until(qt, lambda: "no such file" in window.log.toPlainText())
    assert not window.line.isEnabled()
    window.close()


# -- the others ----------------------------------------------------------------------------------


async def test_the_asyncio_app_answers_while_its_loop_goes_on(folder: Path) -> None:
    texts, ticks = await example("asyncio_app.py")["main"](str(folder), tokens=20, period_s=0.001)
    assert len(texts) == 3
    assert any(texts)  # random weights may end at once
    assert ticks >= 2


@pytest.mark.real
@pytest.mark.slow
def test_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    path = real_model("smollm2")
    run_cells(
        [
            "".join(cell["source"])
            for cell in json.loads((EXAMPLES / "notebook.ipynb").read_text("utf-8"))["cells"]
            if cell["cell_type"] == "code"
        ],
        path,
        monkeypatch,
    )


@pytest.mark.real
@pytest.mark.slow
def test_the_guide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every block of docs/embedding.md, in order, in one namespace."""
    pytest.importorskip("llguidance")
    path = real_model("smollm2")
    guide = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 8
    monkeypatch.chdir(tmp_path)
    for name in ("style", "facts", "third"):
        save_adapter(tmp_path / name)
    run_cells(blocks, path, monkeypatch)


def save_adapter(folder: Path) -> None:
    """One of rank 4 for SmolLM2's first queries."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    rng = np.random.default_rng(0)
    shapes = {"A": (4, 576), "B": (576, 4)}
    save_file(
        {name.format(k): rng.normal(0, 0.02, s).astype(np.float32) for k, s in shapes.items()},
        folder / "adapter_model.safetensors",
    )


def run_cells(cells: list[str], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run pieces of code one after another; the demo model's name means the file at ``path``."""
    load = localrt.load

    def load_here(model: Any = "smollm2", **options: Any) -> localrt.Model:
        return load(path if model == "smollm2" else model, **{"ctx": 1024, **options})

    monkeypatch.setattr(localrt, "load", load_here)
    monkeypatch.setattr("localrt.api.load", load_here)
    monkeypatch.setattr(sys, "argv", ["notebook"])
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in cells:
            exec(compile(cell, "cell", "exec", dont_inherit=True), names)


def test_the_examples_use_the_public_names_alone() -> None:
    files = sorted(EXAMPLES.iterdir())
    assert files
    for file in files:
        if file.suffix not in (".py", ".ipynb"):
            continue
        text = file.read_text(encoding="utf-8")
        assert "from localrt" not in text, file
        assert "import localrt." not in text, file
        for name in re.findall(r"\blocalrt\.(\w+)", text):
            assert name in localrt.__all__, f"{file}: {name}"
