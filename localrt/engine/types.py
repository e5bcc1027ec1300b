"""The values that a generation takes and yields: messages, chunks, metrics, log-probabilities.

Plain values only: they need no engine, no tokenizer and no numpy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NotRequired, Required, TypeAlias, TypedDict

from localrt.common.errors import LocalrtError, OptionError
from localrt.common.option_names import option

_SHOWN = 60  # characters
# Functions that a model may call: Python's, or described in OpenAI's form.
Tools: TypeAlias = Sequence[Mapping[str, Any] | Callable[..., Any]]
FinishReason = Literal["stop", "length", "cancelled", "tool_calls", "error"]


class Message(TypedDict, total=False):
    """One turn, in the form that chat templates take.

    ``prefix``, for a last assistant turn: the answer continues this message, by its ``token_ids``
    if there are any (thinking, calls and bound answers go on as well), else by its text.
    """

    role: Required[str]
    content: Required[Any]
    name: NotRequired[str]
    tool_calls: NotRequired[list[Any]]
    tool_call_id: NotRequired[str]
    prefix: NotRequired[bool]
    token_ids: NotRequired[list[int]]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token before sampling settings, with the best alternatives."""

    token_id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call by the model. ``arguments`` is the JSON text of an object."""

    id: str
    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        """Return the call in the form of an assistant's message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Metrics:
    """The cost of a generation so far: seconds, bytes, tokens; None for what was not measured.

    ``prompt_tokens`` counts the whole prompt, ``cached_tokens`` the part that a KV cache already
    held, ``thinking_tokens`` the thoughts among ``completion_tokens``. ``prefill_tok_s`` covers the
    computed part only. ``accepted_per_pass`` is tokens per target pass of decoding,
    ``accepted_by_source`` the share of them that each source drafted, ``speculation`` what was done
    and why, in one sentence. ``memory`` says in a sentence which weights have moved since loading,
    and why.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    thinking_tokens: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    peak_vram_bytes: int | None = None
    peak_ram_bytes: int | None = None
    ssd_read_bytes: int | None = None
    link_bytes: int | None = None
    pipeline_efficiency: float | None = None
    ceiling_tok_s: float | None = None
    predicted_tok_s: float | None = None
    accepted_per_pass: float | None = None
    accepted_by_source: Mapping[str, float] | None = None
    speculation: str | None = None
    expert_hit_rate: float | None = None
    memory: str | None = None
    exactness: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same names and values as a plain dictionary."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a generation: its new text and tokens, and the metrics up to here.

    ``text`` holds complete characters only and may be empty while a stop string or a character is
    still open. ``finish_reason`` is set on the last chunk alone, whose metrics are the whole run's,
    as are ``tool_calls``: what the model asks to be called, which ``text`` then leaves out, and
    ``stop_string``: the one of ``stop`` that ended the answer. A model's thinking is in ``text`` as
    ``<think>...</think>`` (``localrt.split_thinking``). In a batch, ``error`` is what went wrong
    with this prompt alone, and the reason is ``"error"``. ``end_logprob`` is of the token that
    ended the answer, where log-probabilities are wanted and one did: it is no part of the text.
    ``info["begun"]``, in the first chunk of an answer that is continued: the tokens of the text
    that the chunk repeats.
    """

    text: str
    token_ids: tuple[int, ...]
    metrics: Metrics
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    error: LocalrtError | None = None
    stop_string: str | None = None
    end_logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Answer(Chunk):
    """A whole answer, as ``generate`` and ``send`` return it; as a string, its text.

    ``kind`` is what ``json_schema`` was given: a type, or a schema.
    """

    kind: Any = None

    def __str__(self) -> str:
        """Return the text."""
        return self.text

    def __repr__(self) -> str:
        """Show the beginning, how it ended, and the length."""
        begin = self.text if len(self.text) <= _SHOWN else self.text[: _SHOWN - 1] + "…"
        end = f"{self.finish_reason}, {len(self.token_ids)} tokens"
        return f"<localrt.Answer {begin!r} ({end})>"

    @property
    def parsed(self) -> Any:
        """The answer as an object of the type that ``json_schema`` is, else as JSON's values.

        Raises:
            OptionError: the answer was cut, or is no JSON.
            pydantic.ValidationError: the type has rules that a schema cannot express.
        """
        text = self.text.lstrip()
        if text.startswith("<think>"):
            text = text.partition("</think>")[2]
        try:
            value = json.loads(text)
        except ValueError:
            cut = f", {option('max_tokens')} cut it" if self.finish_reason == "length" else ""
            raise OptionError(f"the answer is no JSON{cut}: {text:.60}") from None
        if self.kind is None or isinstance(self.kind, str | Mapping | bool):
            return value
        from pydantic import TypeAdapter

        return TypeAdapter(self.kind).validate_json(text)
