"""Finds and names the models that other programs keep on this machine; they run in place.

    ollama:llama3.2:3b    lmstudio:publisher/model:Q4_K_M    llamacpp:model-Q4_K_M

localrt never writes or deletes their files. Ollama's names also work without the prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from localrt.common.errors import CheckpointError
from localrt.common.files import parse_json
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
    """Settings that Ollama keeps for a model. ``go_template``: it has a chat template, in Go's
    syntax; ``projectors`` are its vision encoders.
    """

    go_template: bool = False
    system: str | None = None
    params: Mapping[str, object] = field(default_factory=dict)
    adapters: tuple[Path, ...] = ()
    projectors: tuple[Path, ...] = ()
    license: str | None = None

    @property
    def options(self) -> dict[str, object]:
        """Generation options under localrt's names. Skips Ollama's -1: no limit, or no seed."""
        found: dict[str, object] = {}
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


Program = Literal["ollama", "lmstudio", "llamacpp"]

_TITLES: dict[Program, str] = {"ollama": "Ollama", "lmstudio": "LM Studio", "llamacpp": "llama.cpp"}


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model of another program. ``name`` has the program's prefix; ``files`` are all of it, and
    ``path`` is its first GGUF file or a folder of safetensors. ``layers`` maps Ollama's kinds
    (``"model"``, ``"template"``, ``"params"``, ``"adapter"``, ...) to their files.
    """

    name: str
    program: Program
    path: Path
    files: tuple[Path, ...]
    bytes: int
    kind: str
    quantization: str | None
    layers: Mapping[str, Sequence[Path]] = field(default_factory=dict, repr=False)

    @property
    def title(self) -> str:
        """The program's name as its makers write it."""
        return _TITLES[self.program]

    def extras(self) -> Extras | None:
        """Read the template, parameters and other settings that Ollama stores with the weights;
        None for the other programs, which store none.

        Raises:
            CheckpointError: a layer cannot be read.
        """
        if not self.layers:
            return None
        try:
            values = parse_json("".join(self._texts("params")[:1]) or "{}")
        except ValueError:
            values = None
        if not isinstance(values, dict):
            name = self.name.removeprefix("ollama:")
            raise CheckpointError(f"the parameters of {name} in Ollama's store are not JSON")
        return Extras(
            go_template=bool(self.layers.get("template") or self.layers.get("prompt")),
            system="\n".join(self._texts("system")) or None,
            params=values,
            adapters=tuple(self.layers.get("adapter", ())),
            projectors=tuple(self.layers.get("projector", ())),
            license="\n".join(self._texts("license")) or None,
        )

    def _texts(self, kind: str) -> list[str]:
        name = self.name.removeprefix("ollama:")
        return [_read(path, name) for path in self.layers.get(kind, ())]


def other_models(settings: Settings) -> Iterator[OtherModel]:
    """Yield the models of all other programs."""
    yield from _ollama_models(settings.ollama_dirs)
    yield from _lm_studio_models(settings.lm_studio_dirs)
    yield from _llama_cpp_models(settings.llama_cpp_dirs)


def find_other_model(name: str, settings: Settings) -> OtherModel | None:
    """Find a model by name, ignoring case. A name without a prefix is Ollama's name, or the name
    that a server's clients use if only one model has it.
    """
    name = name.lower()
    program, _, inside = name.partition(":")
    prefixed = program in ("lmstudio", "llamacpp")
    short = inside if program == "ollama" else name
    tag = "" if ":" in short.rpartition("/")[2] else f":{_TAG}"
    wanted = name if prefixed else f"ollama:{short}{tag}"
    found = next((each for each in other_models(settings) if each.name.lower() == wanted), None)
    if found is not None or prefixed:
        return found
    named = [each for each in other_models(settings) if client_name(each.name).lower() == name]
    return named[0] if len(named) == 1 else None


# -- Ollama's store --------------------------------------------------------------------------------


def _ollama_models(folders: Sequence[Path]) -> list[OtherModel]:
    """Return the complete GGUF models, sorted by name; for equal names the first folder wins."""
    found: dict[str, OtherModel] = {}
    for folder in folders:
        for manifest in _manifests(folder / "manifests"):
            name = _shown(manifest.relative_to(folder / "manifests"))
            model = _read_model(name, manifest, folder / "blobs")
            if model is not None:
                found.setdefault(name, model)
    return [found[name] for name in sorted(found)]


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


def _read_model(name: str, manifest: Path, blobs: Path) -> OtherModel | None:
    """Read a manifest. None if it is damaged or has no GGUF file, as for a cloud model."""
    try:
        values = parse_json(_read(manifest, name))
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
    if not weights or not _is_gguf(weights[0]):
        return None
    quantization = None
    with suppress(CheckpointError, LookupError, ValueError, AttributeError):
        quantization = parse_json(_read(by_kind["config"][0], name)).get("file_type") or None
    files = tuple(path for paths in by_kind.values() for path in paths)
    shown = f"ollama:{name}"
    return OtherModel(shown, "ollama", weights[0], files, size, "gguf", quantization, by_kind)


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


# -- plain folders ---------------------------------------------------------------------------------


def _lm_studio_models(folders: Sequence[Path]) -> Iterator[OtherModel]:
    """Yield LM Studio's models: ``publisher/model:Q4_K_M``, or without the tag for safetensors."""
    for folder in folders:
        for home in _folders(folder, 2):
            name = f"lmstudio:{home.relative_to(folder).as_posix()}"
            names = [path.name for path in _files(home)]
            if has_safetensors(names, index_shards(home)):
                own = [each for each in names if not each.lower().endswith(".gguf")]
                yield _in_folder("lmstudio", name, home, own)
            variants = gguf_variants(names)
            for variant in variants:
                own = [*variant.files, *variant_projectors(variant, names)[:1]]
                full = f"{name}:{variant_name(variant, variants)}"
                yield _in_folder("lmstudio", full, home, own, variant)


def _llama_cpp_models(folders: Sequence[Path]) -> Iterator[OtherModel]:
    """Yield llama.cpp's models, named by their files without the ending."""
    for folder in folders:
        names = [path.name for path in _files(folder)]
        for variant in gguf_variants(names):
            name = f"llamacpp:{variant.stem}"
            yield _in_folder("llamacpp", name, folder, variant.files, variant)


def _in_folder(
    program: Program,
    name: str,
    folder: Path,
    names: Sequence[str],
    variant: GgufVariant | None = None,
) -> OtherModel:
    files = tuple(folder / each for each in names)
    size = sum(path.stat().st_size for path in files)
    if variant is None:
        return OtherModel(name, program, folder, files, size, "safetensors", None)
    label = variant.label if variant.is_labelled else None
    return OtherModel(name, program, files[0], files, size, "gguf", label)


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
