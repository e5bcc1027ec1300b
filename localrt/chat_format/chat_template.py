"""Renders messages to prompt text by a model's own chat template (Jinja2, sandboxed).

Text in a message that spells a control token (``<|im_start|>``) stays ordinary text up to the token
ids, whatever the template does: its characters are moved to a private plane of Unicode before
rendering, so that trimming and splitting treat it as any other text of its length
(``render_segments`` and ``encode_chat``). A model without a template gets ``PlainTemplate``. Does
not know which model is loaded.
"""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrt.common.errors import OptionError, TemplateError
from localrt.common.files import read_text
from localrt.models.checkpoints.packed_strings import PackedStrings
from localrt.models.tokenizers.base import (
    TokenMatcher,
    Watch,
    behind,
    ignore_count,
    read_json,
    token_name,
)

if TYPE_CHECKING:
    from localrt.models.tensor_source import Checkpoint
    from localrt.models.tokenizers.base import Tokenizer

PICTURE = {"type": "image", "image": True}
"""A part of a content for which the template of a vision model writes a placeholder."""

Segment = tuple[str, bool]
"""Text, and whether names of control tokens in it become control tokens."""

_PLANES = (16, 15, *range(13, 3, -1))  # planes: for private use, then unassigned
# The look of control tokens, for callers that do not know those of the vocabulary.
_LOOKS_LIKE_ONE = re.compile(r"<[^\s<>]{1,64}>|\[[^\s\[\]]{1,32}\]")


class ControlMask:
    """Disguises control tokens in ``given``: moves their characters to an unused Unicode plane.

    ``covered`` is the disguised ``given``: strings, lists and mappings at any depth. Without
    ``control_tokens``, everything that looks like a control token counts as one.
    """

    def __init__(self, given: object, control_tokens: Iterable[str] | None) -> None:
        self._matcher: TokenMatcher | None = None
        if control_tokens is not None:
            self._matcher = TokenMatcher(dict.fromkeys(control_tokens, 0))
        used = _planes(given)
        self._base = 0x10000 * next((plane for plane in _PLANES if plane not in used), _PLANES[0])
        first, last = chr(self._base), chr(self._base + 0xFFFF)
        self._disguised = re.compile(f"([{first}-{last}]+)")
        self.covered = self._cover(given)

    def uncover(self, text: str) -> str:
        """Undo the disguise in the rendered ``text``."""
        return "".join([piece for piece, _ in self.segments(text)])

    def segments(self, text: str) -> list[Segment]:
        """Cut rendered ``text`` into disguised and other segments, and undo the disguise."""
        return [
            (self._reveal(piece), False) if index % 2 else (piece, True)
            for index, piece in enumerate(self._disguised.split(text))
            if piece
        ]

    def _cover(self, value: object) -> Any:
        """Return ``value`` with all control tokens in its strings disguised, at any depth."""
        match value:
            case str():
                return self._cover_text(value)
            case Mapping():
                return {self._cover(key): self._cover(item) for key, item in value.items()}
            case list() | tuple():
                return [self._cover(item) for item in value]
            case _:
                return value

    def _cover_text(self, text: str) -> str:
        pieces, end = [], 0
        for start, stop in self._spans(text):
            pieces += [text[end:start], *map(self._disguise, text[start:stop])]
            end = stop
        return "".join([*pieces, text[end:]]) if pieces else text

    def _spans(self, text: str) -> list[tuple[int, int]]:
        if self._matcher is None:
            return [found.span() for found in _LOOKS_LIKE_ONE.finditer(text)]
        return [(start, stop) for start, stop, _ in self._matcher.spans(text)]

    def _disguise(self, char: str) -> str:
        return chr(self._base + ord(char)) if ord(char) < 0x10000 else char

    def _reveal(self, text: str) -> str:
        return "".join([chr(ord(char) - self._base) for char in text])


def _planes(value: object) -> set[int]:
    """The planes of Unicode, from plane 4 on, that the strings in ``value`` use."""
    match value:
        case str():
            if not value or max(value) < "\U00040000":
                return set()
            return {ord(char) >> 16 for char in value}
        case Mapping():
            return set().union(*map(_planes, value), *map(_planes, value.values()))
        case list() | tuple():
            return set().union(*map(_planes, value))
        case _:
            return set()


_PROBE = "localrt probe"
_SPEAKING = ("system", "user")  # messages of other roles may have calls only


class MessageTemplate(ABC):
    """Turns messages into a prompt.

    ``is_plain``: it is the plain format, because the model brings no template. ``stop_strings`` end
    the assistant's turn, in addition to tokens that do. ``tool_source`` is the source of the
    template that is used with tools.
    """

    is_plain = False
    stop_strings: tuple[str, ...] = ()
    tool_source = ""

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        return "tools" in self.tool_source

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """Render the prompt as one string; ``extra`` are further variables for the template.

        Contents may be strings, or lists of ``{"type": "text", "text": ...}``.

        Raises:
            TemplateError: the template refused the messages or failed; quotes it on one line.
        """
        if not isinstance(tools, (list, tuple, type(None))):
            raise TemplateError("tools must be a list of mappings")
        shaped = [_shape(message, parts=self._wants_parts) for message in messages]
        return self._render(shaped, tools, add_generation_prompt, extra)

    def render_segments(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        control_tokens: Iterable[str] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        **extra: Any,
    ) -> list[Segment]:
        """``render`` in segments: text of the messages that spells a control token is separate.

        ``control_tokens`` are the vocabulary's; by default, everything that looks like one counts.
        Such text is disguised while the template renders. If the template itself looks for control
        tokens in the assistant's messages (to drop their thoughts, for example), those messages are
        not disguised.

        Raises:
            TemplateError: as ``render``.
        """
        try:
            if self.is_plain:  # the plain format writes no control tokens
                return [(self.render(messages, tools=tools, **extra), False)]
            given = [list(messages), tools, extra]
            mask = ControlMask(given, control_tokens)
            if mask.covered == given:
                return [(self.render(messages, tools=tools, **extra), True)]
            masked, masked_tools, masked_extra = mask.covered
            disguised = self.render(masked, tools=masked_tools, **masked_extra)
            try:
                plain: str | None = self.render(messages, tools=tools, **extra)
            except TemplateError:
                plain = None  # the template refuses such text; disguised, it is only text
            if plain not in (None, mask.uncover(disguised)):
                shown = [
                    message if message.get("role") == "assistant" else covered
                    for message, covered in zip(messages, masked, strict=True)
                ]
                disguised = self.render(shown, tools=masked_tools, **masked_extra)
            return mask.segments(disguised)
        except RecursionError:
            raise TemplateError("the messages or the tools are nested too deeply") from None

    @property
    def _wants_parts(self) -> bool:
        """Whether contents must be lists of parts."""
        return False

    @abstractmethod
    def _render(
        self,
        messages: list[dict[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool,
        extra: Mapping[str, object],
    ) -> str:
        """Render messages whose contents are all strings, or all lists of parts."""


class ChatTemplate(MessageTemplate):
    """A Jinja2 chat template.

    ``bos`` and ``eos`` are the texts of ``bos_token`` and ``eos_token``; ``with_tools`` is the
    separate template for requests with tools, if the model has one.

    Raises:
        TemplateError: the source is not valid Jinja2.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        name: str = "chat template",
        with_tools: str | None = None,
    ) -> None:
        # Jinja2 takes a tenth of a second to import, and not every model brings a template
        from localrt.chat_format.sandbox import SandboxedTemplate

        self.source = source
        self.tool_source = with_tools or source
        self._globals = {"bos_token": bos, "eos_token": eos}
        self._template = SandboxedTemplate(source, name)
        self._with_tools = SandboxedTemplate(with_tools, name) if with_tools else self._template

    @cached_property
    def _is_firefunction(self) -> bool:
        """Whether this template may read the variables that only firefunction's template has."""
        return "functions" in self.tool_source and "datetime" in self.tool_source

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether this template reads contents as lists of parts and ignores plain strings."""

        def shows(content: object) -> bool:
            try:
                rendered = self._render([{"role": "user", "content": content}], None, True, {})
            except TemplateError:
                return False
            return _PROBE in rendered and "{" not in rendered

        return not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])

    def _render(
        self,
        messages: list[dict[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool,
        extra: Mapping[str, object],
    ) -> str:
        given = {
            **self._globals,
            **(_firefunction_variables(tools) if self._is_firefunction else {}),
            **extra,
            "messages": messages,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        return (self._with_tools if tools else self._template).render(given)


def _firefunction_variables(tools: Sequence[Mapping[str, object]] | None) -> dict[str, str]:
    """The variables that firefunction's template reads instead of ``tools``."""
    try:
        functions = json.dumps(tools or [], indent=4)
    except RecursionError:
        raise TemplateError("tools are nested too deeply") from None
    # Only the date: a time would invalidate cached prompts.
    return {"functions": functions, "datetime": time.strftime("%Y-%m-%d")}


class PlainTemplate(MessageTemplate):
    """``System: ... User: ... Assistant:``, for models that bring no template.

    The model may continue with the user's next turn: ``stop_strings`` end the answer before it.
    """

    is_plain = True
    stop_strings = ("\nUser:",)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool,
        extra: Mapping[str, object],
    ) -> str:
        if tools:
            raise TemplateError("this model has no chat template, so it cannot be given tools")
        turns = [f"{turn['role'].title()}: {turn.get('content') or ''}" for turn in messages]
        return "\n".join([*turns, "Assistant:"] if add_generation_prompt else turns)


def load_template(checkpoint: Checkpoint, file: Path | None = None) -> ChatTemplate | None:
    """Load the chat template in ``file``, or else that of ``checkpoint``; None if there is none.

    Raises:
        TemplateError: the template is not valid Jinja2; or the file is empty or cannot be read.
        TokenizerError: a file beside the tokenizer is not readable JSON.
    """
    if checkpoint.kind == "gguf":
        metadata = checkpoint.metadata
        default, with_tools = (
            metadata.get("tokenizer.chat_template"),
            metadata.get("tokenizer.chat_template.tool_use"),
        )
        if file is not None:
            default, with_tools = _source(file), None
        bos, eos = (_gguf_text(metadata, default, key) for key in ("bos", "eos"))
    else:
        folder = checkpoint.path
        names = read_json(folder / "special_tokens_map.json")
        config = names | read_json(folder / "tokenizer_config.json")
        sources = _folder_sources(folder, config) if file is None else {"default": _source(file)}
        default, with_tools = sources.get("default"), sources.get("tool_use")
        bos, eos = (token_name(config.get(key)) or "" for key in ("bos_token", "eos_token"))
    if not isinstance(default, str) or not default.strip():
        if file is not None:
            raise TemplateError(f"the chat template {file} is empty")
        return None
    if not isinstance(with_tools, str):
        with_tools = None
    return ChatTemplate(
        default, bos=bos, eos=eos, name="model's chat template", with_tools=with_tools
    )


def _gguf_text(metadata: Mapping[str, object], source: object, key: str) -> str:
    """The text of the ``bos`` or ``eos`` token, if the template asks for it: finding it is slow."""
    token = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if type(token) is not int or not isinstance(source, str) or f"{key}_token" not in source:
        return ""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list | PackedStrings) and 0 <= token < len(tokens):
        return str(tokens[token])
    return ""


def _folder_sources(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Templates of a Hugging Face folder by name; files win over tokenizer_config.json."""
    found: dict[str, str] = {}
    for given in (read_json(folder / "chat_template.json"), config):
        match given.get("chat_template"):
            case str(source):
                found["default"] = source
            case list(entries):
                found |= dict(map(_named_source, entries))
            case None:
                pass
            case _:
                raise TemplateError("the model's chat_template is neither text nor a list")
    files = [folder / "chat_template.jinja", *sorted(folder.glob("chat_templates/*.jinja"))]
    for path in files[::-1]:
        if path.is_file():
            name = "default" if path.parent == folder else path.stem
            found[name] = _source(path)
    return found


def _source(path: Path) -> str:
    try:
        return read_text(path)
    except OptionError as error:
        raise TemplateError(f"the chat template {error.marked}") from None


def _named_source(entry: object) -> tuple[str, str]:
    match entry:
        case {"name": str(name), "template": str(source)}:
            return name, source
    raise TemplateError("an entry of the model's chat_template list lacks its name or template")


def encode_chat(
    tokenizer: Tokenizer, segments: Sequence[Segment], watch: Watch = ignore_count
) -> list[int]:
    """Token ids of a rendered chat, encoded as one text, with control tokens only where they count.

    Without a template, the tokenizer adds a BOS. If a template writes none, the tokenizer of a GGUF
    file adds it, as llama.cpp does; that of a folder does not, as in transformers.
    """
    written = any(counts for _, counts in segments)
    ids: list[int] = []
    later = behind(ids, watch)
    watch(sum(tokenizer.least_tokens(text) for text, _ in segments))
    for index, (text, counts) in enumerate(_separate(tokenizer, segments)):
        first = index == 0 and not written
        ids += tokenizer.encode(text, add_special=first, parse_special=counts, watch=later)
    prefix = list(tokenizer.chat_prefix)
    return ids if ids[: len(prefix)] == prefix else prefix + ids


def _separate(tokenizer: Tokenizer, segments: Sequence[Segment]) -> list[Segment]:
    """The fewest segments in which no text of a message is read as a control token."""
    if all(counts for _, counts in segments):
        return [("".join(text for text, _ in segments), True)]
    names = TokenMatcher({tokenizer.token_text(token): token for token in tokenizer.special_ids})
    joined: list[Segment] = []
    for text, counts in segments:
        parts = [text] if counts else names.split(text)
        for part in parts:
            piece = part if isinstance(part, str) else tokenizer.token_text(part)
            allowed = isinstance(part, str)
            if joined and allowed and joined[-1][1]:
                joined[-1] = (joined[-1][0] + piece, True)
            else:
                joined.append((piece, allowed))
    return joined or [("", False)]


def _shape(message: Mapping[str, object], *, parts: bool) -> dict[str, object]:
    """Copy ``message`` with its content as a string, or as a list of parts if ``parts``."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TemplateError('a message must be a mapping with a "role", such as {"role": "user"}')
    shaped = dict(message)
    content = shaped.get("content")
    if isinstance(content, list | tuple) and PICTURE in content:
        return shaped
    if isinstance(content, str):
        if parts:
            shaped["content"] = [{"type": "text", "text": content}]
    elif content is not None:
        shaped["content"] = content if parts else _flatten(content)
    elif message["role"] in _SPEAKING:
        raise TemplateError(f'a {message["role"]} message must have a "content", its text')
    return shaped


def _flatten(content: object) -> str:
    if not isinstance(content, Sequence):
        raise TemplateError("a message's content must be a string or a list of text parts")
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise TemplateError(f"a message's content may only hold text, not {kind!r:.100}")
        texts.append(text)
    return "\n".join(texts)


# -- what prompts share -------------------------------------------------------------------------

_OPENING_IDS, _LONGEST_OPENING = (
    3,
    256,
)  # ids that tell an answer's opening, and the last ones with it
_MARKS = "AAaa", "BBbb"  # stand for messages of which a chat template's text is found


class SharedPrefixes:
    """How much of a conversation's ids other prompts of ``template`` begin with, too.

    Recurrent states are kept there, since they cannot go back to every token.
    """

    def __init__(self, template: MessageTemplate, tokenizer: Tokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer

    def lengths(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return how many of a conversation's ids come before its first question and before its
        answer's opening, as far as that is known.
        """
        question, answer = self._before_question, self._before_answer
        last = len(ids) - len(answer)
        asked = _find(question, ids, range(last - len(question)))
        answered = _find(answer, ids, range(last, max(last - _LONGEST_OPENING, 0), -1))
        ends = asked and asked + len(question), answered
        return tuple(end for end in ends if end)

    @cached_property
    def _before_answer(self) -> list[int]:
        """The first ids of what the template writes before an answer."""
        turn = [{"role": "user", "content": "."}]
        asked = self._written(turn, add_generation_prompt=False)
        opened = self._written(turn).removeprefix(asked) if asked else ""
        return self._encoded(opened)[:_OPENING_IDS]

    @cached_property
    def _before_question(self) -> list[int]:
        """The ids that the template writes between a system message and a user's."""
        roles = zip(("system", "user"), _MARKS, strict=True)
        turns = [{"role": role, "content": mark} for role, mark in roles]
        text = self._written(turns, add_generation_prompt=False)
        return self._encoded(text.partition(_MARKS[0])[2].partition(_MARKS[1])[0])

    def _written(self, messages: Sequence[Mapping[str, object]], **options: Any) -> str:
        try:
            return self._template.render(messages, **options)
        except TemplateError:
            return ""

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=True)


def _find(part: Sequence[int], ids: Sequence[int], places: Iterable[int]) -> int:
    """Return the first of ``places`` where ``part`` is in ``ids``; 0 if it is empty or nowhere."""
    if not part:
        return 0
    begins = (place for place in places if ids[place] == part[0])  # few are, of many
    return next((i for i in begins if ids[i : i + len(part)] == part), 0)
