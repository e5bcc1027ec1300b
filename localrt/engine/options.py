"""The keyword options of a generation, checked once: unknown names and values are errors.

It knows names and bounds. The loop and the sampler give the options their meaning.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from localrt.common.errors import OptionError
from localrt.common.option_names import did_you_mean, option
from localrt.common.progress import ProgressCallback
from localrt.engine.sampling import Sampling, bounded, check_bounds
from localrt.engine.stopping import LineLimit
from localrt.engine.types import Tools

Overflow = Literal["error", "drop_oldest"]
Effort = Literal["low", "medium", "high"]

_BINDING = ("json_schema", "regex", "grammar")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


# Options that are not numbers: a description of their values, and a check.
_CHECKS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("overflow", "error or drop_oldest", get_args(Overflow).__contains__),
    ("draft", "auto, off, ngram, mtp or the name of a model or head", _is_text),
    ("ignore_eos", "true or false", lambda v: isinstance(v, bool)),
    ("parallel_tool_calls", "true or false", lambda v: isinstance(v, bool)),
    ("regex", "a non-empty string", lambda v: v is None or _is_text(v)),
    ("grammar", "a non-empty string", lambda v: v is None or _is_text(v)),
    ("tool_choice", "auto, none, required or the name of a tool", _is_text),
    ("adapter", "a name, or numbers by names", lambda v: isinstance(v, str | Mapping | None)),
    (
        "thinking",
        "on, off, low, medium or high",
        lambda v: v is None or isinstance(v, bool) or v in get_args(Effort),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a generation.

    ``stop`` is one string or several. An answer also ends before any later line that begins with
    fewer than ``min_indent`` spaces and tabs, and after ``line_seconds`` at the end of its line.
    ``logprobs`` asks for the log-probability of every token with that many alternatives (0 to 100).
    ``overflow="drop_oldest"`` keeps the system prompt and drops the oldest turns when a
    conversation outgrows the context, or ``context_tokens`` if these are fewer; the answer ends
    there too. ``draft`` is ``"auto"``, ``"off"``, ``"ngram"``, ``"mtp"``, or a model or head to
    draft with, which ``+ngram`` may follow; ``tree_budget`` is the number of draft tokens in a pass
    (1 to 2048), ``tree_depth`` how far ahead they may be (1 to 64).
    ``json_schema`` (a mapping, JSON text, or a type such as a pydantic model, a dataclass or
    ``list[int]``; ``True`` is any JSON), ``regex`` or ``grammar`` (GBNF,
    llama.cpp's notation) bind the answer: it follows them as a whole, unless ``max_tokens`` or a
    stop string cuts it short. With tools, a schema binds only answers that are not calls.
    ``tool_choice`` says whether the model calls a tool: ``"auto"``, ``"none"``, ``"required"`` (one
    call with ``parallel_tool_calls=False``), or the name of the tool to call.
    ``thinking`` switches a model's thinking on (``True``, ``"on"``) or off; ``"low"``,
    ``"medium"`` and ``"high"`` set the effort, for models that support it. After
    ``thinking_tokens`` of thinking, it is ended and the answer begins; 0 is off. A model
    whose answer is bound thinks before it only if ``thinking`` says so.
    ``adapter`` is an adapter's name, several names with a factor each
    (``{"style": 0.7, "facts": 0.3}``), or ``"none"``.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = bounded(None, 1, 1 << 31)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_indent: int | None = bounded(None, 0, 1 << 31)
    line_seconds: float | None = bounded(None, 0.0, 1e9)
    logprobs: int | None = bounded(None, 0, 100)
    overflow: Overflow = "error"
    context_tokens: int | None = bounded(None, 1, 1 << 31)
    draft: str = "auto"
    tree_budget: int | None = bounded(None, 1, 2048)
    tree_depth: int | None = bounded(None, 1, 64)
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    thinking: bool | Effort | None = None
    thinking_tokens: int | None = bounded(None, 0, 1 << 31)
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    adapter: str | Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        for name, wanted, is_right in _CHECKS:
            value = getattr(self, name)
            if not is_right(value):
                raise OptionError(f"{option(name)} must be {wanted}, is {value!r:.80}")
        binding = [option(name) for name in _BINDING if getattr(self, name) is not None]
        if len(binding) > 1:
            raise OptionError(f"{' and '.join(binding)} cannot be combined: give one of them")
        if self.forces_a_call and binding and self.json_schema is None:
            raise OptionError(
                f"a tool that must be called and {binding[0]} cannot be combined: give one of them"
            )

    @property
    def lines(self) -> LineLimit | None:
        """``min_indent`` and ``line_seconds``."""
        if self.min_indent is None and self.line_seconds is None:
            return None
        return LineLimit(self.min_indent or 0, self.line_seconds)

    @property
    def thinks(self) -> bool | Effort | None:
        """Whether ``thinking`` is on: off with a limit of 0, or for a bound answer by default."""
        if self.thinking_tokens == 0 or (self.is_bound and not self.thinking):
            return False
        return self.thinking

    @property
    def is_bound(self) -> bool:
        """Whether the answer must follow a schema or a grammar, or be a call."""
        return self.bound_by is not None or self.forces_a_call

    @property
    def may_call(self) -> bool:
        """Whether the answer may be a call, if there are tools."""
        free = self.regex is None and self.grammar is None
        return self.forces_a_call or (free and self.tool_choice == "auto")

    @property
    def bound_by(self) -> tuple[str, str] | None:
        """The option that the answer must follow, and its text."""
        given = ((name, getattr(self, name)) for name in _BINDING)
        return next((each for each in given if each[1] is not None), None)

    @property
    def forces_a_call(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.tool_choice not in ("auto", "none")


class GenerateOptions(TypedDict, total=False):
    """Options of a generation by name, for editors and type checkers; None means "not set".

    ``Options`` and ``Sampling`` say more.
    """

    temperature: float | None
    """Randomness: 0 always takes the most likely token, 0.8 is varied."""
    top_k: int | None
    """Keep this many of the most likely tokens; 0 keeps all."""
    top_p: float | None
    """Keep the most likely tokens up to this total probability; 1 keeps all."""
    min_p: float | None
    """Keep tokens at least this likely, relative to the best one; 0 keeps all."""
    typical_p: float | None
    """Keep the most typical tokens up to this total probability; 1 keeps all."""
    repetition_penalty: float | None
    """Above 1: tokens that occurred already become less likely."""
    frequency_penalty: float | None
    """Above 0: a token becomes less likely each time it occurs."""
    presence_penalty: float | None
    """Above 0: tokens that occurred at all become less likely."""
    logit_bias: Mapping[int, float] | None
    """Added to tokens' scores, by id: {"42": -5}."""
    dry_multiplier: float | None
    """Above 0: earlier passages are not repeated (DRY); try 0.8."""
    dry_base: float | None
    """DRY: how fast the penalty grows with each repeated token."""
    dry_allowed_length: int | None
    """DRY: this many repeated tokens are free."""
    dry_penalty_last_n: int | None
    """DRY: look back this many tokens; -1: the whole text."""
    dry_sequence_breakers: Sequence[str] | None
    r"""DRY: a repetition ends at these texts: ["\n", ":"]."""
    xtc_probability: float | None
    """How often XTC leaves out the most likely tokens: 0 never, 0.5 is usual."""
    xtc_threshold: float | None
    """XTC leaves out tokens at least this likely, except the least likely of them."""
    seed: int | None
    """A number: the same seed and text give the same answer."""
    max_tokens: int | None
    """The longest answer, in tokens."""
    stop: str | Sequence[str] | None
    """End the answer at this text, or at one of several: ["a", "b"]."""
    ignore_eos: bool | None
    """true: go on where the model would end its answer."""
    min_indent: int | None
    """End the answer at a line with fewer spaces and tabs before it."""
    line_seconds: float | None
    """After so many seconds, end the answer with its line."""
    logprobs: int | None
    """Each token's log-probability, with those of this many others: 0 to 100."""
    overflow: Overflow | None
    """When the context is full: error, or drop_oldest, which forgets old turns."""
    context_tokens: int | None
    """Use at most this many tokens of the context."""
    draft: str | None
    """Speculation: auto, off, ngram, mtp, or a smaller model or a head."""
    tree_budget: int | None
    """Draft tokens per pass, 1 to 2048; unset: tuned while it runs."""
    tree_depth: int | None
    """How many tokens ahead to draft, 1 to 64; unset: tuned while it runs."""
    json_schema: Any
    """Answers are JSON of this schema: {"type": "object"}; true: any JSON."""
    regex: str | None
    """The whole answer matches this regular expression."""
    grammar: str | None
    """Answers follow this GBNF grammar, such as root ::= "yes" | "no"."""
    thinking: bool | Literal["on", "off"] | Effort | None
    """on, off, or an effort: low, medium, high; unset: the model's own default."""
    thinking_tokens: int | None
    """The longest thinking, in tokens; then the answer begins. 0 is off."""
    tool_choice: str | None
    """auto, none, required, or the name of the tool to call."""
    parallel_tool_calls: bool | None
    """False: a forced call is a single one."""
    adapter: str | Mapping[str, float] | None
    """One of the model's adapters, or several: {"a": 0.7, "b": 0.3}; see /adapter."""


class PromptOptions(GenerateOptions, total=False):
    """What ``Model.generate`` takes beside a prompt: the arguments of ``Model.stream``."""

    token_ids: Sequence[int] | None
    images: Sequence[Any]
    raw: bool
    suffix: str | None
    files: Sequence[tuple[str, str]]
    tools: Tools | None
    cancel: threading.Event | None
    on_progress: ProgressCallback | None


class LiveOptions(PromptOptions, total=False):
    """What ``LiveModel.generate`` takes beside a prompt: the arguments of ``LiveModel.submit``."""

    client: Hashable
    request_class: str


class BatchOptions(GenerateOptions, total=False):
    """What ``Model.generate_batch`` takes beside prompts: the arguments of ``stream_batch``."""

    token_ids: Sequence[Sequence[int]] | None
    raw: bool
    tools: Tools | None
    batch_size: int | None
    errors: Literal["raise", "return"]
    cancel: threading.Event | None
    on_progress: ProgressCallback | None


class SendOptions(GenerateOptions, total=False):
    """What ``ChatSession.send`` takes beside a text: the arguments of ``ChatSession.stream``."""

    images: Sequence[Any]
    files: Sequence[str | Path]
    tools: Tools | None
    on_progress: ProgressCallback | None


_ON_OFF = {"on": True, "off": False}

SAMPLING_NAMES = frozenset(each.name for each in fields(Sampling))
_OTHER_NAMES = frozenset(each.name for each in fields(Options)) - {"sampling"}
OPTION_NAMES = tuple(sorted(SAMPLING_NAMES | _OTHER_NAMES))
_OF_LOADING = frozenset(
    {
        *("activations", "adapters", "chat_template", "ctx", "device", "engine", "format"),
        *("gpu_memory", "kv_format", "offline", "pre_tokenizer", "ram", "revision"),
        *("shrinkable", "gentle", "threads"),
    }
)


def read_options(*layers: Mapping[str, Any]) -> Options:
    """Read options from mappings by name, earlier ones as defaults; None means "not set".

    Raises:
        OptionError: an unknown name (with the closest known one) or a value out of bounds.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if name in _OF_LOADING:
                raise OptionError(
                    f"{option(name)} is set when a model is loaded, and not for an answer"
                )
            if name not in OPTION_NAMES:
                hint = did_you_mean(name, (*OPTION_NAMES, *sorted(_OF_LOADING)))
                raise OptionError(
                    f"unknown option {name!r:.80}: {hint or 'known: ' + ', '.join(OPTION_NAMES)}"
                )
            if value is not None:
                merged[name] = value
    sampling = Sampling(**{k: v for k, v in merged.items() if k in SAMPLING_NAMES})
    rest = {k: v for k, v in merged.items() if k in _OTHER_NAMES}
    if "stop" in rest:
        rest["stop"] = _stop_strings(rest["stop"])
    if isinstance(rest.get("thinking"), str):
        rest["thinking"] = _ON_OFF.get(rest["thinking"], rest["thinking"])
    if "json_schema" in rest:
        rest["json_schema"] = _schema_text(rest["json_schema"])
    return Options(sampling=sampling, **rest)


def _stop_strings(value: object) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, Sequence) or not all(isinstance(s, str) and s for s in stops):
        raise OptionError(
            f"{option('stop')} must be a non-empty string or several of them, is {value!r:.80}"
        )
    return tuple(stops)


def schema_of(value: Any) -> Any:
    """Return the JSON schema of a type; what is no type as it is.

    Raises:
        OptionError: there is no schema of it.
    """
    if isinstance(value, str | Mapping | list | bool | int | float | None):
        return value
    from pydantic import PydanticUserError, TypeAdapter

    try:
        return TypeAdapter(value).json_schema()
    except (PydanticUserError, NameError, TypeError) as error:
        line = str(error).partition("\n")[0]
        raise OptionError(
            f"there is no {option('json_schema')} of {value!r:.80}: {line}"
        ) from error


def _schema_text(value: object) -> str:
    """Return the JSON text of a schema in any of its forms."""
    schema = schema_of(value)
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(schema, ensure_ascii=False)
    except RecursionError as error:
        raise OptionError(f"{option('json_schema')} is nested too deeply") from error
    except (TypeError, ValueError) as error:
        raise OptionError(f"{option('json_schema')} is not JSON: {error}") from error
    if not isinstance(schema, Mapping) and schema is not True:
        raise OptionError(
            f"{option('json_schema')} must be a JSON object that describes the answer, "
            f"is {text[:60]}"
        )
    return text
