"""Ollama's store, read in place: a manifest for each name, and blobs named by their checksum.

    manifests/registry.ollama.ai/library/llama3.2/3b    JSON: layers with a type, a digest, a size
    blobs/sha256-DIGEST                                 the GGUF file, template, parameters, ...

Nothing is written there. Knows manifests, not what is in a GGUF file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localrt.errors import CheckpointError
from localrt.hub.extras import Extras

__all__ = ["OllamaModel", "find_ollama_model", "ollama_models"]

_TYPE = "application/vnd.ollama.image."
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_LARGEST_TEXT = 4 << 20  # a template, a licence, parameters


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """``name`` is as Ollama prints it, ``bytes`` counts all layers. ``blobs`` are files by kind:
    ``"model"``, ``"template"``, ``"system"``, ``"params"``, ``"adapter"``, ``"license"``.
    """

    name: str
    manifest: Path
    bytes: int
    blobs: Mapping[str, Sequence[Path]] = field(repr=False)

    @property
    def path(self) -> Path:
        """The GGUF file."""
        return self.blobs["model"][0]

    @property
    def quantization(self) -> str | None:
        """What the config says, such as ``"Q4_K_M"``."""
        return self._config().get("file_type") or None

    def extras(self) -> Extras:
        """What is kept beside the weights.

        Raises:
            CheckpointError: a layer cannot be read.
        """
        params = self._texts("params")
        try:
            values = json.loads(params[0]) if params else {}
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise CheckpointError(f"the parameters of {self.name} in Ollama's store are not JSON")
        return Extras(
            go_template="".join(self._texts("template") or self._texts("prompt")) or None,
            system="\n".join(self._texts("system")) or None,
            params=values,
            adapters=tuple(self.blobs.get("adapter", ())),
            license="\n".join(self._texts("license")) or None,
        )

    def _texts(self, kind: str) -> list[str]:
        return [_read(path, self.name) for path in self.blobs.get(kind, ())]

    def _config(self) -> dict[str, Any]:
        try:
            values = json.loads(_read(self.blobs["config"][0], self.name))
        except (CheckpointError, LookupError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}


def ollama_models(folders: Sequence[Path]) -> list[OllamaModel]:
    """The complete models with a GGUF file, by name; the first folder that has a name counts."""
    found: dict[str, OllamaModel] = {}
    for folder in folders:
        for manifest in _manifests(folder / "manifests"):
            name = _shown(manifest.relative_to(folder / "manifests"))
            model = _read_model(name, manifest, folder / "blobs")
            if model is not None:
                found.setdefault(name, model)
    return [found[name] for name in sorted(found)]


def find_ollama_model(name: str, folders: Sequence[Path]) -> OllamaModel | None:
    """The model that Ollama calls so: ``llama3.2``, ``llama3.2:3b``, ``user/name``."""
    wanted = name.lower() if ":" in name.rpartition("/")[2] else f"{name.lower()}:{_TAG}"
    return next((each for each in ollama_models(folders) if each.name.lower() == wanted), None)


def _manifests(root: Path) -> Iterator[Path]:
    """``HOST/NAMESPACE/NAME/TAG``; what cannot be entered is not there."""
    try:
        yield from sorted(path for path in root.glob("*/*/*/*") if path.is_file())
    except OSError:
        return


def _shown(parts: Path) -> str:
    host, namespace, name, tag = parts.parts
    inside = name if namespace == _NAMESPACE and host == _HOST else f"{namespace}/{name}"
    return f"{inside if host == _HOST else f'{host}/{inside}'}:{tag}"


def _read_model(name: str, manifest: Path, blobs: Path) -> OllamaModel | None:
    """None where it is not all there, or has no GGUF file: a model of the cloud, say."""
    try:
        values = json.loads(_read(manifest, name))
        layers = [*values["layers"], {**values["config"], "mediaType": f"{_TYPE}config"}]
        by_kind: dict[str, list[Path]] = {}
        size = 0
        for layer in layers:
            kind, digest = str(layer["mediaType"]), _DIGEST.fullmatch(str(layer["digest"]))
            if digest is None or not kind.startswith(_TYPE):
                continue
            by_kind.setdefault(kind.removeprefix(_TYPE), []).append(blobs / f"sha256-{digest[1]}")
            size += int(layer["size"])
    except (CheckpointError, LookupError, TypeError, ValueError):
        return None
    weights = by_kind.get("model", [])
    return OllamaModel(name, manifest, size, by_kind) if weights and _is_gguf(weights[0]) else None


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False


def _read(path: Path, name: str) -> str:
    try:
        with path.open("rb") as stream:
            return stream.read(_LARGEST_TEXT).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise CheckpointError(
            f"{name} in Ollama's store: {path} cannot be read: {reason}"
        ) from error
