"""GGUF files in the folders of LM Studio and llama.cpp, by names that say which file is meant.

LM Studio keeps ``PUBLISHER/MODEL/FILE.gguf`` (and MLX folders), llama.cpp one flat folder
``ORG_MODEL_FILE.gguf`` with a note ``manifest=ORG=MODEL=TAG.json`` for each download. (Newer
versions of llama.cpp use the hub's cache.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from localrt.hub.files import GgufVariant, gguf_variants, has_safetensors, variant_name
from localrt.models.weight_files import index_shards

__all__ = ["FolderModel", "llama_cpp_models", "lm_studio_models"]


@dataclass(frozen=True, slots=True)
class FolderModel:
    """``path`` is the first GGUF file, or a folder of safetensors."""

    name: str
    path: Path
    files: tuple[Path, ...]
    kind: str
    quantization: str | None


def lm_studio_models(folders: Sequence[Path]) -> Iterator[FolderModel]:
    """``publisher/model:Q4_K_M``, or ``publisher/model`` for a folder of safetensors."""
    for folder in folders:
        for home in _folders(folder, 2):
            name = home.relative_to(folder).as_posix()
            names = [path.name for path in _files(home)]
            if has_safetensors(names, index_shards(home)):
                own = tuple(home / each for each in names if not each.lower().endswith(".gguf"))
                yield FolderModel(name, home, own, "safetensors", None)
            variants = [each for each in gguf_variants(names) if each.complete]
            for variant in variants:
                yield _of(variant, f"{name}:{variant_name(variant, variants)}", home)


def llama_cpp_models(folders: Sequence[Path]) -> Iterator[FolderModel]:
    """``org/model:Q4_K_M`` where the download's note is there, else the file's stem."""
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
    """Files by the name that they were downloaded by."""
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
    except OSError:  # not there, or not ours to see
        return []
