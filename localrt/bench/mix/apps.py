"""The requests of applications: arrival times, and sessions of consecutive requests.

Everything is drawn from the mix's seed, so that all servers get the same. Only conversations depend
on a server: they send its answers back, and continue after the time to read them. The module knows
no server and no clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias

from localrt.bench.mix.mix import App
from localrt.bench.workload import SENTENCES

_STAY = 6  # completions in a file before the next one
_READ_WORDS_S = 4.0  # silent reading, about 240 words a minute
_PATIENCE_S = 10.0  # after this, a typist continues without a completion
_TEMPERATURE = 0.8
_SYSTEM = "You are an agent. Call one tool at a time. Say what you do next, then do it."
_NAMES = ("crate", "tide", "harbour", "pilot", "lamp", "wall", "price", "clerk", "barrel", "wind")


@dataclass(frozen=True, slots=True)
class Request:
    """A request ``pause_s`` after the last answer.

    With ``give_up_s``, it is cancelled that many seconds after it was sent, and the next one
    follows.
    """

    path: str
    body: Mapping[str, Any]
    pause_s: float = 0.0
    give_up_s: float | None = None


Session: TypeAlias = Generator[Request, str, None]
"""A generator that yields requests and is sent the text of each answer."""


def arrivals(app: App, seconds: float, seed: int) -> list[float]:
    """Return the start times of sessions, in seconds from the start of the mix; [] for
    ``closed``.
    """
    found: list[float] = []
    if app.every_s is not None:
        number = max(0, math.ceil((seconds - app.start_s) / app.every_s))
        times = (app.start_s + index * app.every_s for index in range(number))
        found = [at for at in times if at < seconds]
    elif app.poisson_s is not None:
        rng = random.Random(f"{seed}/{app.name}")
        at = app.start_s + rng.expovariate(1 / app.poisson_s)
        while at < seconds:
            found.append(at)
            at += rng.expovariate(1 / app.poisson_s)
    return found


def session(app: App, index: int, seed: int) -> Session:
    """Return the requests of the application's session number ``index``."""
    rng = random.Random(f"{seed}/{app.name}/{index}")
    if app.kind == "completion":
        file = random.Random(f"{seed}/{app.name}/file {index // _STAY}")
        return _completion(app, index, rng, file)
    return _SESSIONS[app.kind](app, index, rng)


def marked(request: Request, mark: str) -> Request:
    """Put ``mark`` before all of a request's texts, so that no server has them cached."""
    body = dict(request.body)
    if "messages" in body:
        first, *rest = body["messages"]
        body["messages"] = [{**first, "content": mark + first["content"]}, *rest]
    elif "prompt" in body:
        body["prompt"] = mark + body["prompt"]
    else:
        body["input"] = [mark + text for text in body["input"]]
    return replace(request, body=body)


def _chat(app: App, index: int, rng: random.Random) -> Session:
    messages: list[dict[str, str]] = []
    pause_s = 0.0
    for turn in range(app.turns):
        text = _text(app, index * app.turns + turn, rng, "What happened next, and why?")
        messages.append({"role": "user", "content": text})
        answer = yield _ask(app, rng, messages, pause_s)
        messages.append({"role": "assistant", "content": answer})
        pause_s = len(answer.split()) / _READ_WORDS_S


def _agent(app: App, index: int, rng: random.Random) -> Session:
    task = _text(app, index, rng, "Find out who paid, with the tools read, list and search.")
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": task}]
    for _ in range(app.turns):
        answer = yield _ask(app, rng, messages)
        messages.append({"role": "assistant", "content": answer})
        found = _prose(max(1, app.prompt_words // 4), rng)
        messages.append({"role": "user", "content": f"Result of the tool: {found}"})


def _one(app: App, index: int, rng: random.Random) -> Session:
    """One long text and one answer, for summaries and batches."""
    text = _text(app, index, rng, "Summarize this text in a few sentences.")
    yield _ask(app, rng, [{"role": "user", "content": text}])


def _completion(app: App, index: int, rng: random.Random, file: random.Random) -> Session:
    """Complete code at a cursor: the typist resumes up to twice before waiting, and edits one
    place of ``file`` for several sessions, so the code before the cursor grows.

    The text after the cursor comes first, so that it is a plain continuation, which every server
    and model supports.
    """
    before = _text(app, index // _STAY, file, make=_code)
    after, more = _code(app.prompt_words // 3, file), _code(app.prompt_words // 3, file)
    typed = more[: len(more) * (index % _STAY) // _STAY]
    text = f"# After the cursor:\n{after}\n# Before it:\n{before}\n{typed}"
    cut = len(text) - rng.randint(10, 30)  # the cursor
    for _ in range(rng.randint(0, 2)):
        yield _complete(app, rng, text[:cut], rng.uniform(0.2, 0.8))
        cut += rng.randint(1, 5)
    yield _complete(app, rng, text[:cut], _PATIENCE_S)


def _embeddings(app: App, index: int, rng: random.Random) -> Session:
    texts = [_text(app, index * app.texts + place, rng) for place in range(app.texts)]
    yield Request("/embeddings", {"input": texts})


_SESSIONS: Mapping[str, Callable[[App, int, random.Random], Session]] = {
    "chat": _chat,
    "agent": _agent,
    "summary": _one,
    "embeddings": _embeddings,
    "batch": _one,
}


# -- bodies and texts ------------------------------------------------------------------------------


def _ask(
    app: App, rng: random.Random, messages: list[dict[str, str]], pause_s: float = 0.0
) -> Request:
    body = {"messages": list(messages), **_generation(app, rng)}
    return Request("/chat/completions", body, pause_s)


def _complete(app: App, rng: random.Random, prompt: str, give_up_s: float) -> Request:
    body = {"prompt": prompt, **_generation(app, rng)}
    return Request("/completions", body, give_up_s=give_up_s)


def _generation(app: App, rng: random.Random) -> dict[str, object]:
    """All answers have the mix's length, so that servers do the same work."""
    return {
        "max_tokens": app.answer_tokens,
        "ignore_eos": True,
        "temperature": _TEMPERATURE,
        "seed": rng.getrandbits(31),
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _prose(words: int, rng: random.Random) -> str:
    found: list[str] = []
    while len(found) < words:
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        year, n = rng.randint(1600, 1999), rng.randint(1, 999)
        sentence = rng.choice(SENTENCES).format(year=year, n=n, a=a, b=b, sum=a + b)
        found += sentence.split()
    return " ".join(found[:words])


def _code(words: int, rng: random.Random) -> str:
    """Return functions of about ``words`` words."""
    found: list[str] = []
    for number in count():
        if sum(len(line.split()) for line in found) >= words:
            break
        first, second = rng.sample(_NAMES, 2)
        found.append(f"def {first}_{second}_{number}({first}s: list[int], {second}: int) -> int:")
        found.append(f'    """Return the {first}s that {second} leaves."""')
        found.append(f"    {second}s = [{first} * {rng.randint(2, 99)} for {first} in {first}s]")
        found.append(f"    return sum({second}s) - {second} * {rng.randint(2, 99)}\n")
    return "\n".join(found)


def _text(
    app: App,
    place: int,
    rng: random.Random,
    question: str = "",
    make: Callable[[int, random.Random], str] = _prose,
) -> str:
    """Return the user's text number ``place``, or a generated text followed by the question."""
    if app.prompts:
        return app.prompts[place % len(app.prompts)]
    return f"{make(app.prompt_words, rng)}\n\n{question}".strip()
