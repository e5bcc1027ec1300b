"""Help texts and completion: examples that work, every option explained, with what it is when left
out.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import localrt
from localrt.cli import COMMANDS, build_parser, completion, main
from localrt.cli.help import HelpfulParser, ProgressLine, describe
from localrt.common.progress import Progress


def _commands() -> dict[str, HelpfulParser]:
    parser = build_parser(complete=True)
    found = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_come_first_and_are_commands_that_exist(name: str) -> None:
    command = _commands()[name]
    text = command.format_help()
    assert command.examples
    assert text.index("examples:") < text.index("positional" if "positional" in text else "options")
    for line, _ in command.examples:
        words = re.search(r"localrt .*?(?=\)$|$)", line)
        assert words is not None
        build_parser().parse_args(shlex.split(words[0])[1:])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained_with_its_default(name: str) -> None:
    command = _commands()[name]
    either = {a for g in command._mutually_exclusive_groups if g.required for a in g._group_actions}
    for action in command._actions:
        flag = action.option_strings[-1] if action.option_strings else ""
        assert action.help, f"{name} {flag} says nothing"
        takes_a_value = flag and action.nargs != 0 and not (action.required or action in either)
        if takes_a_value and "default" not in action.help:
            pytest.fail(f"{name} {flag} does not say what it is when left out")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["run", "m", "hi", "--ctx", "x"], "--ctx must be a whole number, is 'x'"),
        (["run", "m", "--kv-format", "q"], "--kv-format must be one of bf16, int8, int4, is 'q'"),
        (["run", "m", "--temprature=1"], "--temprature=1 (did you mean --temperature?)"),
        (["run", "m", "--n-ctx", "9"], "(did you mean --ctx?)"),
        (["run", "m", "-ngl", "9"], "(did you mean --gpu-memory?)"),
        (["lst"], "no command 'lst' (did you mean list?)"),
        (["model.gguf"], "no command 'model.gguf' (`localrt --help` lists them)"),
    ],
)
def test_bad_usage_is_said_in_plain_words(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(args)
    usage, said = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: localrt ")
    assert said.startswith("localrt: ")
    assert said.endswith(says)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("term", "stream", "lives"),
    [("xterm", _Terminal, True), ("dumb", _Terminal, False), ("xterm", io.StringIO, False)],
)
def test_progress_without_a_terminal_that_rewrites_lines(
    term: str, stream: type[io.StringIO], lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole lines now and then, and no control characters."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("localrt.cli.help._FIRST_SECONDS", 0.0)
    written = stream()
    with ProgressLine(written) as line:
        line(Progress("quantize", 3, 31, "steps", "layer 3: measuring inputs"))
    text = written.getvalue()
    assert ("\x1b" in text) == lives
    plain = "localrt: quantizing  9 %  3 of 31 steps  layer 3: measuring inputs\n"
    assert (text == plain) == (not lives)
    assert text.endswith("\x1b[K") == lives


def test_lines_of_a_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon after each stage begins, then every ten seconds and tenth of it."""
    seconds = iter((*range(0, 120, 2), *range(200, 220, 2)))
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    written = io.StringIO()
    line = ProgressLine(written)
    for step in range(60):
        line(Progress("quantize", step, 400, "steps"))
    for _ in range(10):
        line(Progress("write", 0, None, "tokens"))
    shown = [each.split("  ")[2:3] for each in written.getvalue().splitlines()]
    assert shown == [["1 of 400 steps"], ["42 of 400 steps"], [], []]


def test_the_rate_counts_this_run_only() -> None:
    step = Progress("download", 60_000_000, 98_000_000, "bytes", "sub/model.gguf")
    text = describe(step, first=40_000_000, elapsed_s=2.0)
    assert text == "downloading model.gguf  61 %  60 MB of 98 MB  10 MB/s  4 s left"
    assert describe(Progress("download", 5_000_000, None, "bytes", "w"), 0, 1.0).endswith("5 MB/s")


def test_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    listed = capsys.readouterr().out
    for name in ("server", "usage", "faq"):
        assert re.search(rf"^{name} +[A-Z]|^{name} +localrt", listed, re.MULTILINE), name
        assert main(["help", name]) == 0
        text = capsys.readouterr().out
        assert text.startswith("# ")
        assert "](" not in re.sub(r"\]\((http|\.\.|#|\w+\.svg|pictures)", "", text)
        assert "<!--" not in text
    with pytest.raises(SystemExit):
        main(["help", "run"])
    assert "--max-tokens" in capsys.readouterr().out
    assert main(["help", "nothing"]) == 2
    assert "`localrt help` lists them" in capsys.readouterr().err


def test_messages_name_no_files_of_the_documentation() -> None:
    """Who installed a wheel has none."""
    root = Path(localrt.__file__).parents[1]
    named = []
    for room in ("localrt", "models", "offload", "quant", "speculative", "tui"):
        for path in (root / room).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            docs = {
                ast.get_docstring(n, False) for n in ast.walk(tree) if isinstance(n, documented)
            }
            texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)} - docs
            named += [text for text in texts if isinstance(text, str) and "docs/" in text]
    assert named == []


def _script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert completion.run(argparse.Namespace(shell=shell)) == 0
    return capsys.readouterr().out


_NAMES = (  # of models, programs and formats
    ("run sm", "smollm2"),
    ("launch codex --model sm", "smollm2"),
    ("launch cl", "claude"),
    ("quantize --format int", "int4-g32"),
)


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They complete every command, and the shell itself accepts them."""
    script = _script(shell, capsys)
    assert all(command in script for command in COMMANDS)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n"], input=script, text=True, check=True, capture_output=True)


def test_bash_completes_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    script = _script("bash", capsys)

    def complete(*words: str) -> set[str]:
        function = script.rsplit("-F ", 1)[1].split()[0]
        line = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
        run = f'{script}\n{line}\n{function}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", run], capture_output=True, text=True)
        return {word.strip() for word in done.stdout.splitlines()}

    assert complete("localrt", "do") == {"doctor"}
    assert "--quick" in complete("localrt", "doctor", "--")
    for words, wanted in _NAMES:
        found = complete("localrt", *words.split())
        assert wanted in found
        assert all(each.startswith(words.split()[-1]) for each in found)
