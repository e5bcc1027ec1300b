"""Fake stores of other programs: what they hold is a few bytes, or a real file that is linked."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["add_ollama_model"]

_TYPE = "application/vnd.ollama.image."


def add_ollama_model(
    root: Path, name: str, weights: bytes | Path = b"GGUF", **layers: bytes | str | dict[str, Any]
) -> Path:
    """``name`` is ``HOST/NAMESPACE/MODEL/TAG``; returns the blob of the weights."""
    blobs = root / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)

    def blob(kind: str, content: bytes | Path) -> dict[str, Any]:
        data = content.name.encode() if isinstance(content, Path) else content
        digest = hashlib.sha256(data).hexdigest()
        path = blobs / f"sha256-{digest}"
        if isinstance(content, Path):
            os.link(content, path)
        else:
            path.write_bytes(content)
        size = path.stat().st_size
        return {"mediaType": _TYPE + kind, "digest": f"sha256:{digest}", "size": size}

    described = [blob("model", weights)]
    for kind, value in layers.items():
        text = json.dumps(value) if isinstance(value, dict) else value
        described.append(blob(kind, text.encode() if isinstance(text, str) else text))
    config = blob("config", json.dumps({"file_type": "Q4_K_M"}).encode())
    manifest = root / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": config, "layers": described}))
    return blobs / described[0]["digest"].replace(":", "-")
