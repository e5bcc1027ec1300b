"""Models that other programs keep on this machine: found, named, and run where they lie.

    ollama:llama3.2:3b    lmstudio:publisher/model:Q4_K_M    llamacpp:org/model:Q4_K_M

Their files are never written or deleted. What Ollama calls a model works without the prefix too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localrt.hub.extras import Extras
from localrt.hub.gguf_folders import FolderModel, llama_cpp_models, lm_studio_models
from localrt.hub.names import client_name
from localrt.hub.ollama_store import OllamaModel, find_ollama_model, ollama_models
from localrt.settings import Settings

__all__ = ["OtherModel", "Program", "find_other_model", "other_models"]

Program = Literal["ollama", "lmstudio", "llamacpp"]

_TITLES: dict[Program, str] = {
    "ollama": "Ollama",
    "lmstudio": "LM Studio",
    "llamacpp": "llama.cpp",
}


@dataclass(frozen=True, slots=True)
class OtherModel:
    """``name`` has its program's prefix; ``files`` are all that belong to it."""

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
        """The program as its makers write it."""
        return _TITLES[self.program]

    def extras(self) -> Extras | None:
        """What its store keeps beside the weights; None where only weights are kept."""
        return None if self.ollama is None else self.ollama.extras()


def other_models(settings: Settings) -> Iterator[OtherModel]:
    """All of them."""
    for model in ollama_models(settings.ollama_dirs):
        yield _of_ollama(model)
    for found in lm_studio_models(settings.lm_studio_dirs):
        yield _of_folder("lmstudio", found)
    for found in llama_cpp_models(settings.llama_cpp_dirs):
        yield _of_folder("llamacpp", found)


def find_other_model(name: str, settings: Settings) -> OtherModel | None:
    """The model of this name, in any case, with its prefix or without: then as Ollama calls it, or
    as clients of a server do, where that leaves no choice.
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
