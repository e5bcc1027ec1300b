"""Finds and names the models that other programs keep on this machine; they run in place.

    ollama:llama3.2:3b    lmstudio:publisher/model:Q4_K_M    llamacpp:org/model:Q4_K_M

localrt never writes or deletes their files. Ollama's names also work without the prefix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from localrt.common.errors import CheckpointError
from localrt.common.settings import Settings
from localrt.hub.files import (
    GgufVariant,
    gguf_variants,
    has_safetensors,
    variant_name,
    variant_projectors,
)
from localrt.hub.names import client_name
from localrt.models.weight_files import index_shards

# Ollama's option names -> ours.
_OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class Extras:
    """Settings that Ollama keeps for a model. ``go_template``: a chat template in Go's syntax;
    ``projectors``: its vision towers.
    """

    go_template: str | None = None
    system: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    adapters: tuple[Path, ...] = ()
    projectors: tuple[Path, ...] = ()
    license: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Generation options under localrt's names. Skips Ollama's -1: no limit, or no seed."""
        found: dict[str, Any] = {}
        for name, value in self.params.items():
            ours = _OPTIONS.get(name)
            if ours is None or (ours in ("max_tokens", "seed") and _is_below_zero(value)):
                continue
            found[ours] = [value] if ours == "stop" and isinstance(value, str) else value
        return found

    @property
    def ctx(self) -> int | None:
        """The context length, in tokens."""
        value = self.params.get("num_ctx")
        return value if isinstance(value, int) and value > 0 else None


def _is_below_zero(value: object) -> bool:
    return isinstance(value, int | float) and value < 0


_TYPE = "application/vnd.ollama.image."
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_LARGEST_TEXT = 4 << 20  # a template, a licence, parameters


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """``name`` is as Ollama prints it; ``bytes`` is the size of all layers. ``blobs`` maps a kind
    (``"model"``, ``"template"``, ``"system"``, ``"params"``, ``"adapter"``, ...) to its files.
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
        """The quantization that the config names, such as ``"Q4_K_M"``."""
        return self._config().get("file_type") or None

    def extras(self) -> Extras:
        """Read the template, parameters and other settings stored with the weights.

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
            projectors=tuple(self.blobs.get("projector", ())),
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
    """Return the complete GGUF models, sorted by name; for equal names the first folder wins."""
    found: dict[str, OllamaModel] = {}
    for folder in folders:
        for manifest in _manifests(folder / "manifests"):
            name = _shown(manifest.relative_to(folder / "manifests"))
            model = _read_model(name, manifest, folder / "blobs")
            if model is not None:
                found.setdefault(name, model)
    return [found[name] for name in sorted(found)]


def find_ollama_model(name: str, folders: Sequence[Path]) -> OllamaModel | None:
    """Find a model by Ollama's name for it: ``llama3.2``, ``llama3.2:3b``, ``user/name``."""
    wanted = name.lower() if ":" in name.rpartition("/")[2] else f"{name.lower()}:{_TAG}"
    return next((each for each in ollama_models(folders) if each.name.lower() == wanted), None)


def _manifests(root: Path) -> Iterator[Path]:
    """Yield the files ``HOST/NAMESPACE/NAME/TAG``; stops at a folder that cannot be read."""
    try:
        yield from sorted(path for path in root.glob("*/*/*/*") if path.is_file())
    except OSError:
        return


def _shown(parts: Path) -> str:
    host, namespace, name, tag = parts.parts
    inside = name if namespace == _NAMESPACE and host == _HOST else f"{namespace}/{name}"
    return f"{inside if host == _HOST else f'{host}/{inside}'}:{tag}"


def _read_model(name: str, manifest: Path, blobs: Path) -> OllamaModel | None:
    """Read a manifest. None if it is damaged or has no GGUF file, as for a cloud model."""
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


@dataclass(frozen=True, slots=True)
class FolderModel:
    """A model in a plain folder. ``path`` is its first GGUF file, or a folder of safetensors."""

    name: str
    path: Path
    files: tuple[Path, ...]
    kind: str
    quantization: str | None


def lm_studio_models(folders: Sequence[Path]) -> Iterator[FolderModel]:
    """Yield LM Studio's models: ``publisher/model:Q4_K_M``, or without the tag for safetensors."""
    for folder in folders:
        for home in _folders(folder, 2):
            name = home.relative_to(folder).as_posix()
            names = [path.name for path in _files(home)]
            if has_safetensors(names, index_shards(home)):
                own = tuple(home / each for each in names if not each.lower().endswith(".gguf"))
                yield FolderModel(name, home, own, "safetensors", None)
            variants = [each for each in gguf_variants(names) if each.complete]
            for variant in variants:
                found = _of(variant, f"{name}:{variant_name(variant, variants)}", home)
                tower = next(iter(variant_projectors(variant, names)), "")
                yield replace(found, files=(*found.files, home / tower)) if tower else found


def llama_cpp_models(folders: Sequence[Path]) -> Iterator[FolderModel]:
    """Yield llama.cpp's models: ``org/model:Q4_K_M`` if a manifest names it, else the file stem."""
    for folder in folders:
        names = [path.name for path in _files(folder)]
        known = _noted(folder, names)
        for variant in gguf_variants(names):
            if variant.complete:
                yield _of(variant, known.get(variant.files[0], variant.stem), folder)


def _of(variant: GgufVariant, name: str, folder: Path) -> FolderModel:
    files = tuple(folder / each for each in variant.files)
    label = variant.label if variant.is_labelled else None
    return FolderModel(name, files[0], files, "gguf", label)


def _noted(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Map each file named in a download manifest to the model name it was downloaded as."""
    found = {}
    for name in names:
        if not (name.startswith("manifest=") and name.endswith(".json")):
            continue
        try:
            _, org, model, tag = name.removesuffix(".json").split("=")
            values = json.loads((folder / name).read_text(encoding="utf-8"))
            inside = str(values["ggufFile"]["rfilename"]).replace("/", "_")
        except (OSError, ValueError, LookupError, TypeError):
            continue
        found[f"{org}_{model}_{inside}"] = f"{org}/{model}" + (f":{tag}" if tag != "latest" else "")
    return found


def _folders(root: Path, depth: int) -> Iterator[Path]:
    for path in _entries(root):
        if path.is_dir():
            yield from [path] if depth == 1 else _folders(path, depth - 1)


def _files(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if path.is_file()]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # missing, or no permission
        return []


Program = Literal["ollama", "lmstudio", "llamacpp"]

_TITLES: dict[Program, str] = {
    "ollama": "Ollama",
    "lmstudio": "LM Studio",
    "llamacpp": "llama.cpp",
}


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model of another program. ``name`` has the program's prefix; ``files`` are all of it."""

    name: str
    program: Program
    path: Path
    files: tuple[Path, ...]
    bytes: int
    kind: str
    quantization: str | None
    ollama: OllamaModel | None = None

    @property
    def title(self) -> str:
        """The program's name as its makers write it."""
        return _TITLES[self.program]

    def extras(self) -> Extras | None:
        """Read the settings stored with the weights; None if the program stores only weights."""
        return None if self.ollama is None else self.ollama.extras()


def other_models(settings: Settings) -> Iterator[OtherModel]:
    """Yield the models of all other programs."""
    for model in ollama_models(settings.ollama_dirs):
        yield _of_ollama(model)
    for found in lm_studio_models(settings.lm_studio_dirs):
        yield _of_folder("lmstudio", found)
    for found in llama_cpp_models(settings.llama_cpp_dirs):
        yield _of_folder("llamacpp", found)


def find_other_model(name: str, settings: Settings) -> OtherModel | None:
    """Find a model by name, ignoring case. A name without a prefix is Ollama's name, or the name
    that a server's clients use if only one model has it.
    """
    program, _, inside = name.partition(":")
    if program.lower() in ("lmstudio", "llamacpp"):
        wanted = f"{program.lower()}:{inside}".lower()
        return next((m for m in other_models(settings) if m.name.lower() == wanted), None)
    model = find_ollama_model(inside if program.lower() == "ollama" else name, settings.ollama_dirs)
    if model is not None:
        return _of_ollama(model)
    named = [m for m in other_models(settings) if client_name(m.name).lower() == name.lower()]
    return named[0] if len(named) == 1 else None


def _of_ollama(model: OllamaModel) -> OtherModel:
    files = tuple(path for paths in model.blobs.values() for path in paths)
    name = f"ollama:{model.name}"
    quantization = model.quantization
    return OtherModel(name, "ollama", model.path, files, model.bytes, "gguf", quantization, model)


def _of_folder(program: Program, found: FolderModel) -> OtherModel:
    size = sum(path.stat().st_size for path in found.files)
    name = f"{program}:{found.name}"
    return OtherModel(name, program, found.path, found.files, size, found.kind, found.quantization)
