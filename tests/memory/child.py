"""One cell's process: load, answer, say what the process took. Run with the job as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import localrt
from localrt import Model
from localrt.offload.memory import peak_rss

_TEXT = (
    "The lighthouse keeper wrote every evening what the sea had brought: a crate of oranges, a"
    " broken oar, two letters that nobody had sent. "
)


def main(job: dict[str, Any]) -> dict[str, Any]:
    """What happened, in plain values."""
    forecasts: list[int | None] = []
    result: dict[str, Any] = {"outcome": "answered"}
    try:
        with localrt.load(job["path"], threads=2, **job["load"]) as model:
            result["ctx"], result["notes"] = model.info.ctx, list(model.info.notes)
            result["loaded_peak"] = peak_rss()
            try:
                _WAYS[job["way"]](model, job)
            except localrt.LocalrtError as error:
                result.update(outcome="failed", text=f"{type(error).__name__}: {error}")
            forecasts.append(model.status().ram.forecast)
            result["peak"] = peak_rss()
    except localrt.MemoryBudgetError as error:
        result.update(outcome="refused", text=str(error), peak=peak_rss())
    result["forecast"] = forecasts[0] if forecasts else None
    return result


def _generate(model: Model, job: dict[str, Any]) -> None:
    for prompt, tokens in ((20, 4), (300, 16), (20, job["long_answer"])):
        _answer(model, prompt, tokens)


def _fill(model: Model, job: dict[str, Any]) -> None:
    """To the last token of the context."""
    answer = min(model.info.ctx // 2, job["long_answer"])
    _answer(model, model.info.ctx - answer, answer)


def _answer(model: Model, prompt: int, tokens: int) -> None:
    ids = [100 + number * 37 % 4000 for number in range(prompt)]
    model.generate(token_ids=ids, max_tokens=tokens, ignore_eos=True, temperature=0.0)


def _chat(model: Model, job: dict[str, Any]) -> None:
    chat = model.chat(system="Be brief.")
    for question in ("Why is the sky blue?", "And the sea?", _TEXT, "Say it again, word by word."):
        chat.send(question, max_tokens=24)


def _live(model: Model, job: dict[str, Any]) -> None:
    """Six requests, four at a time."""
    with model.live(most=4) as live:
        prompts = [f"{number}: {_TEXT * 4}" for number in range(6)]
        for answer in [live.submit(prompt, max_tokens=16) for prompt in prompts]:
            list(answer)


_WAYS: dict[str, Callable[[Model, dict[str, Any]], None]] = {
    "generate": _generate,
    "fill": _fill,
    "chat": _chat,
    "live": _live,
}

if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
