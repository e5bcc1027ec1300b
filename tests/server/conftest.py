"""Running servers: of the tiny model, and of one that says what a test wants it to say."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localrt
from localrt.history.database import Database
from localrt.history.operations import Begin, TurnData
from localrt.quant.cpu.abi import find_library
from localrt.server.app import create_app
from localrt.server.guard import LogLine
from localrt.server.models import Models
from localrt.server.options import ServeOptions
from localrt.server.running import Server, open_socket
from localrt.server.service import Service
from localrt.service.live import LiveModel
from tests.api.test_prompts import TEMPLATE
from tests.conftest import write_tiny_model
from tests.inside import engine_of
from tests.waits import wait_for

# As the tiny model's own, and it knows tools: by their names, as its context is short.
WITH_TOOLS = (
    "{% for t in tools or [] %}<|im_start|>tool {{ t.function.name }}<|im_end|>\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
    "<tool_call>{{ {'name': f.name, 'arguments': f.arguments} | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

WIDE = 128  # a width that is written without torch, whose import takes longer than most tests
NO_SETTINGS = Path(os.environ["XDG_DATA_HOME"])  # a folder of the tests, without such a file

needs_kernels = pytest.mark.skipif(find_library() is None, reason="the kernels are not compiled")


class Running:
    """A server in a thread of this process."""

    def __init__(self, model: localrt.Model, server: Server, port: int, service: Service) -> None:
        self.model = model
        self.server = server
        self.port = port
        self.service = service
        self.log: list[LogLine] = []
        self.notes: list[str] = []

    @property
    def live(self) -> LiveModel:
        """The running batch of the one model."""
        (served,) = self.service.models.at_work()
        return served.live

    @property
    def name(self) -> str:
        """The name that clients know the one model by."""
        return self.service.models.find(None).name

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON (or text), headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            text = answer.read().decode()
            found = {name.lower(): value for name, value in answer.getheaders()}
            is_json = found.get("content-type") == "application/json"
            return answer.status, json.loads(text) if is_json else text, found
        finally:
            connection.close()

    def chat(self, text: str = "hi", **fields: Any) -> tuple[int, Any, dict[str, str]]:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return self.request("POST", "/v1/chat/completions", body)

    def idle(self) -> bool:
        """Whether nothing runs, waits or is inside."""
        stats = self.live.stats()
        return stats.running == stats.waiting == stats.paused == self.service.open_answers == 0


def connected(port: int, sent: bytes = b"") -> socket.socket:
    """A connection on which this has been sent."""
    raw = socket.create_connection(("127.0.0.1", port), timeout=120)
    raw.sendall(sent)
    return raw


def status_of(port: int, path: str) -> int:
    """The status of a new request."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as asking:
        asking.request("GET", path)
        return asking.getresponse().status


@contextmanager
def command(
    folder: Path, *args: str, before: str = "", log: Sequence[str] = ("--json",), **environment: str
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """``localrt serve`` in a process, which runs the code ``before`` it, and its port."""
    code = f"{before}\nfrom localrt.cli import main\nraise SystemExit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", str(folder), "--port", "0", *log, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LOCALRT_OFFLINE": "1", **environment},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, int(json.loads(line)["url"].split(":")[2].split("/")[0])
    finally:
        process.kill()
        process.communicate()


class Below:
    """An application as a reverse proxy shows it, below a path, at its own address."""

    def __init__(self, app: Any, path: str) -> None:
        self._app, self._path, self.state = app, path, app.state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            assert scope["path"].startswith(self._path), "this is not asked of the server"
            path = scope["path"].removeprefix(self._path)
            kept = [each for each in scope["headers"] if each[0] != b"host"]
            headers = [*kept, (b"host", b"127.0.0.1:8080")]
            scope = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
        await self._app(scope, receive, send)


@contextmanager
def serving(
    model: localrt.Model | Models,
    *,
    below: str = "",
    history: Path | str | None = None,
    config_dir: Path = NO_SETTINGS,
    **options: Any,
) -> Iterator[Running]:
    """A server for ``model`` as long as the block runs, with the conversations of ``history`` and
    the tools of ``config_dir``.
    """
    checked = ServeOptions(port=0, **{"drain_s": 1.0, **options})
    bound = open_socket(checked)
    lines: list[LogLine] = []
    notes: list[str] = []
    app = create_app(
        model,
        checked,
        log=lines.append,
        note=notes.append,
        open_history=lambda: localrt.History(history),
        config_dir=config_dir,
    )
    server = Server(Below(app, below) if below else app, checked)  # type: ignore[arg-type]
    running = Running(model, server, bound.getsockname()[1], app.state.service)
    running.log, running.notes = lines, notes
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield running
    finally:
        server.should_exit = True
        thread.join(120)
        bound.close()
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, which is written without torch."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), wide=WIDE)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[localrt.Model]:
    """The tiny model on the CPU kernels, whose rows do not depend on each other."""
    folder = write_tiny_model(tmp_path_factory.mktemp("served"), template=WITH_TOOLS, wide=WIDE)
    with localrt.load(folder, draft="off") as loaded:
        loaded.defaults["max_tokens"] = 16  # of requests that say nothing
        yield loaded


@pytest.fixture(scope="session")
def server(model: localrt.Model) -> Iterator[Running]:
    with serving(model, name="tiny") as running:
        yield running


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server for a model that thinks, and never ends it by itself."""
    folder = write_tiny_model(tmp_path_factory.mktemp("thinker"), template=TEMPLATE, wide=WIDE)
    with localrt.load(folder) as model:
        model.defaults.update(temperature=0.0, max_tokens=40, ignore_eos=True)
        with serving(model, name="thinker") as running:
            yield running


@pytest.fixture
def slow(model: localrt.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes take 20 ms: time enough to go away in the middle."""
    engine: Any = engine_of(model)
    extend = engine.extend_batch

    def slowly(*parts: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return extend(*parts, **options)

    monkeypatch.setattr(engine, "extend_batch", slowly, raising=False)


# -- a model that says what a test wants -----------------------------------------------------------

END = 2  # the token that ends an answer


class Script:
    """What every answer is, and a gate before each of its tokens: ``hold`` closes it."""

    def __init__(self, model: localrt.Model) -> None:
        self._model = model
        self._tokens: list[int] = []
        self._at: dict[int, tuple[int, int]] = {}  # by session: the next place, the last token
        self._open = threading.Event()
        self._left = 0
        self.say("Hello there.")
        self.release()

    def say(self, text: str | bytes, *, ends: bool = True) -> None:
        """Set the text, or bytes that may be no text; without ``ends`` it is said again."""
        data = text.encode() if isinstance(text, str) else text
        spelled = {self._model.tokenizer.token_bytes(token): token for token in range(3, 259)}
        self._tokens = [spelled[bytes([byte])] for byte in data] + ([END] if ends else [])

    def hold(self, after: int) -> None:
        """Stop before the token with this number, until ``release``."""
        self._left = after
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def next_tokens(self, parts: Sequence[Any], wanted: Sequence[int]) -> list[int]:
        found = []
        for number in wanted:
            session, tokens = parts[number]
            place, last = self._at.get(id(session), (0, -1))
            if list(tokens) != [last]:
                place = 0  # it is a prompt
            if place >= self._left and not self._open.is_set():
                self._open.wait(60)
            token = self._tokens[place % len(self._tokens)]
            self._at[id(session)] = place + 1, token
            found.append(token)
        return found


@contextmanager
def scripted(model: localrt.Model) -> Iterator[Script]:
    """The script of ``model`` as long as the block runs."""
    script, engine = Script(model), engine_of(model)
    extend = engine.extend_batch

    def said(parts: Sequence[Any], *, wanted: Sequence[int], **options: Any) -> Any:
        logits = extend(parts, wanted=wanted, **options)
        for row, token in zip(logits, script.next_tokens(parts, wanted), strict=True):
            row[:] = -1e4
            row[token] = 1e4
        return np.asarray(logits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "extend_batch", said, raising=False)
        yield script


def write_long(file: Path, texts: Sequence[str]) -> str:
    """Save a conversation of ``texts``, questions and answers by turns, at once; its id."""
    turns = [
        TurnData(role="assistant" if number % 2 else "user", content=text, created=1e9)
        for number, text in enumerate(texts)
    ]
    begun = Begin(conversation="long", model="tiny", system=None, options={}, turns=turns)
    with closing(Database(file)) as database, database.transaction() as connection:
        begun.apply(connection)
    return begun.conversation


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[localrt.Model]:
    folder = write_tiny_model(tmp_path_factory.mktemp("talker"), context=4096, wide=WIDE)
    with localrt.load(folder, draft="off") as model:
        yield model


@pytest.fixture
def script(talker: localrt.Model) -> Iterator[Script]:
    with scripted(talker) as script:
        yield script
        script.release()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "history.db"


@pytest.fixture
def talking(talker: localrt.Model, script: Script, file: Path) -> Iterator[Running]:
    with serving(talker, name="tiny", history=file) as running:
        yield running
        script.release()
