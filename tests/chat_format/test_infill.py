"""Filling in the middle: which models can, and what they are shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from localrt.chat_format.infill import Infill
from localrt.common.errors import OptionError
from localrt.models.tokenizers.base import Tokenizer, Watch, ignore_count

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
PROJECT = ("<|repo_name|>", "<|file_sep|>")


class CharacterTokenizer(Tokenizer):
    """A token for each character, and one for each of ``marks``."""

    bos_id = None
    eos_ids = special_ids = frozenset()
    strip_space = False

    def __init__(self, *marks: str, bos: bool = False) -> None:
        self.marks = {mark: 5000 + at for at, mark in enumerate(marks)}
        self.vocab_size = 6000
        if bos:
            self.bos_id = 5999

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        watch: Watch = ignore_count,
    ) -> list[int]:
        begin = [self.bos_id] if add_special and self.bos_id is not None else []
        space = [ord(" ")] if self.strip_space and text else []
        return [*begin, *space, *map(ord, text)]

    def token_bytes(self, token: int) -> bytes:
        return self.token_text(token).encode()

    def token_text(self, token: int) -> str:
        names = {each: mark for mark, each in self.marks.items()}
        return names.get(token) or ("<s>" if token == self.bos_id else chr(token))

    def token_id(self, text: str) -> int | None:
        return self.marks.get(text)


def shown(tokenizer: CharacterTokenizer, ids: Sequence[int]) -> str:
    return "".join(map(tokenizer.token_text, ids))


@pytest.mark.parametrize(
    ("marks", "bos", "expected"),
    [
        (QWEN, False, "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
        (DEEPSEEK, True, "<s><｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), True, "<s>▁<PRE>a▁<SUF>b▁<MID>"),
        (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), True, "<s>[SUFFIX]b[PREFIX]a"),
    ],
)
def test_each_family_has_its_marks_and_order(
    marks: tuple[str, ...], bos: bool, expected: str
) -> None:
    tokenizer = CharacterTokenizer(*marks, bos=bos)
    assert shown(tokenizer, Infill(tokenizer).prompt("a", "b")) == expected


def test_files_may_declare_the_marks() -> None:
    tokenizer = CharacterTokenizer(*QWEN)
    tokenizer.infill_ids = {"pre": 1, "suf": 2, "mid": 3, "pad": 4}
    infill = Infill(tokenizer)
    assert infill.prompt("a", "b") == [1, ord("a"), 2, ord("b"), 3]
    assert infill.ends == {1, 2, 3, 4}


@pytest.mark.parametrize("marks", [(), QWEN[:2]])
def test_a_model_without_marks_says_so(marks: tuple[str, ...]) -> None:
    with pytest.raises(OptionError, match="no tokens to fill in the middle"):
        Infill(CharacterTokenizer(*marks))


def test_what_ends_a_middle() -> None:
    tokenizer = CharacterTokenizer(*QWEN, *PROJECT, "<|fim_pad|>", "<|endoftext|>", "<|other|>")
    ends = {tokenizer.token_text(token) for token in Infill(tokenizer).ends}
    assert ends == {*QWEN, *PROJECT, "<|fim_pad|>", "<|endoftext|>"}


def test_files_of_the_project_come_first() -> None:
    files = [("old.py", "x"), ("new.py", "y")]
    tokenizer = CharacterTokenizer(*QWEN, *PROJECT)
    assert shown(tokenizer, Infill(tokenizer).prompt("a", "b", files)) == (
        "<|repo_name|>myproject\n<|file_sep|>old.py\nx<|file_sep|>new.py\ny<|file_sep|>filename\n"
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )
    tokenizer = CharacterTokenizer(*QWEN)
    assert shown(tokenizer, Infill(tokenizer).prompt("a", "b", files)) == (
        "\n\n--- snippet ---\n\nx\n\n--- snippet ---\n\ny"
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )


def test_what_does_not_fit_is_what_is_far_from_the_gap() -> None:
    tokenizer = CharacterTokenizer(*QWEN, *PROJECT)
    infill = Infill(tokenizer)
    files = [("a", "o" * 50), ("b", "n" * 20)]
    whole = infill.prompt("12345678", "abcdefgh", files)
    fewer = shown(tokenizer, infill.prompt("12345678", "abcdefgh", files, most=len(whole) - 1))
    assert "o" * 50 not in fewer
    assert "n" * 20 in fewer
    assert fewer.endswith("<|fim_prefix|>12345678<|fim_suffix|>abcdefgh<|fim_middle|>")
    for most, expected in (
        (19, "<|fim_prefix|>12345678<|fim_suffix|>abcdefgh<|fim_middle|>"),
        (11, "<|fim_prefix|>345678<|fim_suffix|>ab<|fim_middle|>"),
        (3, "<|fim_prefix|><|fim_suffix|><|fim_middle|>"),
    ):
        found = infill.prompt("12345678", "abcdefgh", files, most=most)
        assert len(found) == most
        assert shown(tokenizer, found) == expected


def test_no_space_comes_between_the_gap_and_what_is_behind() -> None:
    tokenizer = CharacterTokenizer("▁<PRE>", "▁<SUF>", "▁<MID>")
    tokenizer.strip_space = True
    assert shown(tokenizer, Infill(tokenizer).prompt("a", "b")) == "▁<PRE> a▁<SUF>b▁<MID>"
