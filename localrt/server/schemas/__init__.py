"""Request schemas (JSON Schema) of all dialects, by name."""

from __future__ import annotations

from collections.abc import Mapping

from localrt.server.schemas import anthropic, ollama, openai, responses
from localrt.server.schemas.parts import Schema

_DIALECTS = (openai, responses, anthropic, ollama)

REQUESTS: Mapping[str, Schema] = {
    name: schema for dialect in _DIALECTS for name, schema in dialect.REQUESTS.items()
}
