"""The fields of requests and responses, as JSON Schema: what bodies are checked against, and what
``/openapi.json`` publishes.

Fields that are not listed are ignored, as OpenAI-compatible servers do. It knows no meaning.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CHAT",
    "CHAT_RESPONSE",
    "COMPLETION",
    "COMPLETION_RESPONSE",
    "EFFORTS",
    "EMBEDDINGS",
    "EMBEDDINGS_RESPONSE",
    "ERROR",
    "MODEL",
    "MODELS",
    "THINKING_LIMITS",
]

Schema = dict[str, Any]

# No more than any tokenizer needs a number for.
_MOST_ID = (1 << 31) - 1


def _object(*required: str, **properties: Schema) -> Schema:
    """An object with these fields, of which the ``required`` ones must be there."""
    return {"type": "object", "required": list(required), "properties": properties}


def _whole(**properties: Schema) -> Schema:
    """An object with all of these fields."""
    return _object(*properties, **properties)


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _number(low: float, high: float) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def _integer(low: int, high: int) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def _nullable(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


_STRING: Schema = {"type": "string"}
_FILLED: Schema = {"type": "string", "minLength": 1}
_COUNT: Schema = {"type": "integer"}
_TEXT = _nullable(_STRING)
_FLAG: Schema = {"type": ["boolean", "null"]}
_IDS = _list({"type": "integer", "minimum": 0, "maximum": _MOST_ID}, minItems=1)
_PROMPTS = "a text, a list of texts, token ids, or a list of lists of token ids"
_BIAS: Schema = {"type": "number", "minimum": -100, "maximum": 100}

# -- requests --------------------------------------------------------------------------------------

_SAMPLING: dict[str, Schema] = {
    "model": _TEXT,
    "max_tokens": _integer(1, _MOST_ID),
    "temperature": _number(0, 100),
    "top_p": _number(0, 1),
    "n": _integer(1, 1024),
    "stop": {**_FILLED, "type": ["string", "array", "null"], "maxItems": 16, "items": _FILLED},
    "seed": _integer(-(1 << 63), (1 << 63) - 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "logit_bias": {
        "type": ["object", "null"],
        "patternProperties": {"^[0-9]{1,9}$": _BIAS},
        "additionalProperties": False,
    },
    "stream": _FLAG,
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _FLAG}},
    "top_k": _integer(-1, _MOST_ID),
    "min_p": _number(0, 1),
    "typical_p": _number(0, 1),
    "dry_multiplier": _number(0, 100),
    "dry_base": _number(1, 100),
    "dry_allowed_length": _integer(1, _MOST_ID),
    "dry_penalty_last_n": _integer(-1, _MOST_ID),
    "dry_sequence_breakers": _nullable(_list({**_FILLED, "maxLength": 40}, maxItems=64)),
    "xtc_probability": _number(0, 1),
    "xtc_threshold": _number(0, 1),
    "repetition_penalty": _number(0.01, 100),
    "ignore_eos": _FLAG,
}

_FUNCTION = _object(
    "name",
    name={"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
    description=_TEXT,
    parameters=_nullable({"type": "object"}),
    strict=_FLAG,
)

_CALL = _object(
    "function",
    id=_TEXT,
    type={"enum": ["function", None]},
    function=_whole(name=_STRING, arguments=_STRING),
)

_MESSAGE = _object(
    "role",
    role={"enum": ["system", "developer", "user", "assistant", "tool"]},
    content={
        "type": ["string", "array", "null"],
        "items": {
            **_whole(type=_STRING),
            "if": {"properties": {"type": {"const": "text"}}},
            "then": _whole(text=_STRING),
        },
    },
    name=_TEXT,
    tool_call_id=_TEXT,
    tool_calls=_nullable(_list(_CALL)),
    reasoning_content=_TEXT,
    reasoning=_TEXT,
    prefix=_FLAG,
)

# Of OpenAI and others, and what they are here.
EFFORTS: dict[str, bool | str] = {
    "none": False,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
# localrt's own name, vLLM's and llama.cpp's; -1 is no limit.
THINKING_LIMITS = ("thinking_tokens", "thinking_token_budget", "thinking_budget_tokens")

_RESPONSE_FORMAT: Schema = {
    **_nullable(
        _object(
            "type",
            type={"enum": ["text", "json_object", "json_schema"]},
            json_schema=_object(
                "schema", name=_TEXT, description=_TEXT, schema={"type": "object"}, strict=_FLAG
            ),
        )
    ),
    "if": {"properties": {"type": {"const": "json_schema"}}, "type": "object"},
    "then": {"required": ["json_schema"]},
}

_TOOL_CHOICE: Schema = {
    "description": '"none", "auto", "required", or an object that names a function',
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        _whole(type={"enum": ["function"]}, function=_whole(name=_STRING)),
    ],
}

CHAT = _object(
    "messages",
    **_SAMPLING,
    messages=_list(_MESSAGE, minItems=1),
    max_completion_tokens=_integer(1, _MOST_ID),
    logprobs=_FLAG,
    top_logprobs=_integer(0, 20),
    tools=_nullable(_list(_whole(type={"enum": ["function"]}, function=_FUNCTION))),
    tool_choice=_TOOL_CHOICE,
    response_format=_RESPONSE_FORMAT,
    reasoning_effort={"enum": [*EFFORTS, None]},
    chat_template_kwargs=_nullable(
        _object(enable_thinking=_FLAG, thinking=_FLAG, reasoning_effort={"enum": [*EFFORTS, None]})
    ),
    **dict.fromkeys(THINKING_LIMITS, _integer(-1, _MOST_ID)),
)


def _prompts(text: Schema) -> Schema:
    kinds = [text, _list(text, minItems=1), _IDS, _list(_IDS, minItems=1)]
    return {"description": _PROMPTS, "anyOf": kinds}


COMPLETION = _object(
    "prompt",
    **_SAMPLING,
    prompt=_prompts(_STRING),
    logprobs=_integer(0, 20),
    echo=_FLAG,
    suffix=_TEXT,
    best_of=_integer(1, 1024),
)

EMBEDDINGS = _object(
    "input",
    model=_TEXT,
    input=_prompts(_FILLED),
    encoding_format={"enum": ["float", "base64", None]},
    dimensions=_integer(1, _MOST_ID),
)

# -- responses -------------------------------------------------------------------------------------

_USAGE = _object(
    "prompt_tokens",
    "total_tokens",
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
)
_REASON: Schema = {"enum": ["stop", "length", "tool_calls"]}
_LOGPROBS: Schema = {"type": ["object", "null"]}


def _response(kind: str, **choice: Schema) -> Schema:
    return _whole(
        id=_STRING,
        object={"const": kind},
        created=_COUNT,
        model=_STRING,
        choices=_list(_whole(index=_COUNT, **choice, finish_reason=_REASON, logprobs=_LOGPROBS)),
        usage=_USAGE,
    )


CHAT_RESPONSE = _response(
    "chat.completion", message=_whole(role={"const": "assistant"}, content=_TEXT)
)
COMPLETION_RESPONSE = _response("text_completion", text=_STRING)

_VECTOR = _whole(
    object={"const": "embedding"},
    index=_COUNT,
    embedding={"type": ["array", "string"], "items": {"type": "number"}},
)
EMBEDDINGS_RESPONSE = _whole(
    object={"const": "list"}, data=_list(_VECTOR), model=_STRING, usage=_USAGE
)

MODEL = _whole(
    id=_STRING, object={"const": "model"}, created=_COUNT, owned_by=_STRING
)  # an adapter has its base as ``parent``, too
MODELS = _whole(object={"const": "list"}, data=_list(MODEL))
ERROR = _whole(error=_whole(message=_STRING, type=_STRING, param=_TEXT, code=_TEXT))
