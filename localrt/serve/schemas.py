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
    "EMBEDDINGS",
    "EMBEDDINGS_RESPONSE",
    "ERROR",
    "MODEL",
    "MODELS",
]

Schema = dict[str, Any]

# No more than any tokenizer needs a number for.
_MOST_ID = (1 << 31) - 1


def _number(low: float, high: float) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def _integer(low: int, high: int) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


_TEXT: Schema = {"type": ["string", "null"]}
_FLAG: Schema = {"type": ["boolean", "null"]}
_IDS: Schema = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": _MOST_ID},
    "minItems": 1,
}
_TEXTS: Schema = {"type": "array", "items": {"type": "string"}, "minItems": 1}

_SAMPLING: dict[str, Schema] = {
    "model": _TEXT,
    "max_tokens": _integer(1, _MOST_ID),
    "temperature": _number(0, 100),
    "top_p": _number(0, 1),
    "n": _integer(1, 1024),
    "stop": {
        "type": ["string", "array", "null"],
        "minLength": 1,
        "maxItems": 16,
        "items": {"type": "string", "minLength": 1},
    },
    "seed": _integer(-(1 << 63), (1 << 63) - 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "logit_bias": {
        "type": ["object", "null"],
        "patternProperties": {"^[0-9]{1,9}$": {"type": "number", "minimum": -100, "maximum": 100}},
        "additionalProperties": False,
    },
    "stream": _FLAG,
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _FLAG}},
    "top_k": _integer(-1, _MOST_ID),
    "min_p": _number(0, 1),
    "typical_p": _number(0, 1),
    "repetition_penalty": _number(0.01, 100),
    "ignore_eos": _FLAG,
}

_FUNCTION: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
        "description": _TEXT,
        "parameters": {"type": ["object", "null"]},
        "strict": _FLAG,
    },
}

_CALL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": _TEXT,
        "type": {"enum": ["function", None]},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
        },
    },
}

_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "type": ["string", "array", "null"],
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
            },
        },
        "name": _TEXT,
        "tool_call_id": _TEXT,
        "tool_calls": {"type": ["array", "null"], "items": _CALL},
    },
}

_JSON_FORMAT: Schema = {
    "type": "object",
    "required": ["schema"],
    "properties": {
        "name": _TEXT,
        "description": _TEXT,
        "schema": {"type": "object"},
        "strict": _FLAG,
    },
}

CHAT: Schema = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        **_SAMPLING,
        "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
        "max_completion_tokens": _integer(1, _MOST_ID),
        "logprobs": _FLAG,
        "top_logprobs": _integer(0, 20),
        "tools": {
            "type": ["array", "null"],
            "items": {
                "type": "object",
                "required": ["type", "function"],
                "properties": {"type": {"enum": ["function"]}, "function": _FUNCTION},
            },
        },
        "tool_choice": {
            "description": '"none", "auto", "required", or an object that names a function',
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                {
                    "type": "object",
                    "required": ["type", "function"],
                    "properties": {
                        "type": {"enum": ["function"]},
                        "function": {
                            "type": "object",
                            "required": ["name"],
                            "properties": {"name": {"type": "string"}},
                        },
                    },
                },
            ],
        },
        "response_format": {
            "type": ["object", "null"],
            "required": ["type"],
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": _JSON_FORMAT,
            },
            "if": {"properties": {"type": {"const": "json_schema"}}, "type": "object"},
            "then": {"required": ["json_schema"]},
        },
    },
}

COMPLETION: Schema = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        **_SAMPLING,
        "prompt": {
            "description": "a text, a list of texts, token ids, or a list of lists of token ids",
            "anyOf": [
                {"type": "string"},
                _TEXTS,
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ],
        },
        "logprobs": _integer(0, 20),
        "echo": _FLAG,
        "suffix": _TEXT,
        "best_of": _integer(1, 1024),
    },
}

EMBEDDINGS: Schema = {
    "type": "object",
    "required": ["input"],
    "properties": {
        "model": _TEXT,
        "input": {
            "description": "a text, a list of texts, token ids, or a list of lists of token ids",
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ],
        },
        "encoding_format": {"enum": ["float", "base64", None]},
        "dimensions": _integer(1, _MOST_ID),
    },
}

# -- responses -------------------------------------------------------------------------------------

_USAGE: Schema = {
    "type": "object",
    "required": ["prompt_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {"type": "integer"},
        "total_tokens": {"type": "integer"},
    },
}


def _response(kind: str, choice: Schema) -> Schema:
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {"type": "array", "items": choice},
            "usage": _USAGE,
        },
    }


_REASON: Schema = {"enum": ["stop", "length", "tool_calls"]}

CHAT_RESPONSE = _response(
    "chat.completion",
    {
        "type": "object",
        "required": ["index", "message", "finish_reason", "logprobs"],
        "properties": {
            "index": {"type": "integer"},
            "message": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"const": "assistant"}, "content": _TEXT},
            },
            "finish_reason": _REASON,
            "logprobs": {"type": ["object", "null"]},
        },
    },
)

COMPLETION_RESPONSE = _response(
    "text_completion",
    {
        "type": "object",
        "required": ["index", "text", "finish_reason", "logprobs"],
        "properties": {
            "index": {"type": "integer"},
            "text": {"type": "string"},
            "finish_reason": _REASON,
            "logprobs": {"type": ["object", "null"]},
        },
    },
)

EMBEDDINGS_RESPONSE: Schema = {
    "type": "object",
    "required": ["object", "data", "model", "usage"],
    "properties": {
        "object": {"const": "list"},
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["object", "index", "embedding"],
                "properties": {
                    "object": {"const": "embedding"},
                    "index": {"type": "integer"},
                    "embedding": {"type": ["array", "string"], "items": {"type": "number"}},
                },
            },
        },
        "model": {"type": "string"},
        "usage": _USAGE,
    },
}

MODEL: Schema = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
    },
}

MODELS: Schema = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": MODEL}},
}

ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT,
                "code": _TEXT,
            },
        }
    },
}
