"""The program ``llm`` with a local model, over OpenAI's protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.conftest import Running

pytest.importorskip("llm")

MODEL = """
- model_id: local
  model_name: tiny
  api_base: "{url}/v1"
  supports_schema: true
"""


@pytest.fixture
def home(server: Running, tmp_path: Path) -> Path:
    (tmp_path / "extra-openai-models.yaml").write_text(MODEL.format(url=server.url))
    return tmp_path


def llm(home: Path, *arguments: str) -> str:
    """What it prints. It knows no plugins, and no key."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI")}
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        env={**clean, "LLM_USER_PATH": str(home), "LLM_LOAD_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_prompt_a_conversation_and_a_schema(server: Running, home: Path) -> None:
    options = ("-o", "temperature", "0", "-o", "max_tokens", "12")
    expected = server.model.generate("hi", temperature=0, max_tokens=12).text
    first = llm(home, "-m", "local", "hi", *options)
    assert first.rstrip("\n") == expected.rstrip("\n")
    assert llm(home, "-m", "local", "hi", "--no-stream", *options) == first
    assert llm(home, "-c", "why?", *options)
    pytest.importorskip("llguidance", reason="needs the structured extra")
    schema = json.dumps(
        {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
    )
    bound = ("-o", "temperature", "0", "-o", "max_tokens", "200")
    found = json.loads(llm(home, "-m", "local", "hi", "--schema", schema, *bound))
    assert isinstance(found["ok"], bool)
