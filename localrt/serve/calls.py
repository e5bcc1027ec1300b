"""What a request asks for, in the library's words: prompts, options, and what to do with text.

It reads fields that have been checked against ``schemas``; what none of them can say is checked
here. It starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localrt.errors import OptionError
from localrt.serve.errors import invalid
from localrt.serve.schemas import EFFORTS, THINKING_LIMITS
from localrt.text.content import check_text_only
from localrt.text.thinking import THOUGHT_FIELDS

__all__ = [
    "ANY_SEED",
    "SEEDS",
    "Call",
    "chat_call",
    "chosen_tool",
    "completion_call",
    "prompts_of",
    "thought",
]

Fields = Mapping[str, Any]

SEEDS = 1 << 64
ANY_SEED = -1  # of llama.cpp, LM Studio and Ollama: another every time
_NO_LIMIT = -1  # of theirs, for tokens
_AS_THEY_ARE = (
    *("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "stop", "ignore_eos", "max_tokens"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("dry_sequence_breakers", "xtc_probability", "xtc_threshold"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A checked request. ``prompts`` are keyword arguments of ``LiveModel.submit``, one each.

    Every prompt gets ``choices`` answers. ``logprobs`` says whether they are shown, ``echo`` are
    the texts to show before the answers. Without ``parallel_tools`` an answer calls one at most.
    ``model`` is what the request names, if anything. ``overflow_in_stream``: a prompt that does not
    fit is told in the stream, where there is one.
    """

    prompts: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    echo: Sequence[str] | None = None
    parallel_tools: bool = True
    model: str | None = None
    overflow_in_stream: bool = False

    def submissions(self) -> list[dict[str, Any]]:
        """The arguments of every answer, choices of a prompt side by side."""
        seed = self.options.get("seed")
        found = []
        for prompt in self.prompts:
            for choice in range(self.choices):
                own = {} if seed is None else {"seed": (seed + choice) % SEEDS}
                found.append({**prompt, **self.options, **own})
        return found


def chat_call(fields: Fields) -> Call:
    """The call of a chat.

    Raises:
        ApiError: 400, fields that do not go together or are not supported.
    """
    for name in ("functions", "function_call"):
        if fields.get(name):
            raise invalid(f"{name} is not supported: use tools", name)
    if fields.get("max_completion_tokens") is not None:
        fields = {**fields, "max_tokens": fields["max_completion_tokens"]}
    options = _options(fields) | _thinking(fields)
    if fields.get("logprobs"):
        options["logprobs"] = fields.get("top_logprobs") or 0
    tools = list(fields.get("tools") or ())
    wanted = fields.get("response_format") or {}
    if wanted.get("type") == "json_object":  # llama.cpp's may have a schema, too
        options["json_schema"] = wanted.get("schema") or {"type": "object"}
    elif wanted.get("type") == "json_schema":
        options["json_schema"] = wanted["json_schema"]["schema"]
    given = fields.get("tool_choice") or "auto"
    named = None if isinstance(given, str) else given["function"]["name"]
    choice = chosen_tool(given if named is None else None, named, tools)
    if choice not in ("auto", "none") and "json_schema" in options:
        raise invalid("response_format and a tool that must be called exclude one another")
    if choice != "auto":
        options["tool_choice"] = choice
    messages = [_message(message) for message in fields["messages"]]
    try:
        check_text_only(messages)
    except OptionError as error:
        raise invalid(str(error), "messages") from error
    return Call(
        prompts=[{"prompt": messages, "tools": tools or None}],
        options=options,
        choices=fields.get("n") or 1,
        model=fields.get("model"),
        logprobs=bool(fields.get("logprobs")),
        parallel_tools=fields.get("parallel_tool_calls") is not False,
        **_streaming(fields),
    )


def completion_call(fields: Fields) -> Call:
    """The call of a text completion.

    Raises:
        ApiError: 400, fields that do not go together or are not supported.
    """
    choices = fields.get("n") or 1
    if (fields.get("best_of") or choices) != choices:
        raise invalid("best_of is not supported: ask for n answers and choose", "best_of")
    options = _options(fields)
    if fields.get("logprobs") is not None:
        options["logprobs"] = fields["logprobs"]
    texts = prompts_of(fields["prompt"])
    echo = None
    if fields.get("echo"):
        if "logprobs" in options:
            raise invalid("echo has no log-probabilities of the prompt: leave one out", "echo")
        if not all(isinstance(text, str) for text in texts):
            raise invalid("echo needs prompts that are texts", "echo")
        echo = [str(text) for text in texts for _ in range(choices)]
    suffix = fields.get("suffix") or None
    if suffix is not None and not all(isinstance(text, str) for text in texts):
        raise invalid("suffix needs prompts that are texts", "suffix")
    own = {"raw": True} if suffix is None else {"suffix": suffix}
    return Call(
        prompts=[
            {"prompt": text, **own} if isinstance(text, str) else {"token_ids": text}
            for text in texts
        ],
        options=options,
        choices=choices,
        model=fields.get("model"),
        logprobs="logprobs" in options,
        echo=echo,
        **_streaming(fields),
    )


def prompts_of(given: Any) -> list[str | list[int]]:
    """One text, or its ids, for each prompt."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], list):
        return [list(map(int, ids)) for ids in given]
    return list(given) if isinstance(given[0], str) else [list(map(int, given))]


def _streaming(fields: Fields) -> dict[str, Any]:
    usage = (fields.get("stream_options") or {}).get("include_usage")
    return {"stream": bool(fields.get("stream")), "include_usage": bool(usage)}


def _options(fields: Fields) -> dict[str, Any]:
    options = {name: fields[name] for name in _AS_THEY_ARE if fields.get(name) is not None}
    if options.get("max_tokens") == _NO_LIMIT:
        del options["max_tokens"]
    if fields.get("repeat_penalty") is not None:  # llama.cpp's and LM Studio's name
        options.setdefault("repetition_penalty", fields["repeat_penalty"])
    if fields.get("seed") not in (None, ANY_SEED):
        options["seed"] = fields["seed"] % SEEDS
    if fields.get("top_k") is not None:
        options["top_k"] = max(0, fields["top_k"])  # elsewhere -1 switches it off
    if fields.get("grammar"):  # in llama.cpp "" is none
        options["grammar"] = fields["grammar"]
    if fields.get("logit_bias"):
        options["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    return options


def _thinking(fields: Fields) -> dict[str, Any]:
    """Whether and how much the model is to think, in the ways of several servers."""
    options: dict[str, Any] = {}
    told = fields.get("chat_template_kwargs") or {}
    efforts = (one for one in (told, fields) if one.get("reasoning_effort") is not None)
    if (given := next(efforts, None)) is not None:
        options["thinking"] = EFFORTS[given["reasoning_effort"]]
    switches = (told.get(name) for name in ("enable_thinking", "thinking"))
    switch = next((one for one in switches if one is not None), None)
    if switch is False or (switch and not options.get("thinking")):
        options["thinking"] = switch
    limits = (fields.get(name) for name in THINKING_LIMITS)
    limit = next((one for one in limits if one is not None), -1)
    if limit >= 0:
        options["thinking_tokens"] = limit
    return options


def chosen_tool(choice: str | None, name: str | None, tools: Sequence[Mapping[str, Any]]) -> str:
    """Whether a tool is called, in the library's words: ``choice``, or the one of this ``name``.

    Raises:
        ApiError: 400, there is no such tool, or none at all.
    """
    if choice is not None:
        if choice == "required" and not tools:
            raise invalid("a tool must be called (tool_choice), and there are none", "tool_choice")
        return choice
    assert name is not None, "the schema asks for one of the two"
    if name not in (tool["function"]["name"] for tool in tools):
        raise invalid(f"tool_choice names {name[:200]!r}, which is not in tools", "tool_choice")
    return name


def _message(message: Fields) -> dict[str, Any]:
    """A message as chat templates take it."""
    role = message["role"]
    content = message.get("content")
    shown: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": "" if content is None else content,
    }
    for name in ("name", "tool_call_id", "tool_calls", "prefix"):
        if message.get(name):
            shown[name] = message[name]
    thinking = message.get("reasoning_content") or message.get("reasoning")
    return shown | thought(thinking) if thinking else shown


def thought(text: str) -> dict[str, str]:
    """The fields of an assistant's message for what it thought, by the names of all templates."""
    return dict.fromkeys(THOUGHT_FIELDS, text)
