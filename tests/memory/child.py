"""One cell's process: load, answer, say what the process took. Run with the job as JSON."""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


def _serve(model: Model, job: dict[str, Any]) -> None:
    """Six requests, four at a time."""
    from localrt.server.options import ServeOptions
    from localrt.server.running import Server, create_app, open_socket

    options = ServeOptions(port=0, drain_s=1.0)
    bound = open_socket(options)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1/chat/completions"
    server = Server(create_app(model, options), options)
    problems: list[OSError] = []

    def ask(number: int) -> None:
        question = f"{number}: {_TEXT * 4}"
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 16}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            answer.read()

    def clients() -> None:
        try:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(ask, range(6)))
        except OSError as error:
            problems.append(error)
        finally:
            server.should_exit = True

    thread = threading.Thread(target=clients)
    server.ready = thread.start
    server.run(sockets=[bound])
    thread.join()
    bound.close()
    if problems:
        raise localrt.LocalrtError(f"a client failed: {problems[0]}")


_WAYS: dict[str, Callable[[Model, dict[str, Any]], None]] = {
    "generate": _generate,
    "fill": _fill,
    "chat": _chat,
    "serve": _serve,
}

if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
