"""The fields of requests to fill in the middle. Fields that are not listed are ignored."""

from __future__ import annotations

from localrt.server.openai.schemas import COMPLETION
from localrt.server.schema_parts import (
    COUNT,
    FLAG,
    MOST_ID,
    STRING,
    TEXT,
    Schema,
    integer,
    list_of,
    nullable,
    number,
    object_of,
)

__all__ = ["FIM", "INFILL", "INFILL_RESPONSE"]


_OTHERS = ("prompt", "suffix", "logprobs", "echo", "best_of")
_SAMPLING: dict[str, Schema] = {
    name: schema for name, schema in COMPLETION["properties"].items() if name not in _OTHERS
}

FIM = object_of("prompt", **_SAMPLING, prompt=STRING, suffix=TEXT, random_seed=_SAMPLING["seed"])

INFILL = object_of(
    "input_prefix",
    "input_suffix",
    **{name: schema for name, schema in _SAMPLING.items() if name not in ("n", "stream_options")},
    input_prefix=STRING,
    input_suffix=STRING,
    input_extra=nullable(list_of(object_of("text", text=STRING, filename=TEXT), maxItems=1024)),
    prompt=TEXT,
    n_predict=integer(-2, MOST_ID),
    n_indent=integer(0, MOST_ID),
    t_max_predict_ms=number(-1, MOST_ID),
    response_fields=nullable(list_of(STRING, maxItems=256)),
)
INFILL_RESPONSE: Schema = {
    "type": "object",
    "properties": {
        "content": STRING,
        "stop": FLAG,
        "tokens_predicted": COUNT,
        "tokens_evaluated": COUNT,
        "tokens_cached": COUNT,
    },
}
