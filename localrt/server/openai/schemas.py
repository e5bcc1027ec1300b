"""The fields of requests and responses, as JSON Schema: what bodies are checked against, and what
``/openapi.json`` publishes.

Fields that are not listed are ignored, as OpenAI-compatible servers do. It knows no meaning.
"""

from __future__ import annotations

from localrt.server.schema_parts import (
    ARGUMENTS,
    CONTENT,
    COUNT,
    FILLED,
    FLAG,
    IDS,
    MOST_ID,
    STOPS,
    STRING,
    TEXT,
    TOOL_CHOICE,
    TOOLS,
    Schema,
    integer,
    list_of,
    nullable,
    number,
    object_of,
    whole,
)

__all__ = [
    "CHAT",
    "CHAT_RESPONSE",
    "COMPLETION",
    "COMPLETION_RESPONSE",
    "DETOKENIZE",
    "DETOKENIZED",
    "EFFORTS",
    "EMBEDDINGS",
    "EMBEDDINGS_RESPONSE",
    "ERROR",
    "MODEL",
    "MODELS",
    "RERANK",
    "RERANKED",
    "THINKING_LIMITS",
    "TOKENIZE",
    "TOKENIZED",
]


_MOST_PROMPTS = 16384
_PROMPTS = (
    "a text, a list of texts, token ids, or a list of lists of token ids "
    f"(lists of at most {_MOST_PROMPTS})"
)
_BIAS: Schema = {"type": "number", "minimum": -100, "maximum": 100}

# -- requests --------------------------------------------------------------------------------------

_SAMPLING: dict[str, Schema] = {
    "model": TEXT,
    "max_tokens": integer(-1, MOST_ID),
    "temperature": number(0, 100),
    "top_p": number(0, 1),
    "n": integer(1, 1024),
    "stop": STOPS,
    "seed": integer(-(1 << 63), (1 << 63) - 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": {
        "type": ["object", "null"],
        "maxProperties": 4096,  # every token of the answer waits for them
        "patternProperties": {"^[0-9]{1,9}$": _BIAS},
        "additionalProperties": False,
    },
    "stream": FLAG,
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": FLAG}},
    "top_k": integer(-1, MOST_ID),
    "min_p": number(0, 1),
    "typical_p": number(0, 1),
    "dry_multiplier": number(0, 100),
    "dry_base": number(1, 100),
    "dry_allowed_length": integer(1, MOST_ID),
    "dry_penalty_last_n": integer(-1, MOST_ID),
    "dry_sequence_breakers": nullable(list_of({**FILLED, "maxLength": 40}, maxItems=64)),
    "xtc_probability": number(0, 1),
    "xtc_threshold": number(0, 1),
    "repetition_penalty": number(0.01, 100),
    "repeat_penalty": number(0.01, 100),
    "ignore_eos": FLAG,
    "grammar": TEXT,
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
    reasoning_details=nullable(list_of({"type": "object"})),
    prefix=FLAG,
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
    **nullable(
        object_of(
            "type",
            type={"enum": ["text", "json_object", "json_schema"]},
            schema={"type": "object"},
            json_schema=object_of(
                "schema", name=TEXT, description=TEXT, schema={"type": "object"}, strict=FLAG
            ),
        )
    ),
    "if": {"properties": {"type": {"const": "json_schema"}}, "type": "object"},
    "then": {"required": ["json_schema"]},
}

CHAT = object_of(
    "messages",
    **_SAMPLING,
    messages=list_of(_MESSAGE, minItems=1),
    max_completion_tokens=integer(-1, MOST_ID),
    logprobs=FLAG,
    top_logprobs=integer(0, 20),
    tools=TOOLS,
    tool_choice=TOOL_CHOICE,
    functions=nullable(list_of(object_of("name", name=FILLED))),
    function_call={"anyOf": [{"enum": ["none", "auto", None]}, whole(name=STRING)]},
    parallel_tool_calls=FLAG,
    response_format=_RESPONSE_FORMAT,
    reasoning_effort=TEXT,
    chat_template_kwargs=nullable(
        object_of(enable_thinking=FLAG, thinking=FLAG, reasoning_effort=TEXT)
    ),
    **dict.fromkeys(THINKING_LIMITS, integer(-1, MOST_ID)),
)


def _prompts(text: Schema) -> Schema:
    several = (list_of(each, minItems=1, maxItems=_MOST_PROMPTS) for each in (text, IDS))
    kinds = [text, IDS, *several]
    return {"description": _PROMPTS, "anyOf": kinds}


COMPLETION = object_of(
    "prompt",
    **_SAMPLING,
    prompt=_prompts(STRING),
    logprobs=integer(0, 20),
    echo=FLAG,
    suffix=TEXT,
    best_of=integer(1, 1024),
)

EMBEDDINGS = object_of(
    "input",
    model=TEXT,
    input={"description": _PROMPTS, "anyOf": [*_prompts(STRING)["anyOf"], list_of({}, maxItems=0)]},
    encoding_format={"enum": ["float", "base64", None]},
    dimensions=integer(1, MOST_ID),
)

RERANK = object_of(
    "query",
    "documents",
    model=TEXT,
    query=FILLED,
    documents=list_of(
        {"type": ["string", "object"], "required": ["text"], "properties": {"text": STRING}},
        minItems=1,
    ),
    top_n=integer(1, MOST_ID),
    return_documents=FLAG,
    instruction=TEXT,
)
TOKENIZE = object_of(
    model=TEXT,
    content=TEXT,
    prompt=TEXT,
    messages=CHAT["properties"]["messages"],
    tools=CHAT["properties"]["tools"],
    add_special=FLAG,
    add_special_tokens=FLAG,
    parse_special=FLAG,
    with_pieces=FLAG,
    return_token_strs=FLAG,
)
DETOKENIZE = object_of("tokens", model=TEXT, tokens={**IDS, "minItems": 0})

# -- responses -------------------------------------------------------------------------------------

_USAGE = object_of(
    "prompt_tokens",
    "total_tokens",
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
)
_REASON: Schema = {"enum": ["stop", "length", "tool_calls", "function_call"]}
_LOGPROBS: Schema = {"type": ["object", "null"]}


def _response(kind: str, **choice: Schema) -> Schema:
    return whole(
        id=STRING,
        object={"const": kind},
        created=COUNT,
        model=STRING,
        choices=list_of(whole(index=COUNT, **choice, finish_reason=_REASON, logprobs=_LOGPROBS)),
        usage=_USAGE,
    )


CHAT_RESPONSE = _response(
    "chat.completion", message=whole(role={"const": "assistant"}, content=TEXT)
)
COMPLETION_RESPONSE = _response("text_completion", text=STRING)

_VECTOR = whole(
    object={"const": "embedding"},
    index=COUNT,
    embedding={"type": ["array", "string"], "items": {"type": "number"}},
)
EMBEDDINGS_RESPONSE = whole(
    object={"const": "list"}, data=list_of(_VECTOR), model=STRING, usage=_USAGE
)

RERANKED = object_of(
    "results",
    results=list_of(object_of(index=COUNT, relevance_score={"type": "number"})),
)
TOKENIZED = object_of("tokens", "count", tokens={"type": "array"}, count=COUNT)
DETOKENIZED = whole(content=STRING, prompt=STRING)

MODEL = whole(
    id=STRING, object={"const": "model"}, created=COUNT, owned_by=STRING
)  # an adapter has its base as ``parent``, too
MODELS = whole(object={"const": "list"}, data=list_of(MODEL))
ERROR = whole(error=whole(message=STRING, type=STRING, param=TEXT, code=TEXT))
