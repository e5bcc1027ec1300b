"""A tiny model that says what a test wants it to say, and a server with conversations for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localrt
from localrt.history.database import insert
from tests.conftest import write_tiny_model
from tests.inside import engine_of
from tests.server.conftest import Running, serving

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
    with localrt.History(file) as history:
        kept = history.new(model="tiny")
        with history._database.transaction() as connection:
            last = 0
            for number, text in enumerate(texts):
                role = "assistant" if number % 2 else "user"
                turn = insert(
                    connection,
                    "turn",
                    conversation=kept.id,
                    parent=last or None,
                    role=role,
                    content=text,
                    state="done",
                    info="{}",
                    created=1e9,
                )
                connection.execute("UPDATE turn SET next = ? WHERE id = ?", (turn, last))
                last = turn
            kept._show(connection, last)
        return kept.id


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[localrt.Model]:
    folder = write_tiny_model(tmp_path_factory.mktemp("talker"), context=4096)
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
