"""OpenAI's chat and text completions: their request schemas, and requests as calls.

Rules between fields are checked here. Nothing is started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from localrt.server.dialect import GenerationRequest, effort, prompts_of, schema_of, tier_of
from localrt.server.errors import invalid
from localrt.server.messages import (
    Fields,
    Note,
    PromptMessage,
    chosen,
    content_of,
    made_call,
    messages_of,
    offered,
    thought,
    unnoted,
)
from localrt.server.request_schema import (
    ARGUMENTS,
    CONTENT,
    FILLED,
    FLAG,
    FORMAT,
    IDS,
    STRING,
    TEXT,
    TOOL_CHOICE,
    Field,
    RequestSchema,
    Schema,
    Table,
    integer,
    limit,
    list_of,
    nullable,
    number,
    object_of,
    required,
    shared,
)

_KEPT = ("name", "tool_call_id", "prefix")  # fields of messages that are kept
_BINDING = ("json_schema", "regex", "grammar")  # fields, and options, that constrain an answer

# -- fields ----------------------------------------------------------------------------------------

_MOST_PROMPTS = 16384
_PROMPTS = (
    "a text, a list of texts, token ids, or a list of lists of token ids "
    f"(lists of at most {_MOST_PROMPTS})"
)
_BIAS: Schema = {"type": "number", "minimum": -100, "maximum": 100}
_MAX_TOKENS = Field(integer(-1), "max_tokens", limit)
_THINKING_LIMIT = Field(integer(-1), "thinking_tokens", limit)

# OpenAI's, and those of vLLM, llama.cpp, LM Studio and SGLang.
SAMPLING: Table = {
    **shared("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "stream"),
    **shared("repeat_penalty", "presence_penalty", "frequency_penalty"),
    "repetition_penalty": shared("repeat_penalty")["repeat_penalty"],
    "model": Field(TEXT),
    "service_tier": Field(TEXT),
    "max_tokens": _MAX_TOKENS,
    "n": Field(integer(1, 1024)),
    "logit_bias": Field(
        {
            "type": ["object", "null"],
            "maxProperties": 4096,  # each one slows down every token
            "patternProperties": {"^[0-9]{1,9}$": _BIAS},
            "additionalProperties": False,
        },
        "logit_bias",
        lambda given: {int(token): bias for token, bias in given.items()} or None,
    ),
    "stream_options": Field({"type": ["object", "null"], "properties": {"include_usage": FLAG}}),
    "dry_multiplier": Field(number(0, 100), "dry_multiplier"),
    "dry_base": Field(number(1, 100), "dry_base"),
    "dry_allowed_length": Field(integer(1), "dry_allowed_length"),
    "dry_penalty_last_n": Field(integer(-1), "dry_penalty_last_n"),
    "dry_sequence_breakers": Field(
        nullable(list_of({**FILLED, "maxLength": 40}, maxItems=64)), "dry_sequence_breakers"
    ),
    "xtc_probability": Field(number(0, 1), "xtc_probability"),
    "xtc_threshold": Field(number(0, 1), "xtc_threshold"),
    "ignore_eos": Field(FLAG, "ignore_eos"),
    "response_format": Field(FORMAT),
    **shared("format"),
    "json_schema": Field({"type": ["object", "string", "null"]}),  # an object, or its JSON text
    "grammar": Field(TEXT),
    "regex": Field(TEXT),
}

_CALL = object_of(
    id=TEXT,
    function=nullable(object_of("name", name=STRING, arguments=ARGUMENTS)),
    custom=nullable(object_of("name", name=STRING, input=TEXT)),
)
_MESSAGE = object_of(
    "role",
    role={"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
    content=CONTENT,
    refusal=TEXT,
    name=TEXT,
    tool_call_id=TEXT,
    tool_calls=nullable(list_of(_CALL)),
    function_call=nullable(object_of(name=TEXT, arguments=ARGUMENTS)),
    reasoning_content=TEXT,
    reasoning=TEXT,
    prefix=FLAG,
)
MESSAGES = list_of(_MESSAGE, minItems=1)


def prompts_schema(*others: Schema) -> Schema:
    """Return the schema of one or several prompts, as texts or token ids."""
    several = (list_of(each, minItems=1, maxItems=_MOST_PROMPTS) for each in (STRING, IDS))
    return {"description": _PROMPTS, "anyOf": [STRING, IDS, *several, *others]}


CHAT = RequestSchema(
    {
        **SAMPLING,
        **shared("tools", "top_logprobs"),
        "messages": required(MESSAGES),
        "max_completion_tokens": _MAX_TOKENS,
        "logprobs": Field(FLAG),
        "tool_choice": Field(TOOL_CHOICE),
        "functions": Field(nullable(list_of(object_of("name", name=FILLED)))),
        "function_call": Field(
            {"anyOf": [{"enum": ["none", "auto", None]}, object_of("name", name=STRING)]}
        ),
        "parallel_tool_calls": Field(FLAG),
        "reasoning_effort": Field(TEXT),
        "chat_template_kwargs": Field(
            nullable(object_of(enable_thinking=FLAG, thinking=FLAG, reasoning_effort=TEXT))
        ),
        # Names in llama.cpp, vLLM and localrt; -1 means no limit.
        "thinking_budget_tokens": _THINKING_LIMIT,
        "thinking_token_budget": _THINKING_LIMIT,
        "thinking_tokens": _THINKING_LIMIT,
    }
)
COMPLETION = RequestSchema(
    {
        **SAMPLING,
        "prompt": required(prompts_schema()),
        "logprobs": Field(integer(0, 20), "logprobs"),
        "echo": Field(FLAG),
        "suffix": Field(TEXT),
        "best_of": Field(integer(1, 1024)),
    }
)

# -- calls -----------------------------------------------------------------------------------------


def chat_call(fields: Fields, note: Note = unnoted) -> GenerationRequest:
    """Return the call for a chat; ``note`` is called for content that cannot be shown to a model.

    Raises:
        ApiError: 400, fields that do not go together or are not supported.
    """
    legacy = bool(fields.get("functions")) and not fields.get("tools")
    if legacy:
        named = fields.get("function_call")
        fields = {
            **fields,
            "tools": [{"type": "function", "function": one} for one in fields["functions"]],
            "tool_choice": {"type": "function", **named} if isinstance(named, Mapping) else named,
        }
    options = CHAT.options(fields) | _form(fields) | _thinking(fields)
    if fields.get("logprobs"):
        options["logprobs"] = fields.get("top_logprobs") or 0
    tools = offered(fields.get("tools"), note)
    choice, functions = chosen(fields.get("tool_choice"), tools)
    if choice != "auto":
        options["tool_choice"] = choice
    return GenerationRequest(
        prompts=[{"prompt": _messages(fields["messages"], note), "tools": functions or None}],
        options=options,
        choices=fields.get("n") or 1,
        logprobs=bool(fields.get("logprobs")),
        parallel_tools=fields.get("parallel_tool_calls") is not False and not legacy,
        known=tools.known,
        legacy=legacy,
        request_class=tier_of(fields),
        **_common(fields),
    )


def completion_call(fields: Fields) -> GenerationRequest:
    """Return the call for a text completion.

    Raises:
        ApiError: 400, fields that do not go together or are not supported.
    """
    choices = fields.get("n") or 1
    if (fields.get("best_of") or choices) != choices:
        raise invalid("best_of is not supported: ask for n answers and choose", "best_of")
    options = COMPLETION.options(fields) | _form(fields)
    texts = prompts_of(fields["prompt"])
    echo, only_reads = bool(fields.get("echo")), options.get("max_tokens") == 0
    if only_reads:
        del options["max_tokens"]
    suffix = fields.get("suffix") or None
    if suffix is not None and not all(isinstance(text, str) for text in texts):
        raise invalid("suffix needs prompts that are texts", "suffix")
    if suffix is not None and (only_reads or (echo and "logprobs" in options)):
        raise invalid("suffix needs max_tokens, and has no log-probabilities to echo", "suffix")
    kind = tier_of(fields)
    if len(texts) > 1 or echo or only_reads:  # requests of programs, not of users
        kind = "background"
    own = {"raw": True} if suffix is None else {"suffix": suffix}
    return GenerationRequest(
        prompts=[
            {"prompt": text, **own} if isinstance(text, str) else {"token_ids": text}
            for text in texts
        ],
        options=options,
        choices=choices,
        logprobs="logprobs" in options,
        echo=echo,
        only_reads=only_reads,
        request_class=kind,
        **_common(fields),
    )


def _common(fields: Fields) -> dict[str, Any]:
    usage = (fields.get("stream_options") or {}).get("include_usage")
    return {"stream": bool(fields.get("stream")), "include_usage": bool(usage)}


def _form(fields: Fields) -> dict[str, object]:
    """Return the option that constrains the answer.

    Raises:
        ApiError: 400, there are several different ones.
    """
    found = {
        name: (name, fields[name])
        for name in _BINDING
        if fields.get(name) not in (None, "")  # llama.cpp treats "" as none
    }
    schema = schema_of(fields.get("response_format") or {}, "response_format")
    if schema is not None:
        found["response_format"] = "json_schema", schema
    if wanted := fields.get("format"):
        found["format"] = "json_schema", {"type": "object"} if wanted == "json" else wanted
    if any(one != other for one, other in pairwise(found.values())):
        raise invalid(f"{' and '.join(found)} cannot be combined: give one of them", [*found][-1])
    return dict(found.values())


def _thinking(fields: Fields) -> dict[str, Any]:
    """Whether and how much the model should think, by several servers' fields."""
    options: dict[str, object] = {}
    told = fields.get("chat_template_kwargs") or {}
    efforts = (one for one in (told, fields) if one.get("reasoning_effort") is not None)
    if (given := next(efforts, None)) is not None:
        options["thinking"] = effort(given["reasoning_effort"])
    switches = (told.get(name) for name in ("enable_thinking", "thinking"))
    switch = next((one for one in switches if one is not None), None)
    if switch is False or (switch and not options.get("thinking")):
        options["thinking"] = switch
    return options


# -- messages --------------------------------------------------------------------------------------


def _messages(messages: Sequence[Fields], note: Note) -> list[PromptMessage]:
    """Return messages in the form of chat templates."""
    found: list[PromptMessage] = []
    called = ""  # the id of the last call that came without one
    for place, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        if role in ("tool", "function"):
            shown: PromptMessage = {"role": "tool", "content": content_of(content, note, "\n")}
            shown |= {"tool_call_id": called} if role == "function" else {}
        else:
            parts = messages_of(role, content, note, between="\n")
            if not parts or (role == "assistant" and parts[-1]["role"] != role):
                parts.append({"role": role, "content": message.get("refusal") or ""})
            *before, shown = parts
            found += before
        shown |= {name: message[name] for name in _KEPT if message.get(name)}
        calls = [_called(call) for call in message.get("tool_calls") or ()]
        if (former := message.get("function_call")) is not None:
            called = f"call_{place}"
            calls.append(made_call(called, str(former.get("name")), former.get("arguments")))
        if calls:  # some clients also repeat calls in the content
            ids = {call["id"] for call in calls}
            more = [call for call in shown.get("tool_calls", ()) if call["id"] not in ids]
            shown["tool_calls"] = [*more, *calls]
        if thinking := message.get("reasoning_content") or message.get("reasoning"):
            shown |= thought(thinking)
        found.append(shown)
    return found


def _called(call: Fields) -> PromptMessage:
    """Return a message's call; for a tool that takes a text, the text is its argument."""
    if isinstance(custom := call.get("custom"), Mapping):
        argument = {"input": custom.get("input") or ""}
        return made_call(call.get("id"), str(custom.get("name")), argument)
    given = call.get("function") or {}
    return made_call(call.get("id"), str(given.get("name")), given.get("arguments"))
