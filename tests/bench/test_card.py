import sys
from pathlib import Path
from typing import Any

from localrt.bench.card import run_card
from localrt.bench.page import card_rows
from localrt.bench.process import ChildProcess
from localrt.bench.workload import BenchOptions, Workload
from tests.bench.reports import FACTS
from tests.bench.test_runner import FAKE, ROOT

EVALUATOR = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from localrt.bench.process import serve

class Evaluator:
    def evaluate(self, path, text):
        return dict(perplexity=9.0, perplexity_change=0.02, perplexity_change_error=0.001)

serve(Evaluator())
"""


def _card(tmp_path: Path, *names: str, **more: Any) -> dict[str, Any]:
    models = [(f"{name} 1B", tmp_path / name) for name in names]
    for _, path in models:
        path.write_bytes(b"a model")
    work = Workload(prompt_tokens=20, tokens=5, runs=2)
    options = BenchOptions(path=Path(), engines=("native",), workload=work)
    return run_card(
        models,
        options,
        **{"notify": lambda line: None, "start": lambda: ChildProcess(FAKE), **more},
    )


def test_every_model(tmp_path: Path) -> None:
    text = tmp_path / "text"
    evaluator = [sys.executable, "-c", EVALUATOR]
    report = _card(
        tmp_path, "good", "unsupported", text=text, evaluator=lambda: ChildProcess(evaluator)
    )
    good, bad = report["models"]
    assert good["bits_per_weight"] == 5
    assert good["peak_vram_bytes"] is None
    assert good["decode_tok_s"] == 40
    assert good["perplexity_change"] == 0.02
    assert bad == {"model": "unsupported 1B", "reason": "this model is a teapot"}
    assert not report["interrupted"]
    headers, rows = card_rows(FACTS | report)
    assert "first token of 20" in headers
    assert rows[0][0] == "good 1B"
    assert rows[0][-1] == "+2.00 % ± 0.10 %"
    assert rows[1] == ["unsupported 1B", "this model is a teapot"]


def test_perplexity_that_cannot_be_measured(tmp_path: Path) -> None:
    lines: list[str] = []
    report = _card(
        tmp_path,
        "good",
        text=tmp_path / "text",
        evaluator=lambda: ChildProcess([sys.executable, "-c", "raise SystemExit('no memory')"]),
        notify=lines.append,
    )
    assert "no memory" in lines[-1]
    _, rows = card_rows(FACTS | report)
    assert rows[0][-1] == "not measured"


def test_interrupt(tmp_path: Path) -> None:
    def notify(line: str) -> None:
        if line.startswith("unsupported 1B"):
            raise KeyboardInterrupt

    report = _card(tmp_path, "good", "unsupported", notify=notify)
    assert report["interrupted"]
    assert [model["model"] for model in report["models"]] == ["good 1B"]
