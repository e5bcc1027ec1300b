"""The command line as a user meets it: output, exit status, one-line errors, pipes and signals;
files of prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import pytest

from localrt import system
from localrt.cli import main, run
from localrt.cli.chat import last_model
from localrt.cli.run_batch import parse_prompts
from localrt.common.errors import OptionError
from localrt.engine.types import Chunk, Metrics
from tests.conftest import needs_signals, write_tiny_model
from tests.documents.samples import pdf
from tests.real_models import real_model

__all__ = ["home"]

LOCALRT = [sys.executable, "-m", "localrt"]


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment whose folders are all empty and offline."""
    env = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data")}
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "HF_TOKEN", "LOCALRT_CACHE"):
        env.pop(name, None)
    return {**env, "LOCALRT_OFFLINE": "1", "COLUMNS": "80"}


def localrt(*args: str | Path, env: dict[str, str], stdin: bytes | BinaryIO = b"") -> Any:
    """A command in this process, which saves the seconds that a new one needs for its imports."""
    source = io.TextIOWrapper(io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin, "utf-8")
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="\n") for _ in range(2))
    with (
        mock.patch.dict(os.environ, env, clear=True),
        mock.patch.multiple(sys, stdin=source, stdout=out, stderr=err),
    ):
        try:
            status: Any = main([str(arg) for arg in args])
        except SystemExit as exit_:  # argparse's
            status = exit_.code
        out.flush()
        err.flush()
    source.detach()  # whoever opened it closes it
    written = [stream.buffer.getvalue() for stream in (out, err)]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(args, status, *written)


@pytest.mark.slow
def test_the_command_as_a_process(tiny_folder: Path, home: dict[str, str]) -> None:
    def command(*args: str | Path, stdin: bytes = b"") -> Any:
        command = [*LOCALRT, *map(str, args)]
        return subprocess.run(command, input=stdin, capture_output=True, env=home, timeout=600)

    result = command("run", tiny_folder, "Read this:", *FAST, stdin=b"text\n")
    again = localrt("run", tiny_folder, "Read this:", *FAST, env=home, stdin=b"text\n")
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.splitlines() == again.stdout.splitlines()
    assert_one_line(command("run", "none.gguf", "hi"), 1, "none.gguf")


def assert_one_line(result: Any, status: int, *words: str) -> None:
    error = result.stderr.decode()
    assert result.returncode == status, error
    assert "Traceback" not in error
    assert error.startswith("localrt: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error


FAST = ("--max-tokens", "5", "--temperature", "0")
FAST += ("--format", "f32") if find_spec("torch") else ()


def test_run_streams_to_a_pipe_and_joins_prompt_and_stdin(
    tiny_folder: Path, home: dict[str, str]
) -> None:
    result = localrt("run", tiny_folder, "Read this:", *FAST, "--json", env=home, stdin=b"text\n")
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    both = localrt("run", tiny_folder, "Read this:\n\ntext", *FAST, "--json", env=home)
    assert json.loads(both.stdout)["text"] == record["text"]
    assert record["finish_reason"] in ("length", "stop")
    assert record["metrics"]["prompt_tokens"] > 5
    plain = localrt("run", tiny_folder, *FAST, "--stats", env=home, stdin=b"Read this:\n\ntext")
    assert plain.stdout.decode() == record["text"] + "\n"
    assert "tok/s" in plain.stderr.decode()


def test_run_continues_the_last_conversation(tiny_folder: Path, home: dict[str, str]) -> None:
    nothing = localrt("run", tiny_folder, "-c", "more", *FAST, env=home)
    assert_one_line(nothing, 2, "no earlier run")
    other_encoding = "hello \udcff"
    first = localrt("run", tiny_folder, other_encoding, *FAST, "--json", env=home)
    second = localrt("run", tiny_folder, "-c", "more", *FAST, "--json", env=home)
    one, two = (json.loads(r.stdout)["metrics"]["prompt_tokens"] for r in (first, second))
    assert two > one + 10
    third = localrt("run", "-c", "and one more", *FAST, "--json", env=home)
    assert third.returncode == 0, third.stderr
    assert json.loads(third.stdout)["model"] == json.loads(second.stdout)["model"]
    assert json.loads(third.stdout)["metrics"]["prompt_tokens"] > two + 10


def test_a_conversation_that_goes_on_is_not_computed_again(
    tiny_folder: Path, home: dict[str, str]
) -> None:
    env = {name: value for name, value in home.items() if name != "LOCALRT_KV_DISK"}
    cached = []
    for more in ([], ["-c"], ["-c"]):
        prompt = "a long question, said at length. " * 4
        result = localrt("run", tiny_folder, *more, prompt, *FAST, "--json", env=env)
        cached.append(json.loads(result.stdout)["metrics"]["cached_tokens"])
    assert cached[:2] == [0, 0]
    assert cached[2] > 200


def test_chat_continues_with_the_model_of_the_conversation(
    tiny_folder: Path, home: dict[str, str], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_folder, tmp_path / "own"))
    with mock.patch.dict(os.environ, home):
        assert last_model() is None
    begun = localrt("chat", model, "--plain", *FAST, env=home, stdin=b"Hi\n")
    assert begun.returncode == 0, begun.stderr
    later = localrt("chat", "-c", "--plain", *FAST, env=home, stdin=b"And more\n/show\n")
    assert later.returncode == 0, later.stderr
    assert "Loading own" in later.stdout.decode()
    assert "You: And more" in later.stdout.decode()
    shutil.rmtree(model)
    with mock.patch.dict(os.environ, home):
        assert last_model() is None


def test_chat_without_a_terminal_answers_plainly(tiny_folder: Path, home: dict[str, str]) -> None:
    piped = localrt("chat", tiny_folder, *FAST, env=home, stdin=b"hello")
    asked = localrt("chat", tiny_folder, "--prompt", "hello", *FAST, env=home)
    assert piped.returncode == asked.returncode == 0
    assert piped.stdout == asked.stdout != b""


def test_a_model_without_a_tokenizer_says_so_once(tmp_path: Path, home: dict[str, str]) -> None:
    folder = write_tiny_model(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (tmp_path / "prompts.txt").write_text("hi\n")
    for args in (["hi"], ["hi", "--raw"], ["--batch", str(tmp_path / "prompts.txt")]):
        assert_one_line(localrt("run", folder, *args, env=home), 1, "has no tokenizer")


def test_documents(tiny_folder: Path, tmp_path: Path, home: dict[str, str]) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf("One", ""))
    words = ("run", tiny_folder, "hi", "--max-tokens", 2, "--file", tmp_path / "a.pdf")
    result = localrt(*words, env=home)
    assert result.returncode == 0, result.stderr
    assert (
        b"localrt: a.pdf: 1 of 2 pages have little or no text, and are not shown." in result.stderr
    )
    words = ("chat", tiny_folder, "-p", "hi", "--file", tmp_path / "b.pdf")
    (tmp_path / "b.pdf").write_bytes(b"%PDF-")
    assert_one_line(localrt(*words, env=home), 2, "b.pdf is not a PDF file")
    words = ("chat", tiny_folder, "--plain", "--embedding-model", tiny_folder)
    assert_one_line(localrt(*words, env=home), 2, "is no embedding model")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such devices")
def test_endless_stdin(tiny_folder: Path, home: dict[str, str]) -> None:
    for arguments in (["hi"], ["hi", "--image", "-"]):
        with Path("/dev/zero").open("rb") as zeros:
            result = localrt("run", tiny_folder, *arguments, env=home, stdin=zeros)
            assert_one_line(result, 2, "stdin is too large: the most is")


def test_a_broken_tiny_model_says_what_is_broken(tmp_path: Path, home: dict[str, str]) -> None:
    folder = write_tiny_model(tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert_one_line(localrt("run", folder, "hi", env=home), 1, "model.safetensors")
    weights.write_bytes(whole)
    tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer[:100])
    result = localrt("run", folder, "hi", env=home)
    assert result.returncode == 1
    assert b"tokenizer" in result.stderr
    assert b"Traceback" not in result.stderr
    (folder / "tokenizer.json").write_text(tokenizer, "utf-8")
    long = localrt("run", folder, env=home, stdin=b"x" * 2000)
    assert_one_line(long, 1, "512")
    huge = localrt("run", folder, "hi", "--ctx", "1000000000000", env=home)
    assert huge.returncode == 1
    assert b"RAM" in huge.stderr
    beyond = localrt("run", folder, "hi", "--ctx", "1000", *FAST, env=home)
    assert beyond.returncode == 0
    assert b"512" in beyond.stderr


def test_an_unwritable_data_folder_costs_only_continue(
    tiny_folder: Path, home: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "data").write_text("in the way")
    result = localrt("run", tiny_folder, "hi", *FAST, env=home)
    assert result.returncode == 0
    assert result.stdout
    assert b"this answer cannot be continued later (-c): " in result.stderr


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly(tiny_folder: Path, home: dict[str, str]) -> None:
    command = [*LOCALRT, "run", str(tiny_folder), "hi", "--temperature", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=home
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) in (0, 141)
    assert error == b""


@pytest.mark.slow
@pytest.mark.real
@needs_signals
def test_an_interrupt_keeps_the_text_and_exits_130(home: dict[str, str]) -> None:
    path = real_model("smollm2")
    command = [*LOCALRT, "run", str(path), "Count to one thousand.", "--temperature", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=home
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first + rest).endswith(b"\n")
    assert b"Traceback" not in error
    saved = json.loads(
        Path(home["XDG_DATA_HOME"], "localrt/last-run.json").read_text(encoding="utf-8")
    )
    assert saved["messages"][-1]["content"].encode() in first + rest


@pytest.mark.slow
def test_commands_import_nothing_heavy(tiny_folder: Path, home: dict[str, str]) -> None:
    """Neither a program nor a command waits for what another needs."""
    heavy = {"torch", "numpy", "transformers", "llama_cpp", "huggingface_hub", "textual", "httpx2"}
    heavy |= {"tokenizers", "requests", "httpx", "tqdm"}
    code = f"""
        import contextlib, sys
        import localrt, localrt.common.settings
        from localrt.cli import list, main, pull, rm

        def check(*used):
            assert not {heavy} - {{*used}} & {{*sys.modules}}, {heavy} & {{*sys.modules}}

        check()
        for command in (["--help"], ["list"], ["doctor", "--quick"]):
            with contextlib.suppress(SystemExit):
                main(command)
            check()
        main(["run", {str(tiny_folder)!r}, "hi"])
        check("numpy", "tokenizers")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("", 2, "localrt --help"),
        ("run MODEL hi --top-p 1.5", 2, "--top-p"),
        ("run MODEL hi --ram lots", 2, "--ram must be a size, is 'lots'"),
        ("run MODEL", 2, "prompt is empty"),
        ("run 'What is a quine?'", 1, "was taken for a model's name"),
        ("chat Why?", 1, 'localrt chat smollm2 -p "Why?"'),
        ("run MODEL hi --chat-template binary", 1, "is not UTF-8 text: byte 0xff at 1"),
        ("run MODEL --batch /dev/zero", 2, "is not a regular file"),
        ("run MODEL prompt --batch prompts.jsonl", 2, "leave out PROMPT"),
        ("run MODEL --batch prompts.jsonl -c", 2, "--continue"),
        ("chat --plain -c --load x.json", 2, "either --continue or --load"),
        ("chat -p Hi -c", 2, "for a single answer use localrt run"),
        ("serve --name x --port 0", 2, "--name is for one model: give MODEL"),
        ("serve --keep-alive soon --port 0", 2, "must be a time, is 'soon': write it like 30s"),
        ("serve --api-key '' --port 0", 2, "--api-key must be ASCII text and not empty"),
        ("run none.gguf hi", 1, "none.gguf"),
        ("run empty.gguf hi", 1, "empty.gguf"),
        ("run folder hi", 1, "folder"),
        ("run pickled hi", 1, "pytorch_model.bin"),
        ("bench /dev/zero", 1, "/dev/zero is not a regular file"),
        ("pull notes.txt", 1, "notes.txt is not a GGUF file"),
        ("alias smollm2 notes.txt", 2, "smollm2 is the demo model's own name"),
        ("alias x nosuch", 1, "nosuch is no model"),
        ("list --forget nosuch", 1, "nosuch is no path that was used"),
    ],
)
def test_what_cannot_be_done(
    command: str, status: int, words: str, home: dict[str, str], tiny_folder: Path, tmp_path: Path
) -> None:
    if "/dev/zero" in command and system.IS_WINDOWS:
        pytest.skip("there are no such devices")
    (tmp_path / "notes.txt").write_text("not a model")
    (tmp_path / "binary").write_bytes(b"a\xff")
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    (tmp_path / "empty.gguf").touch()
    for name in ("folder", "pickled"):
        (tmp_path / name).mkdir()
    (tmp_path / "pickled" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with contextlib.chdir(tmp_path):
        parts = shlex.split(command)
        arguments = [str(tiny_folder) if part == "MODEL" else part for part in parts]
        assert_one_line(localrt(*arguments, env=home), status, words)


@pytest.mark.parametrize("flags", [(), ("--max-tokens", "20")])
def test_a_base_model_ends(
    home: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """One without a chat template, which goes on and on, is cut off with a line about it."""
    monkeypatch.setattr("localrt.cli.loading._MOST_BASE_TOKENS", 20)
    folder = write_tiny_model(tmp_path, template=None)
    for more in ((), ("--raw",)):
        result = localrt("run", folder, "Once", *flags, *more, *KERNELS[2:], "--json", env=home)
        told = json.loads(result.stdout)
        assert (told["finish_reason"], told["metrics"]["completion_tokens"]) == ("length", 20)
        assert ("cut off after 20 tokens" in result.stderr.decode()) == (not flags)


@pytest.mark.parametrize("limit", [512, 0])
def test_a_text_that_repeats_itself_ends(limit: int, capsys: pytest.CaptureFixture[str]) -> None:
    def stream() -> Iterator[Chunk]:
        for _ in range(400):
            yield Chunk("Once more. ", (1,), Metrics())
        yield Chunk("", (), Metrics(), "stop")

    assert run._print(argparse.Namespace(json=False, stats=False), "m", stream(), limit) == 0
    told = capsys.readouterr()
    assert (len(told.out) < 2000) == ("the same text came again" in told.err) == bool(limit)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full disk to write to")
def test_full_disk(home: dict[str, str]) -> None:
    """Output that cannot be written is one line and status 1."""
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        program = [*LOCALRT, "list", "--json"]
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, env=home, check=False)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.decode().splitlines()
    assert line.endswith("No space left on device")


KERNELS = ("--max-tokens", "5", "--temperature", "0")  # where company changes nothing


def test_lines_of_text() -> None:
    prompts = parse_prompts("one\r\n\n  two {x}\nthree\u2028still three", "f.txt")
    assert [(p.line, p.prompt) for p in prompts] == [
        (1, "one"),
        (3, "  two {x}"),
        (4, "three\u2028still three"),
    ]
    assert parse_prompts('Explain:\n{"a": 1}\n', "code.txt")[1].prompt == '{"a": 1}'


def test_lines_of_json() -> None:
    messages = [{"role": "user", "content": "hi"}]
    lines = [{"prompt": "a\nb", "id": 7}, {"messages": messages, "id": "x"}, {"prompt": "c"}]
    for name in ("stdin", "f.jsonl"):
        prompts = parse_prompts("\n".join(map(json.dumps, lines)) + "\n", name)
        assert [(p.line, p.prompt, p.id) for p in prompts] == [
            (1, "a\nb", 7),
            (2, messages, "x"),
            (3, "c", None),
        ]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("\n \n", "f", "f has no prompts"),
        ('{"prompt": "a"}\nb', "f", r"f mixes text \(line 2\) with JSON objects \(line 1\)"),
        ('{"prompt": "a"}\nb', "f.jsonl", "line 2 of f.jsonl is not JSON"),
        ("plain", "f.jsonl", "line 1 of f.jsonl is not JSON"),
        ('{"prompt": "a", "messages": []}', "f", "either"),
        ('{"prompt": 3}', "f", "not a string"),
        ('{"prompt": "a"}\n{"prompt": ""}', "f", "line 2 of f has an empty prompt"),
        ('{"promt": "a"}\n{"promt": "b"}', "f", "line 1 of f has 'promt': did you mean prompt"),
        ('{"messages": [1]}', "f", "line 1 of f has a message that is not an object"),
    ],
)
def test_lines_that_are_no_prompts(text: str, name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_prompts(text, name)


def test_answers_come_in_order_as_text_or_json(
    tiny_folder: Path, tmp_path: Path, home: dict[str, str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hello\n\n" + "x" * 300 + "\nbye\n", encoding="utf-8")
    command = ("run", tiny_folder, *KERNELS)
    single = [
        json.loads(localrt(*command, prompt, "--json", env=home).stdout)["text"]
        for prompt in ("hello", "bye")
    ]
    result = localrt(*command, "--batch", file, "--json", "--batch-size", "2", env=home)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["line"] for record in records] == [1, 3, 4]
    assert [records[0]["text"], records[2]["text"]] == single
    assert len(records[0]["token_ids"]) == records[0]["metrics"]["completion_tokens"]
    assert records[0]["finish_reason"] in ("length", "stop")
    plain = localrt(*command, "--batch", "-", "--stats", env=home, stdin=b"hello\nbye\n")
    assert plain.stdout.decode() == f"==> 1 <==\n{single[0]}\n\n==> 2 <==\n{single[1]}\n\n"
    assert "2 of 2 prompts answered" in plain.stderr.decode()


def test_a_prompt_that_fails_is_one_record(
    tiny_folder: Path, tmp_path: Path, home: dict[str, str]
) -> None:
    lines = [{"prompt": "a", "id": 1}, {"prompt": "x" * 600, "id": 2}, {"prompt": "b"}]
    stdin = "\n".join(map(json.dumps, lines)).encode()
    result = localrt("run", tiny_folder, *KERNELS, "--batch", "-", "--json", env=home, stdin=stdin)
    assert_one_line(result, 1, "1 of 3 prompts failed")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record.get("id") for record in records] == [1, 2, None]
    assert ["error" in record for record in records] == [False, True, False]
    assert "holds 512" in records[1]["error"]
