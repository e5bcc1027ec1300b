"""JSON Schemas of the bodies of all dialects, by name: requests are checked, answers described."""

from __future__ import annotations

from collections.abc import Mapping

from localrt.server.schemas import anthropic, ollama, openai, responses
from localrt.server.schemas.parts import Schema

_DIALECTS = (openai, responses, anthropic, ollama)

REQUESTS: Mapping[str, Schema] = {
    name: schema for dialect in _DIALECTS for name, schema in dialect.REQUESTS.items()
}
SCHEMAS: Mapping[str, Schema] = {
    name: schema
    for dialect in _DIALECTS
    for name, schema in (*dialect.REQUESTS.items(), *dialect.RESPONSES.items())
}
