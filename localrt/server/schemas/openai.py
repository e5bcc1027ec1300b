"""OpenAI's fields, and additional ones of vLLM, llama.cpp, Mistral and Jina, as JSON Schema. Fields
that are not listed are ignored.
"""

from __future__ import annotations

from localrt.server.schemas.parts import (
    ARGUMENTS,
    CONTENT,
    FILLED,
    FLAG,
    FORMAT,
    IDS,
    MOST_ID,
    STRING,
    TEXT,
    TOOL_CHOICE,
    Schema,
    fields,
    integer,
    list_of,
    nullable,
    number,
    object_of,
    whole,
)

_MOST_PROMPTS = 16384
_PROMPTS = (
    "a text, a list of texts, token ids, or a list of lists of token ids "
    f"(lists of at most {_MOST_PROMPTS})"
)
_BIAS: Schema = {"type": "number", "minimum": -100, "maximum": 100}


_SAMPLING: dict[str, Schema] = {
    **fields("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "stream"),
    **fields("repeat_penalty", "presence_penalty", "frequency_penalty"),
    "model": TEXT,
    "service_tier": TEXT,
    "max_tokens": integer(-1, MOST_ID),
    "n": integer(1, 1024),
    "logit_bias": {
        "type": ["object", "null"],
        "maxProperties": 4096,  # each one slows down every token
        "patternProperties": {"^[0-9]{1,9}$": _BIAS},
        "additionalProperties": False,
    },
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": FLAG}},
    "dry_multiplier": number(0, 100),
    "dry_base": number(1, 100),
    "dry_allowed_length": integer(1, MOST_ID),
    "dry_penalty_last_n": integer(-1, MOST_ID),
    "dry_sequence_breakers": nullable(list_of({**FILLED, "maxLength": 40}, maxItems=64)),
    "xtc_probability": number(0, 1),
    "xtc_threshold": number(0, 1),
    "repetition_penalty": number(0.01, 100),
    "ignore_eos": FLAG,
    "response_format": FORMAT,
    # Other servers' names of this, see ``calls``.
    **fields("format"),
    "json_schema": {"type": ["object", "string", "null"]},  # an object, or its JSON text
    **dict.fromkeys(("grammar", "regex"), TEXT),
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

# Names in localrt, vLLM and llama.cpp; -1 means no limit.
THINKING_LIMITS = ("thinking_tokens", "thinking_token_budget", "thinking_budget_tokens")

_CONVERSATION = {"messages": list_of(_MESSAGE, minItems=1), **fields("tools")}


def _prompts(*others: Schema) -> Schema:
    several = (list_of(each, minItems=1, maxItems=_MOST_PROMPTS) for each in (STRING, IDS))
    return {"description": _PROMPTS, "anyOf": [STRING, IDS, *several, *others]}


REQUESTS: dict[str, Schema] = {
    "CHAT": object_of(
        "messages",
        **_SAMPLING,
        **_CONVERSATION,
        **fields("top_logprobs"),
        max_completion_tokens=integer(-1, MOST_ID),
        logprobs=FLAG,
        tool_choice=TOOL_CHOICE,
        functions=nullable(list_of(object_of("name", name=FILLED))),
        function_call={"anyOf": [{"enum": ["none", "auto", None]}, whole(name=STRING)]},
        parallel_tool_calls=FLAG,
        reasoning_effort=TEXT,
        chat_template_kwargs=nullable(
            object_of(enable_thinking=FLAG, thinking=FLAG, reasoning_effort=TEXT)
        ),
        **dict.fromkeys(THINKING_LIMITS, integer(-1, MOST_ID)),
    ),
    "COMPLETION": object_of(
        "prompt",
        **_SAMPLING,
        prompt=_prompts(),
        logprobs=integer(0, 20),
        echo=FLAG,
        suffix=TEXT,
        best_of=integer(1, 1024),
    ),
    "EMBEDDINGS": object_of(
        "input",
        **fields("dimensions"),
        model=TEXT,
        input=_prompts(list_of({}, maxItems=0)),
        encoding_format={"enum": ["float", "base64", None]},
    ),
    "RERANK": object_of(
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
    ),
    "TOKENIZE": object_of(
        **_CONVERSATION,
        model=TEXT,
        content=TEXT,
        prompt=TEXT,
        add_special=FLAG,
        add_special_tokens=FLAG,
        parse_special=FLAG,
        with_pieces=FLAG,
        return_token_strs=FLAG,
    ),
    "DETOKENIZE": object_of("tokens", model=TEXT, tokens={**IDS, "minItems": 0}),
    "FIM": object_of(
        "prompt", **_SAMPLING, prompt=STRING, suffix=TEXT, random_seed=_SAMPLING["seed"]
    ),
    "INFILL": object_of(
        "input_prefix",
        "input_suffix",
        **{name: one for name, one in _SAMPLING.items() if name not in ("n", "stream_options")},
        input_prefix=STRING,
        input_suffix=STRING,
        input_extra=nullable(list_of(object_of("text", text=STRING, filename=TEXT), maxItems=1024)),
        prompt=TEXT,
        n_predict=integer(-2, MOST_ID),
        n_indent=integer(0, MOST_ID),
        t_max_predict_ms=number(-1, MOST_ID),
        response_fields=nullable(list_of(STRING, maxItems=256)),
    ),
}
