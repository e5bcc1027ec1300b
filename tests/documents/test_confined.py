"""Documents are read by a process that can do nothing else, and whose failures are one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localrt import OptionError, StorageError, read_document
from localrt.documents import confined
from tests.documents.samples import RED, SEEDS, pdf

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that read documents."""
    processes: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        process = popen(command, **options)
        if confined.__name__ in command:
            processes.append(process)
        return process

    monkeypatch.setattr(confined, "has_helpers", lambda: True)
    monkeypatch.setattr(subprocess, "Popen", start)
    return processes


def runs_in_it(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process run ``code`` to read a document: it has ``data``, and prints a page."""
    before = f"""
import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv[0:2] = []
from localrt.documents import confined
from localrt.documents.kinds import Page
def read(data, name, pictures):
    def text():
        {code}
    yield Page(str(text()))
confined.reader_of = lambda kind: read
confined.main()
"""
    own = confined.helper_command
    monkeypatch.setattr(
        confined,
        "helper_command",
        lambda *given: [sys.executable, "-c", before, *own(*given)[-len(given) - 1 :]],
    )


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == ".pdf" else pytest.mark.slow) for kind in SEEDS]
)
def test_same_text(
    kind: str, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind can be read there: its libraries are loaded before files cannot be opened."""
    data = SEEDS[kind]
    data = data if isinstance(data, bytes) else data.encode()
    read = read_document(data, name=f"a{kind}", pictures=True)
    assert len(started) == (kind != ".txt")  # UTF-16, which no library reads
    monkeypatch.setattr(confined, "has_helpers", lambda: False)
    assert read == read_document(data, name=f"a{kind}", pictures=True)


@pytest.mark.skipif(sys.platform != "linux", reason="the bans are Linux'")
@pytest.mark.parametrize("code", ["open('/etc/passwd').read()", "__import__('socket').socket()"])
def test_what_it_cannot_do(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_in_it(f"return {code}", monkeypatch)
    with pytest.raises((OptionError, StorageError)):
        read_document(b"<p>", name="a.html")


@pytest.mark.skipif(sys.platform == "win32", reason="there it is limited from outside")
@pytest.mark.parametrize(
    "code",
    [
        "__import__('signal').setitimer(2, 0.1)\n        while True: pass",  # its own limit, sooner
        "return len(bytearray(1 << 30))",
        "print('noise')\n        __import__('ctypes').string_at(0)",
    ],
)
def test_failures_are_one_line(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_in_it(code, monkeypatch)
    with pytest.raises(OptionError, match=r"a\.html cannot be read: .*500 MB and 10 s") as raised:
        read_document(b"<p>", name="a.html")
    assert "\n" not in str(raised.value)


def test_a_failure_does_not_keep_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
) -> None:
    runs_in_it("return data.decode() if b'good' in data else __import__('os').abort()", monkeypatch)
    for name, text in (("a", "good one"), ("b", "bad"), ("c", "good two")):
        (tmp_path / f"{name}.html").write_text(text)
    read = read_document(tmp_path)
    assert "good one" in read.text
    assert "good two" in read.text
    assert read.note.endswith("1 of 3 files cannot be read as text: left out.")
    assert len(started) == 2


def test_nothing_is_left_of_a_reading_that_is_cancelled(
    started: list[subprocess.Popen[bytes]],
) -> None:
    def stop(progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_document(pdf("one", RED), name="a.pdf", progress=stop)
    assert [process.returncode is not None for process in started] == [True]


@pytest.mark.parametrize(
    "line",
    [
        *("x", "[]", '{"text": "a", "bogus": 1}'),
        '{"text": "a", "number": "b", "picture": "", "encoding": "", "of": 0}',
    ],
)
def test_answers_that_are_not_ours(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a document has taken over may write anything."""
    code = "import sys; print(sys.argv[1], flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, line]
    monkeypatch.setattr(confined, "helper_command", lambda *given: command)
    with pytest.raises(OptionError, match=r"a\.html cannot be read: it is damaged"):
        read_document(b"<p>", name="a.html")
