"""Fill-in-the-middle prompts: the text before and after a gap, for models trained to fill it.

Such models have special tokens that mark the parts. GGUF files may declare them; otherwise they are
found by their spelling. Knows tokenizers, but no engine and no options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localrt.common.errors import OptionError
from localrt.common.option_names import option
from localrt.models.tokenizers.base import Tokenizer, Watch, ignore_count

# The marks of the text before the gap, the text after it, and the middle.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 and 3 Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM 4.5
)
# Codestral: the text after the gap comes first, and the middle follows the text before it.
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")
# The marks of a repository's name, and of a file's name and text. Qwen, StarCoder 2.
_FILE_MARKS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))
_REPOSITORY, _THIS_FILE = "myproject", "filename"  # llama.cpp's
_SNIPPET = "\n\n--- snippet ---\n\n"
# Tokens that end a middle, besides the model's end tokens and the marks themselves.
_ENDS = (
    *("<|fim_pad|>", "<fim_pad>", "<|file_separator|>", "<|endoftext|>"),
    *("<EOT>", "▁<EOT>", "<|EOT|>", "<reponame>", "<filename>"),
)
_SUFFIX_SHARE = 4  # the text after the gap keeps at least 1/4 of the room
_CHARACTERS = 16  # more than most tokens have
_UNBOUNDED = 1 << 40
_SENTINEL = "☺"


@dataclass(frozen=True, slots=True)
class _Ids:
    before: int
    behind: int
    middle: int | None
    repository: int | None
    file: int | None


class Infill:
    """Makes fill-in-the-middle prompts for one tokenizer. ``ends`` are the ids that end a middle.

    Raises:
        OptionError: the model has no fill-in-the-middle tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = _find(tokenizer)
        if ids is None:
            raise OptionError(
                f"{option('suffix')} cannot be used: this model has no tokens to fill in the "
                "middle with, such as <|fim_prefix|>; take one that has, such as Qwen2.5-Coder"
            )
        self._tokenizer, self._ids = tokenizer, ids
        found = (*map(tokenizer.token_id, _ENDS), tokenizer.infill_ids.get("pad"))
        marks = (ids.before, ids.behind, ids.middle, ids.repository, ids.file)
        self.ends = frozenset(token for token in (*found, *marks) if token is not None)

    def prompt(
        self,
        before: str,
        behind: str,
        files: Sequence[tuple[str, str]] = (),
        *,
        most: int | None = None,
        watch: Watch = ignore_count,
    ) -> list[int]:
        """The prompt for the text between ``before`` and ``behind``, as token ids.

        ``files`` are names and texts of the same project's files or parts of files, the most
        important last. If the prompt exceeds ``most`` tokens, the first files are left out; then
        ``before`` is cut at its beginning and ``behind`` at its end (to at least 1/4 of ``most``).
        """
        if most is not None:
            before, behind = before[-most * _CHARACTERS :], behind[: most * _CHARACTERS]
        first, last = self._plain(before, watch), self._unspaced(behind, watch)
        start = self._tokenizer.encode("")[:1]
        begin = start if start == [self._tokenizer.bos_id] else []
        room = _UNBOUNDED if most is None else max(0, most - len(self._joined(begin, [], [])))
        kept = self._project(files, room - len(first) - len(last), watch)
        size = min(len(last), max(room // _SUFFIX_SHARE, room - len(first)))
        first = first[max(0, len(first) - (room - size)) :]
        return self._joined([*begin, *kept], first, last[:size])

    # -- parts -----------------------------------------------------------------------------------

    def _joined(self, head: list[int], before: list[int], behind: list[int]) -> list[int]:
        ids = self._ids
        if ids.middle is None:
            return [*head, ids.behind, *behind, ids.before, *before]
        return [*head, ids.before, *before, ids.behind, *behind, ids.middle]

    def _project(self, files: Sequence[tuple[str, str]], room: int, watch: Watch) -> list[int]:
        """The tokens of the last files that fit, to put before the file with the gap."""
        ids, plain = self._ids, self._plain
        head, tail = [], []
        if ids.file is not None:
            head = [] if ids.repository is None else [ids.repository, *plain(f"{_REPOSITORY}\n")]
            tail = [ids.file, *plain(f"{_THIS_FILE}\n")]
        room -= len(head) + len(tail)
        found: list[int] = []
        for name, text in reversed(files):
            if len(text) > room * _CHARACTERS:
                break
            mark = [] if ids.file is None else [ids.file]
            lead = f"{name}\n" if mark else _SNIPPET
            part = [*mark, *plain(lead + text, watch)]
            room -= len(part)
            if room < 0:
                break
            found = part + found
        return [*head, *found, *tail] if found else []

    def _plain(self, text: str, watch: Watch = ignore_count) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, watch=watch)

    def _unspaced(self, text: str, watch: Watch) -> list[int]:
        """Encode ``text`` without the space that some vocabularies add before every text."""
        if not self._tokenizer.strip_space or not text:
            return self._plain(text, watch)
        start, whole = self._plain(_SENTINEL), self._plain(_SENTINEL + text, watch)
        return whole[len(start) :] if whole[: len(start)] == start else self._plain(text, watch)


def _find(tokenizer: Tokenizer) -> _Ids | None:
    """The ids of a model's marks, declared by its files or found by name; None if it has none."""
    named = tokenizer.infill_ids
    find = tokenizer.token_id
    pairs = ((find(repository), find(file)) for repository, file in _FILE_MARKS)
    repository, file = next((pair for pair in pairs if None not in pair), (None, None))
    repository, file = named.get("rep", repository), named.get("sep", file)
    told = [named.get(part) for part in ("pre", "suf", "mid")]
    for before, behind, middle in (told, *(map(find, marks) for marks in _MARKS)):
        if before is not None and behind is not None and middle is not None:
            return _Ids(before, behind, middle, repository, file)
    behind, before = map(find, _SUFFIX_FIRST)
    if before is not None and behind is not None:
        return _Ids(before, behind, None, repository, file)
    return None
