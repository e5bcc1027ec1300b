"""A mix: applications with goals, neighbours, and the requests of each application.

Values are checked: every error in a mix's file is reported in one line with file, table and key.
Arrival times and sessions of consecutive requests are drawn from the mix's seed, so that all
servers get the same. Only conversations depend on a server: they send its answers back, and
continue after the time to read them. This module starts nothing, and knows no server and no clock.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np

from localrt.bench.workload import SENTENCES
from localrt.common.errors import LocalrtError, OptionError
from localrt.common.files import read_text
from localrt.common.formatting import one_line, parse_size
from localrt.common.option_names import did_you_mean, option
from localrt.engine.batch.chunked_prefill import CLASSES

_STAY = 6  # completions in a file before the next one
_READ_WORDS_S = 4.0  # silent reading, about 240 words a minute
_PATIENCE_S = 10.0  # after this, a typist continues without a completion
_TEMPERATURE = 0.8
_SYSTEM = "You are an agent. Call one tool at a time. Say what you do next, then do it."
_NAMES = ("crate", "tide", "harbour", "pilot", "lamp", "wall", "price", "clerk", "barrel", "wind")


@dataclass(frozen=True, slots=True)
class AppRequest:
    """A request ``pause_s`` after the last answer.

    With ``give_up_s``, it is cancelled that many seconds after it was sent, and the next one
    follows.
    """

    path: str
    body: Mapping[str, Any]
    pause_s: float = 0.0
    give_up_s: float | None = None


Session: TypeAlias = Generator[AppRequest, str, None]
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
    return _SESSIONS[app.kind](app, rng)


def marked(request: AppRequest, mark: str) -> AppRequest:
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


def _chat(app: App, rng: random.Random) -> Session:
    messages: list[dict[str, str]] = []
    pause_s = 0.0
    for _ in range(app.turns):
        text = _text(app, rng, "What happened next, and why?")
        messages.append({"role": "user", "content": text})
        answer = yield _ask(app, rng, messages, pause_s)
        messages.append({"role": "assistant", "content": answer})
        pause_s = len(answer.split()) / _READ_WORDS_S


def _agent(app: App, rng: random.Random) -> Session:
    task = _text(app, rng, "Find out who paid, with the tools read, list and search.")
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": task}]
    for _ in range(app.turns):
        answer = yield _ask(app, rng, messages)
        messages.append({"role": "assistant", "content": answer})
        found = _prose(max(1, app.prompt_words // 4), rng)
        messages.append({"role": "user", "content": f"Result of the tool: {found}"})


def _one(app: App, rng: random.Random) -> Session:
    """One long text and one answer, for summaries and batches."""
    text = _text(app, rng, "Summarize this text in a few sentences.")
    yield _ask(app, rng, [{"role": "user", "content": text}])


def _completion(app: App, index: int, rng: random.Random, file: random.Random) -> Session:
    """Complete code at a cursor: the typist resumes up to twice before waiting, and edits one
    place of ``file`` for several sessions, so the code before the cursor grows.

    The text after the cursor comes first, so that it is a plain continuation, which every server
    and model supports.
    """
    before = _text(app, file, make=_code)
    after, more = _code(app.prompt_words // 3, file), _code(app.prompt_words // 3, file)
    typed = more[: len(more) * (index % _STAY) // _STAY]
    text = f"# After the cursor:\n{after}\n# Before it:\n{before}\n{typed}"
    cut = len(text) - rng.randint(10, 30)  # the cursor
    for _ in range(rng.randint(0, 2)):
        yield _complete(app, rng, text[:cut], rng.uniform(0.2, 0.8))
        cut += rng.randint(1, 5)
    yield _complete(app, rng, text[:cut], _PATIENCE_S)


def _embeddings(app: App, rng: random.Random) -> Session:
    yield AppRequest("/embeddings", {"input": [_text(app, rng) for _ in range(app.texts)]})


_SESSIONS: Mapping[str, Callable[[App, random.Random], Session]] = {
    "chat": _chat,
    "agent": _agent,
    "summary": _one,
    "embeddings": _embeddings,
    "batch": _one,
}


# -- bodies and texts ------------------------------------------------------------------------------


def _ask(
    app: App, rng: random.Random, messages: list[dict[str, str]], pause_s: float = 0.0
) -> AppRequest:
    body = {"messages": list(messages), **_generation(app, rng)}
    return AppRequest("/chat/completions", body, pause_s)


def _complete(app: App, rng: random.Random, prompt: str, give_up_s: float) -> AppRequest:
    body = {"prompt": prompt, **_generation(app, rng)}
    return AppRequest("/completions", body, give_up_s=give_up_s)


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
    rng: random.Random,
    question: str = "",
    make: Callable[[int, random.Random], str] = _prose,
) -> str:
    """Return a generated text followed by the question."""
    return f"{make(app.prompt_words, rng)}\n\n{question}".strip()


SHIPPED = ("student", "developer", "office", "contention")
_STALL_S = 1.0  # stall threshold without a goal for the time per token


@dataclass(frozen=True, slots=True)
class Goals:
    """A request's goals: at most these times, at least ``tokens_s`` tokens per second.

    ``tpot_s`` is the mean time per token after the first, ``deadline_s`` the time of the whole
    answer. None: no such goal.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None
    tokens_s: float | None = None

    @property
    def stall_s(self) -> float:
        """The longest gap between two tokens that does not count as a stall."""
        return _STALL_S if self.tpot_s is None else 2 * self.tpot_s

    def met(
        self, *, ttft_s: float | None, tpot_s: float | None, total_s: float, tokens: int
    ) -> bool:
        """Whether a complete answer met all goals; an answer of one token has no ``tpot_s``."""
        most = ((self.ttft_s, ttft_s), (self.tpot_s, tpot_s), (self.deadline_s, total_s))
        kept = all(goal is None or took is None or took <= goal for goal, took in most)
        return kept and (self.tokens_s is None or tokens >= self.tokens_s * total_s)

    def missed_by(self, seconds: float, *, ttft_s: float | None) -> bool:
        """Whether an answer that was given up after ``seconds`` had missed a goal by then."""
        first = seconds if ttft_s is None else ttft_s
        late = self.ttft_s is not None and first > self.ttft_s
        return late or (self.deadline_s is not None and seconds > self.deadline_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """An application: what it sends, to which model, when, and its goals.

    One of ``every_s`` (regular arrivals), ``poisson_s`` (random arrivals with this mean interval)
    and ``closed`` (this many users, each with one session after another) is set. Texts have
    ``prompt_words`` words. ``turns`` is the number of requests in a conversation, ``texts`` the
    number of texts to embed per request.
    """

    name: str
    class_: str
    kind: str
    model: str
    every_s: float | None = None
    poisson_s: float | None = None
    closed: int | None = None
    start_s: float = 0.0
    prompt_words: int = 0
    answer_tokens: int = 0
    turns: int = 1
    texts: int = 1
    goals: Goals = field(default_factory=Goals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another program's load, from ``start_s`` on for ``for_s`` seconds (None: to the end).

    ``work`` has the parameters of its kind.
    """

    name: str
    kind: str
    start_s: float = 0.0
    for_s: float | None = None
    work: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A checked mix. ``models`` maps names to model ids or paths; ``server`` has options of
    ``localrt serve``, by name.
    """

    name: str
    seconds: float
    seed: int
    models: Mapping[str, str]
    apps: tuple[App, ...]
    neighbours: tuple[Neighbour, ...] = ()
    server: Mapping[str, Any] = field(default_factory=dict)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return p50, p95 and p99, interpolated; None without values."""
    found = np.percentile(values, (50, 95, 99)).tolist() if values else (None, None, None)
    return dict(zip(("p50", "p95", "p99"), found, strict=True))


# -- the file's keys -------------------------------------------------------------------------------

# Default values of each kind of application and neighbour.
_KINDS: Mapping[str, Mapping[str, int]] = {
    "chat": {"prompt_words": 60, "answer_tokens": 160, "turns": 3},
    "completion": {"prompt_words": 300, "answer_tokens": 32},
    "agent": {"prompt_words": 1200, "answer_tokens": 160, "turns": 4},
    "summary": {"prompt_words": 2000, "answer_tokens": 128},
    "embeddings": {"prompt_words": 120, "texts": 8},
    "batch": {"prompt_words": 150, "answer_tokens": 256},
}
_NEIGHBOURS: Mapping[str, Mapping[str, float]] = {
    "compiler": {"cores": 1, "busy_s": 4.0, "idle_s": 2.0},
    "video": {"frame_ms": 33.3, "work_mb": 4.0},
    "memory": {"bytes": 1 << 30},
    "disk": {"bytes": 256 << 20},
}
# The kind of value that each key takes, in words, or its choices.
_TEXT, _SIZE, _TABLE, _TABLES = "a text", 'a size such as "2GB"', "a table", "an array of tables"
_ABOVE, _LEAST, _COUNT = "a number above 0", "a number, 0 or more", "a whole number above 0"
_WHOLE = "a whole number"
_Keys = Mapping[str, str | Sequence[str]]
_MIX: _Keys = {"seconds": _ABOVE, "seed": _WHOLE, "models": _TABLE, "server": _TABLE}
_MIX = {**_MIX, "app": _TABLES, "neighbour": _TABLES}
_ARRIVALS: _Keys = {"every_s": _ABOVE, "poisson_s": _ABOVE, "closed": _COUNT}
_SIZES: _Keys = dict.fromkeys(("prompt_words", "answer_tokens", "turns", "texts"), _COUNT)
_APP: _Keys = {"name": _TEXT, "class": CLASSES, "kind": tuple(_KINDS), "model": _TEXT}
_APP_MORE: _Keys = {"start_s": _LEAST, "goals": _TABLE}
_GOALS: _Keys = dict.fromkeys(("ttft_s", "tpot_s", "deadline_s", "tokens_s"), _ABOVE)
_NEIGHBOUR: _Keys = {"name": _TEXT, "kind": tuple(_NEIGHBOURS)}
_WORK: _Keys = dict.fromkeys(("busy_s", "idle_s", "frame_ms", "work_mb"), _ABOVE)
_WORK = {**_WORK, "start_s": _LEAST, "for_s": _ABOVE, "cores": _COUNT, "bytes": _SIZE}
_SERVER: _Keys = dict.fromkeys(("ram", "gpu_memory", "device", "kv_format", "format"), _TEXT)
_SERVER = {**_SERVER, "draft": _TEXT, "ctx": _COUNT, "threads": _COUNT, "max_running": _COUNT}


def read_mix(
    name: str,
    *,
    models: Mapping[str, str] | None = None,
    every: str | None = None,
    seconds: float | None = None,
) -> Mix:
    """Read and check a shipped mix by its name, or a file.

    ``models`` replace the file's; ``every`` is the model for all names. With ``seconds``, the mix
    lasts that long, and all times in it are scaled in proportion.

    Raises:
        LocalrtError: there is no such mix, or it has an error.
        OptionError: ``models`` has a name that is not in the mix, or ``seconds`` is not positive.
    """
    file = Path(name)
    if name in SHIPPED:
        text = resources.files(__package__).joinpath(f"data/{name}.toml").read_text("utf-8")
    elif not file.is_file():
        raise LocalrtError(f"no mix {name!r:.80}: give a .toml file, or {', '.join(SHIPPED)}")
    else:
        text = read_text(file)
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LocalrtError(f"{name} is not TOML: {one_line(error)}") from error
    mix = _Reader(name).mix(found, models or {}, every)
    return mix if seconds is None else _scaled(mix, seconds)


def _scaled(mix: Mix, seconds: float) -> Mix:
    """Return the mix with another length, all times scaled in proportion."""
    if not 0 < seconds < float("inf"):
        raise OptionError(f"{option('seconds')} must be above 0, is {seconds:g}")
    factor = seconds / mix.seconds
    apps = tuple(replace(app, start_s=app.start_s * factor) for app in mix.apps)
    neighbours = tuple(
        replace(each, start_s=each.start_s * factor, for_s=each.for_s and each.for_s * factor)
        for each in mix.neighbours
    )
    return replace(mix, seconds=seconds, apps=apps, neighbours=neighbours)


class _Reader:
    """Reads the file ``name``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def mix(self, table: Any, models: Mapping[str, str], every: str | None) -> Mix:
        values = self._values(table, _MIX, "the file", required=("seconds", "app"))
        given = values.get("models", {})
        known = {**self._values(given, dict.fromkeys(given, _TEXT), "[models]"), **models}
        apps: dict[str, App] = {}
        for place, each in enumerate(values["app"], 1):
            app = self._app(each, where := f"[[app]] {place}")
            if every is not None:
                known[app.model] = models.get(app.model, every)
            if app.model not in known:
                why = f"{app.model!r:.60} is not in [models]: give --model {app.model}=PATH"
                self._refuse(where, "model", f"{why}, or one MODEL for all")
            if app.start_s >= values["seconds"]:
                self._refuse(where, "start_s", "is after the end of the mix")
            if apps.setdefault(app.name, app) is not app:
                self._refuse(where, "name", f"{app.name!r:.60} is used twice")
        used = {app.model for app in apps.values()}
        if unused := [name for name in models if name not in used]:
            raise OptionError(f"--model {unused[0]}=...: {self._name} has no such model")
        neighbours: dict[str, Neighbour] = {}
        for place, each in enumerate(values.get("neighbour", ()), 1):
            neighbour = self._neighbour(each, where := f"[[neighbour]] {place}")
            if neighbour.start_s >= values["seconds"]:
                self._refuse(where, "start_s", "is after the end of the mix")
            if neighbours.setdefault(neighbour.name, neighbour) is not neighbour:
                self._refuse(where, "name", f"{neighbour.name!r:.60} is used twice")
        return Mix(
            name=Path(self._name).stem,
            seconds=values["seconds"],
            seed=values.get("seed", 0),
            models={name: known[name] for name in sorted(used)},
            apps=tuple(apps.values()),
            neighbours=tuple(neighbours.values()),
            server=self._values(values.get("server", {}), _SERVER, "[server]"),
        )

    def _app(self, table: Any, where: str) -> App:
        values = self._values(table, {**_APP, **_APP_MORE, **_ARRIVALS, **_SIZES}, where, _APP)
        kind = values["kind"]
        arrivals = [key for key in _ARRIVALS if key in values]
        if len(arrivals) != 1:
            what = f"{' and '.join(arrivals)} contradict" if arrivals else "are missing"
            self._refuse(where, "arrivals", f"{what}: give one of {', '.join(_ARRIVALS)}")
        self._check_meaning(where, values, kind, _SIZES, _KINDS)
        goals = self._goals(values.pop("goals", {}), where, kind)
        values["class_"] = values.pop("class")
        return App(**{**_KINDS[kind], **values, "goals": goals})

    def _goals(self, table: Any, where: str, kind: str) -> Goals:
        values = self._values(table, _GOALS, f"{where} goals")
        self._check_meaning(f"{where} goals", values, kind, _GOALS, {"embeddings": ["deadline_s"]})
        if values.get("deadline_s", float("inf")) < values.get("ttft_s", 0):
            why = f"is {values['deadline_s']:g}, less than ttft_s, {values['ttft_s']:g}"
            self._refuse(f"{where} goals", "deadline_s", why)
        return Goals(**values)

    def _neighbour(self, table: Any, where: str) -> Neighbour:
        values = self._values(table, {**_NEIGHBOUR, **_WORK}, where, _NEIGHBOUR)
        common = {key: values.pop(key) for key in ("start_s", "for_s") if key in values}
        name, kind = values.pop("name"), values.pop("kind")
        self._check_meaning(where, values, kind, values, _NEIGHBOURS)
        return Neighbour(name=name, kind=kind, **common, work={**_NEIGHBOURS[kind], **values})

    def _check_meaning(
        self, where: str, values: Any, kind: str, keys: Any, kinds: Mapping[str, Any]
    ) -> None:
        """Refuse any of ``keys`` that does not apply to this kind."""
        for key in values:
            if key in keys and key not in kinds.get(kind, keys):
                self._refuse(where, key, f"has no meaning for {kind}")

    def _values(
        self, table: Mapping[str, object], keys: _Keys, where: str, required: Any = ()
    ) -> dict[str, Any]:
        """Return the checked values of a table, sizes as bytes."""
        for key in table:
            if key not in keys:
                hint = did_you_mean(key, keys) or f"known: {', '.join(keys)}"
                self._refuse(where, key, f"is unknown: {hint}")
        for key in required:
            if key not in table:
                self._refuse(where, key, "is missing")
        return {key: self._value(value, keys[key], where, key) for key, value in table.items()}

    def _value(self, value: Any, kind: str | Sequence[str], where: str, key: str) -> Any:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        whole = isinstance(value, int) and number
        if kind is _SIZE and (whole or isinstance(value, str)):
            try:
                return parse_size(value, key)
            except OptionError as error:
                raise LocalrtError(f"{self._name}: {where}: {error}") from error
        if not isinstance(kind, str):
            if value in kind:
                return value
            kind = f"one of {', '.join(kind)}"
        fits = {
            _TEXT: isinstance(value, str) and bool(value.strip()),
            _ABOVE: number and 0 < value < float("inf"),
            _LEAST: number and 0 <= value < float("inf"),
            _COUNT: whole and value >= 1,
            _WHOLE: whole,
            _TABLE: isinstance(value, dict),
            _TABLES: isinstance(value, list) and value and all(isinstance(e, dict) for e in value),
        }
        if not fits.get(kind):
            self._refuse(where, key, f"must be {kind}, is {value!r:.60}")
        return value

    def _refuse(self, where: str, key: str, why: str) -> NoReturn:
        raise LocalrtError(f"{self._name}: {where}: {key} {why}")
