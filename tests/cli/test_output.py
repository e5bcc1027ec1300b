"""What commands print of a model, a file or a server that means harm: all of it, and nothing that a
terminal obeys or that looks like a line of localrt's own.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from localrt.cli import COMMANDS, main
from localrt.cli.help import ProgressLine, StatusLine
from localrt.cli.output import say_answer, say_json
from localrt.client.answer import ListedModel
from localrt.client.servers import LocalServer
from localrt.common.formatting import UNSEEN
from localrt.common.progress import NOTE, Progress
from localrt.drafts.discovery import DraftOffer
from localrt.hub.searching import Variant
from localrt.server.guard import LogLine
from localrt.server.models import Models
from tests.cli.test_cli import home, localrt
from tests.conftest import CHATML, SPECIALS, write_tiny_model
from tests.fake_endpoint import Asked, fake, listed, whole
from tests.models import make_gguf

__all__ = ["home"]

FORGED = "localrt: OK"
# Sets the clipboard, forges a line, and has each kind of what a terminal obeys or does not show.
HARM = f"\x1b]52;;aA\x07\n{FORGED}\r\x85\u2028\x0b\x9bm\u202e\u2066\u200b\x7f\t"

# What is done with each command. FILE and the others are models, HARM is the text above.
ROWS = {
    "chat": """
        chat FILE -p hi FEW
        chat FOLDER -p hi FEW
        chat TEMPLATE -p hi
        chat MISSING -p hi
        chat --endpoint URL -p hi
        chat HARM""",
    "run": """
        run FILE hi FEW --stats
        run FILE hi FEW --json
        run FILE hi FEW --file FOLDER
        run FILE hi --file MISSING
        run FILE hi --image MISSING
        run FILE hi --adapter MISSING
        run FILE --batch FOLDER
        run FILE --batch TEXT FEW --json
        run FILE hi --temperature HARM
        run FILE hi --chat-template HARM
        run FOLDER hi FEW --stats
        run UNKNOWN hi
        run PRE hi
        run MISSING hi
        run HARM
        run --endpoint URL hi
        run HARM --endpoint URL hi
        run m --endpoint URL hi
        run m --endpoint HARM hi""",
    "embed": """
        embed FILE text
        embed MISSING text""",
    "serve": """
        serve FILE --port 0
        serve FILE --port 0 --json
        serve --port 0
        serve MISSING --port 0
        serve FILE --port 0 --ready-file HARM/HARM""",
    "launch": """
        launch aider --print --model FILE
        launch aider --print
        launch HARM
        launch""",
    "ps": """
        ps
        ps --json""",
    "pull": """
        pull FILE
        pull FILE --json
        pull UNKNOWN
        pull MISSING
        pull HARM""",
    "list": """
        list
        list --json
        list HARM
        list --forget HARM
        list --forget FILE""",
    "show": """
        show FILE
        show FILE --json
        show FOLDER
        show TEMPLATE
        show PRE
        show UNKNOWN
        show MISSING
        show HARM
        show org/name
        show org/name --json""",
    "alias": """
        alias x FILE
        alias x
        alias
        alias --json
        alias HARM FILE
        alias y HARM
        alias HARM --remove""",
    "rm": """
        rm FILE --yes
        rm HARM --yes
        quantize FOLDER --format int4-g32 --method rtn
        rm STORE
        rm STORE --yes""",
    "quantize": """
        quantize FOLDER --format int4-g32 --method rtn
        quantize UNKNOWN --format int4-g32
        quantize FILE --format HARM""",
    "plan": """
        plan FILE
        plan FILE --json
        plan FOLDER --details
        plan FILE --draft FOLDER
        plan UNKNOWN
        plan MISSING
        plan HARM
        plan FILE --pc HARM""",
    "bench": """
        bench UNKNOWN --engines native
        bench MISSING
        bench --mix HARM
        bench FILE --sweep HARM=1
        bench FILE --engines HARM
        bench FILE --peer HARM=HARM""",
    "eval": """
        eval FILE --text TEXT
        eval FILE --text TEXT --against FOLDER
        eval FILE --text MISSING
        eval FILE --text TEXT --ctx HARM""",
    "doctor": """
        doctor --quick
        doctor --quick --report REPORT""",
    "help": """
        help
        help usage
        help HARM""",
    "completion": """
        completion bash
        completion zsh
        completion fish
        completion HARM""",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose names and texts mean harm."""
    made = tmp_path_factory.mktemp("m")
    (made / "tiny").mkdir()
    folder = write_tiny_model(made / "tiny")
    parts = ("name", "license", "author", "description", "basename", "size_label", "type")
    texts: dict[str, Any] = {f"general.{part}": f"{part}{HARM}" for part in parts}
    texts |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["ab", *SPECIALS[1:], *sorted(ByteLevel.alphabet())],
        "tokenizer.ggml.token_type": [1, 3, 3] + [1] * 256,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }
    write = make_gguf.write_gguf

    def gguf(name: str, changed: Mapping[str, str], kind: str | None = None) -> Path:
        def changed_too(path: Path, arch: str, own: Any, tensors: Any) -> list[Path]:
            return write(path, kind or arch, {**own, **texts, **changed}, tensors)

        with mock.patch.object(make_gguf, "write_gguf", changed_too):
            return make_gguf.write_tiny_gguf(folder, made / f"{name}{HARM}.gguf", "llama")

    refusing = {"tokenizer.chat_template": f"{{{{ raise_exception({json.dumps(HARM)}) }}}}"}
    return {
        "FILE": gguf("a", {}),
        "FOLDER": shutil.copytree(folder, made / f"b{HARM}"),
        "UNKNOWN": gguf("c", {}, f"no{HARM}"),
        "PRE": gguf("d", {"tokenizer.ggml.pre": f"no{HARM}"}),
        "TEMPLATE": gguf("e", refusing),
        "MISSING": made / f"f{HARM}.gguf",
    }


@contextmanager
def others() -> Iterator[str]:
    """Servers, clients and a hub that mean harm; yields a server's address."""

    def serve(served: Models, _: object, *, log: Any, note: Any, on_ready: Any, **__: Any) -> None:
        served.open()
        on_ready("http://127.0.0.1:1")
        served.close()
        log(LogLine("127.0.0.1", "GET", f"/{HARM}", 200, 0.1))
        note(f"a client said {HARM}")

    def answer(request: Asked, _: object) -> bytes:
        names = ("m", f"n{HARM}")
        return listed(*names) if request.path.endswith("/models") else whole(400, {"error": HARM})

    instead: dict[str, Any] = {
        "server.running.serve": serve,
        "cli.ps.local_servers": lambda _: [LocalServer("http://127.0.0.1:1/v1", 1)],
        "client.model.models_of": lambda _: [ListedModel(f"n{HARM}", 9, f"loaded{HARM}")],
        "cli.show.list_variants": lambda _: [
            Variant(f"org/name:{HARM}", f"Q4{HARM}", 5, why=HARM),
            Variant(f"org/head:{HARM}", HARM, 5, drafts=True),
        ],
        "cli.show.head_to_pull": lambda name: DraftOffer(name, HARM, here=False),
    }
    with ExitStack() as stack, fake(answer) as endpoint:
        for place, value in instead.items():
            stack.enter_context(mock.patch(f"localrt.{place}", value))
        yield endpoint.url


def test_every_command_has_rows() -> None:
    assert ROWS.keys() == COMMANDS.keys()


@pytest.mark.skipif(sys.platform == "win32", reason="names of files have no such characters there")
@pytest.mark.usefixtures("quiet_machine")
@pytest.mark.parametrize(
    "command",
    [pytest.param(each, marks=pytest.mark.slow if each == "bench" else ()) for each in ROWS],
)
def test_what_commands_print(
    command: str, models: dict[str, Path], home: dict[str, str], tmp_path: Path
) -> None:
    data = tmp_path / f"d{HARM}" / "localrt"
    env = {**home, "XDG_DATA_HOME": str(data.parent), "LOCALRT_OFFLINE": "0"}
    (data / "used").mkdir(parents=True)
    for model in models.values():
        if model.exists():
            (data / "used" / quote(str(model), safe="")).touch()
    (tmp_path / "text.txt").write_text("Some words. " * 50)
    words = {name: str(path) for name, path in models.items()}
    words |= {"TEXT": str(tmp_path / "text.txt"), "REPORT": str(tmp_path / f"report{HARM}")}
    words |= {"FEW": "--max-tokens=2"}
    words["STORE"] = str(data / "stores" / f"b{HARM.replace(':', '-')}-int4-g32")
    with others() as words["URL"]:
        for line in [*ROWS[command].strip().split("\n"), f"{command} --HARM"]:
            arguments = [words.get(word, word.replace("HARM", HARM)) for word in line.split()]
            done = localrt(*arguments, env=env)
            assert done.returncode in (0, 1, 2)
            told = done.stderr.decode()
            if command not in ("run", "chat") or "--json" in line:  # what is left are answers
                told += done.stdout.decode()
            assert not UNSEEN.findall(told.replace("\n", "")), f"{line}\n{told}"
            assert not re.search(f"^{FORGED}|^Traceback", told, re.MULTILINE), f"{line}\n{told}"
            if "--json" in line and done.returncode == 0:
                assert [json.loads(each) for each in done.stdout.splitlines()]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_progress(stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, pages and servers have names too."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("localrt.cli.help._FIRST_SECONDS", 0.0)
    out = stream()
    with ProgressLine(out) as line:
        for unit in ("bytes", "pages"):
            line(Progress("read", 1, 2, unit, f"name{HARM}"))
        line(Progress(f"stage{HARM}", 1, None, "files", HARM))
        line(Progress(NOTE, 0, None, "", HARM))
    with StatusLine(out) as status:
        status.show(HARM)
    told = out.getvalue()
    assert r"\x1b]52;;aA" in told
    assert FORGED not in told.splitlines()
    assert not UNSEEN.findall(told.replace("\r\x1b[K", "").replace("\n", ""))


def test_answers_are_as_the_model_wrote_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """But on a terminal, which would obey them."""
    for stream, shown in ((io.StringIO, HARM), (Terminal, r"\x1b]52;;aA\x07" + "\nlocalrt: OK")):
        monkeypatch.setattr(sys, "stdout", stream())
        say_answer(HARM)
        assert sys.stdout.getvalue().startswith(shown)  # type: ignore[attr-defined]


def test_json_is_the_same_value(capsys: pytest.CaptureFixture[str]) -> None:
    for readable in (False, True):
        say_json({"text": f"é{HARM}\ud800"}, readable=readable)
        line = capsys.readouterr().out
        assert json.loads(line) == {"text": f"é{HARM}\ud800"}
        assert ("é" in line) == readable
        assert not UNSEEN.findall(line.removesuffix("\n"))


@pytest.mark.skipif(sys.platform == "win32", reason="names of files have no such characters there")
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completed_names_are_no_commands(shell: str, home: dict[str, str], tmp_path: Path) -> None:
    """A shell runs the script, and zsh and fish what is between its quotation marks."""
    used = tmp_path / "data" / "localrt" / "used"
    used.mkdir(parents=True)
    for name in ("$(harm)", "`harm`", '"; harm; "', "' harm '", "good:1.5_b-x"):
        made = write_tiny_model(tmp_path / name) if (tmp_path / name).mkdir() is None else None
        (used / quote(str(made), safe="")).touch()
    script = localrt("completion", shell, env=home).stdout.decode()
    assert "harm" not in script
    assert "good:1.5_b-x" in script


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "localrt: there is not enough memory: end other programs"),
        (OSError(5, "a\nb", f"c{HARM}"), r"localrt: c\x1b]52;;aA\x07\nlocalrt: OK\r"),
        (RuntimeError(f"a bug: {HARM}"), r"RuntimeError: a bug: \x1b]52;;aA\x07"),
    ],
)
def test_errors_of_others(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("localrt.cli.list.run", fail)
    assert main(["list"]) == 1
    printed = capsys.readouterr().err
    assert told in printed
    assert not UNSEEN.findall(printed.replace("\n", ""))
    assert FORGED not in printed.split("\n")


@pytest.mark.parametrize("command", [["list"], ["list", "--json"], ["--help"], ["--version"]])
def test_closed_stdout(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was asked for cannot be told, so it is no success."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(command) == 1
    assert capsys.readouterr().err == "localrt: stdout is closed: nothing can be printed\n"
