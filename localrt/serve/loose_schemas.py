"""What a response says of a schema that could be followed in part only.

A whole answer is checked against the schema as it was given, in a process of its own: expressions
of a client's must not hold the server up, and a reference must not reach for files or hosts.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["FOLLOWED", "LOOSENED", "follows"]

LOOSENED, FOLLOWED = "x-localrt-schema-loosened", "x-localrt-schema-followed"
"""Headers: the keywords that were left out, and whether the answer follows these, too."""

_SECONDS = 5.0
_CHECK = """
import json, sys, fastjsonschema, fastjsonschema.ref_resolver as resolver
def refused(*given, **options): raise ValueError("a reference to somewhere else")
resolver.resolve_remote = refused
schema, texts = json.load(sys.stdin)
check = fastjsonschema.compile(schema, use_default=False)
try:
    for text in texts:
        check(json.loads(text))
except fastjsonschema.JsonSchemaValueException:
    print("false")
else:
    print("true")
"""


async def follows(schema: Any, texts: Sequence[str]) -> Mapping[str, str]:
    """The header that says whether ``texts`` follow ``schema``; none if it cannot be told."""
    found = await asyncio.to_thread(_checked, json.dumps([schema, list(texts)]))
    return {FOLLOWED: found} if found in ("true", "false") else {}


def _checked(given: str) -> str:
    try:
        return subprocess.run(
            [sys.executable, "-c", _CHECK],
            input=given,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
