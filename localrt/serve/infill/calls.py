"""What a request to fill in the middle asks for, in the library's words.

It reads fields that have been checked against ``schemas``, and starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localrt.serve.calls import Call, completion_call
from localrt.serve.infill import schemas

__all__ = ["fim_call", "infill_call"]

Fields = Mapping[str, Any]

_FILE = "tmp"  # llama.cpp's name for one without


def fim_call(fields: Fields) -> Call:
    """Of Mistral's ``/v1/fim/completions``."""
    known = _known(fields, schemas.FIM)
    if known.get("seed") is None:
        known["seed"] = fields.get("random_seed")
    call = completion_call({**known, "suffix": None})
    return _filling(call, fields["prompt"], fields.get("suffix") or "")


def infill_call(fields: Fields) -> Call:
    """Of llama.cpp's ``/infill``."""
    known = _known(fields, schemas.INFILL)
    count = fields.get("n_predict")
    if count is not None:  # below zero there is no limit; 0 only reads the prompt
        known["max_tokens"] = max(1, count) if count >= 0 else None
    before = fields["input_prefix"] + (fields.get("prompt") or "")
    call = completion_call({**known, "prompt": before})
    files = [
        (each.get("filename") or _FILE, each["text"]) for each in fields.get("input_extra") or ()
    ]
    lines: dict[str, Any] = {}
    if fields.get("n_indent"):
        lines["min_indent"] = fields["n_indent"]
    if (fields.get("t_max_predict_ms") or 0) > 0:
        lines["line_seconds"] = fields["t_max_predict_ms"] / 1000
    # Editors send what they have, and do not know the context.
    options = {**call.options, **lines, "overflow": "drop_oldest"}
    call = replace(call, options=options)
    return _filling(call, before, fields["input_suffix"], files=files)


def _known(fields: Fields, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in schema["properties"]}


def _filling(call: Call, before: str, behind: str, **more: Any) -> Call:
    return replace(call, prompts=[{"prompt": before, "suffix": behind, **more}])
