"""``localrt run --batch``: files of prompts, their order, their errors, what a pipe gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localrt.cli.run_batch import parse_prompts
from localrt.common.errors import OptionError
from tests.cli.test_cli import assert_one_line, home, localrt
from tests.conftest import write_tiny_model

__all__ = ["home"]  # a fixture

FAST = ("--max-tokens", "5", "--temperature", "0")  # on the kernels, where company changes nothing


def test_lines_of_text() -> None:
    prompts = parse_prompts("one\r\n\n  two {x}\nthree\u2028still three", "f.txt")
    assert [(p.line, p.prompt) for p in prompts] == [
        (1, "one"),
        (3, "  two {x}"),
        (4, "three\u2028still three"),
    ]
    assert parse_prompts('Explain:\n{"a": 1}\n', "code.txt")[1].prompt == '{"a": 1}'


def test_a_base_model_ends(
    home: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localrt.cli.loading._MOST_BASE_TOKENS", 20)
    (tmp_path / "base").mkdir()
    folder = write_tiny_model(tmp_path / "base", template=None)
    prompts = tmp_path / "f.txt"
    prompts.write_text("Once\nTwice\n")
    result = localrt("run", folder, "--batch", prompts, "--temperature", "0", "--json", env=home)
    assert result.returncode == 0, result.stderr
    answers = map(json.loads, result.stdout.splitlines())
    assert [each["metrics"]["completion_tokens"] for each in answers] == [20, 20]
    assert "2 of 2 answers cut off after 20 tokens" in result.stderr.decode()


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
        ('b\n{"prompt": "a"}', "stdin", r"text \(line 1\) with JSON objects \(line 2\)"),
        ('{"prompt": "a"}\nb', "f.jsonl", "line 2 of f.jsonl is not JSON"),
        ("plain", "f.jsonl", "line 1 of f.jsonl is not JSON"),
        ("[1]", "f.jsonl", "line 1"),
        ('{"prompt": "a", "messages": []}', "f", "either"),
        ('{"prompt": "a", "temperature": 0}', "f", "'temperature'"),
        ('{"prompt": 3}', "f", "not a string"),
        ('{"messages": "a"}', "f", "not a list"),
        ('{"prompt": "a"}\n{"prompt": "b"', "f", "line 2 of f is not JSON"),
        ('{"prompt": "a"}\n{"prompt": ""}', "f", "line 2 of f has an empty prompt"),
        ('{"prompt": "a"}\n\n{"messages": []}', "f", "line 3 of f has an empty prompt"),
        ('{"promt": "a"}\n{"promt": "b"}', "f", "line 1 of f has 'promt': did you mean prompt"),
        ('{"message": "a"}', "stdin", "line 1 of stdin has 'message': did you mean messages"),
        ('{"a": 1}', "f", "line 1 of f has 'a': only prompt, messages, id are known"),
        ("{}", "f", "line 1 of f must be an object with either"),
        ('{"messages": [1]}', "f", "line 1 of f has a message that is not an object"),
        ('{"messages": [{"role": "user"}]}', "f", "line 1 of f has a message that is not"),
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
    command = ("run", tiny_folder, *FAST)
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
    result = localrt("run", tiny_folder, *FAST, "--batch", "-", "--json", env=home, stdin=stdin)
    assert_one_line(result, 1, "1 of 3 prompts failed")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record.get("id") for record in records] == [1, 2, None]
    assert ["error" in record for record in records] == [False, True, False]
    assert "holds 512" in records[1]["error"]


def test_a_system_prompt_goes_before_each(tiny_folder: Path, home: dict[str, str]) -> None:
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    lines = [{"prompt": "hi"}, {"messages": own[1:]}, {"messages": own}]
    stdin = "\n".join(map(json.dumps, lines)).encode()
    result = localrt(
        "run", tiny_folder, *FAST, "--batch", "-", "--json", "-s", "Be brief.",
        env=home, stdin=stdin,
    )  # fmt: skip
    texts = {json.loads(line)["text"] for line in result.stdout.splitlines()}
    assert len(texts) == 1
