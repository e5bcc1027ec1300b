"""Measures which models this PC runs, how fast and how well: ``localrt bench --card``.

Each model runs in a separate process, as in every benchmark, and in another one if its perplexity
is measured. Knows no command line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from localrt.api import load
from localrt.bench.process import ENGINE, ChildError, ChildProcess, serve
from localrt.bench.runner import run_bench
from localrt.bench.workload import BenchOptions
from localrt.common.errors import OptionError
from localrt.common.files import read_text
from localrt.common.helpers import helper_command
from localrt.common.option_names import on_command_line
from localrt.evaluate import evaluate

_TEXT_TOKENS = 2048
_WINDOW = 1024
_MEASURES: tuple[str, ...] = ("prefill_tok_s", "decode_tok_s", "ttft_s", "joules_per_token")
_MEASURES += ("peak_ram_bytes", "peak_vram_bytes")
_QUALITY = ("perplexity", "perplexity_change", "perplexity_change_error")


def run_card(
    models: Sequence[tuple[str, Path]],
    options: BenchOptions,
    *,
    text: Path | None = None,
    notify: Callable[[str], None],
    start: Callable[[], ChildProcess] = lambda: ChildProcess(ENGINE),
    evaluator: Callable[[], ChildProcess] = lambda: ChildProcess(helper_command(__name__)),
) -> dict[str, object]:
    """Measure each of ``models``, given by name and path, with the settings of ``options``.

    With ``text``, also measure perplexity on the beginning of that file, relative to the same
    weights unpacked to float32. Figures that were not measured are None; for a model that does not
    run, the reason is given. After Ctrl+C, models are missing and ``interrupted`` is true.
    """
    found: list[dict[str, object]] = []
    interrupted = False
    try:
        for number, (name, path) in enumerate(models, 1):
            notify(f"{name} ({number} of {len(models)})")
            found.append({"model": name, **_measured(replace(options, path=path), notify, start)})
            if text is not None and not found[-1]["reason"]:
                notify(f"{name}: perplexity")
                try:
                    with closing(evaluator()) as child:
                        found[-1] |= child.ask("evaluate", path=str(path), text=str(text))
                except ChildError as error:  # for example if float32 does not fit
                    notify(f"{name}: no perplexity: {error}")
    except KeyboardInterrupt:
        interrupted = True
    return {
        "kind": "card",
        "prompt_tokens": options.workload.prompt_tokens,
        "tokens": options.workload.tokens,
        "runs": options.workload.runs,
        "models": found,
        "interrupted": interrupted,
    }


def _measured(
    options: BenchOptions, notify: Callable[[str], None], start: Callable[[], ChildProcess]
) -> dict[str, object]:
    """Return a model's figures, or the reason why there are none."""
    try:
        outcome = run_bench(options, notify=notify, start=lambda engine: start())
    except OptionError as error:  # for example if the prompt exceeds the model's context
        return {"reason": error.told(on_command_line)}
    if outcome.interrupted:
        raise KeyboardInterrupt
    if not outcome.results:
        return {"reason": outcome.skipped[0].reason}
    metrics, info = outcome.results[0].metrics, outcome.results[0].info
    return {
        "reason": None,
        **{name: info.get(name) for name in ("format", "parameters", "weight_bytes")},
        "streamed": bool(info.get("streamed")),
        "bits_per_weight": 8 * info["weight_bytes"] / info["parameters"],
        **{name: metrics.get(name) for name in _MEASURES},
        **dict.fromkeys(_QUALITY),
    }


class Evaluator:
    """Request handlers of the process that measures perplexity."""

    def evaluate(self, path: str, text: str) -> dict[str, float]:
        """Return the perplexity of a text file's beginning, and its change against float32."""
        words = read_text(text)
        settings: dict[str, Any] = {"engine": "native", "ctx": _WINDOW, "draft": "off"}
        with load(path, **settings) as model, load(path, format="f32", **settings) as full:
            found = evaluate(model, words, limit_tokens=_TEXT_TOKENS, against=full)
        assert found.against is not None
        return {
            "perplexity": found.perplexity,
            "perplexity_change": found.against.perplexity_change,
            "perplexity_change_error": found.against.perplexity_change_error,
        }


def main() -> None:
    """Run an evaluator for the parent process."""
    serve(Evaluator())
