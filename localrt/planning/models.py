"""Finds the model to plan for, on this machine or by its published config.

No weight is read. For a hub model that is not on this machine only the config is downloaded.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from localrt.common.errors import (
    CheckpointError,
    ModelNotFoundError,
    OptionError,
    UnsupportedModelError,
)
from localrt.common.files import parse_json, write_text
from localrt.common.option_names import option
from localrt.common.settings import Settings
from localrt.hub import resolve
from localrt.hub.cache import CachedRepo
from localrt.hub.listing import expand_name
from localrt.hub.names import KNOWN_MODELS, HubRef, KnownModel, looks_like_path, parse_hub_ref
from localrt.models.checkpoints import open_checkpoint
from localrt.models.checkpoints.text_model import DraftHeadError
from localrt.offload.shapes import ModelShape, shape_from_checkpoint
from localrt.planning.advice import in_format
from localrt.planning.shapes import shape_from_config
from localrt.quant.formats import FORMATS

_CONFIG = "config.json"
_CONFIGS = "configs"  # below the cache folder
_WEIGHTS = (".safetensors", ".gguf")


def find_model(
    model: str,
    settings: Settings,
    *,
    revision: str | None = None,
    offline: bool | None = None,
    any_file: bool = False,
) -> Path:
    """Return the path of the model on this machine, or else of its config.

    Short names, and their repositories, need no network: localrt has their configs. With
    ``any_file``, these are used for any file of such a repository.

    Raises:
        ModelNotFoundError: neither is found.
    """
    offline = settings.offline if offline is None else offline
    try:
        return resolve(
            model, settings=settings, revision=revision, offline=offline, download=False
        ).path
    except ModelNotFoundError:
        ref = hub_ref(model, settings)
        if ref is None or (ref.variant is not None and not any_file):
            raise
        known = next((each for each in KNOWN_MODELS if each.repo == ref.repo), None)
        if known is not None:
            return _known_config(settings, known)
        if ref.variant is not None:
            raise
        found = _cached_config(settings, ref.repo)
        if found is None and not offline:
            found = _download_config(settings, ref.repo, revision or ref.revision)
        if found is None:
            raise
        return found


def hub_ref(model: str, settings: Settings) -> HubRef | None:
    """Return the hub's name of ``model``; None for a path."""
    name = expand_name(model, settings)
    return None if looks_like_path(name) else parse_hub_ref(name)


def known_model_of(path: Path, settings: Settings) -> KnownModel | None:
    """Return the known model whose config ``find_model`` wrote to ``path``; None for others."""
    if path.name != _CONFIG or path.parent.parent != settings.cache_dir / _CONFIGS:
        return None
    return next((each for each in KNOWN_MODELS if _folder_of(each) == path.parent.name), None)


def shape_of(path: Path, format: str | None = None, ctx: int | None = None) -> ModelShape:
    """Return the shape of the model or config at ``path``, packed in ``format`` if given, in
    contexts of ``ctx`` tokens.

    Raises:
        OptionError: the format does not exist.
        UnsupportedModelError: the planner does not know the architecture.
        CheckpointError: a damaged file.
    """
    if format is not None and format not in FORMATS:
        raise OptionError(f"{option('format')} must be one of {', '.join(FORMATS)}, is {format!r}")
    config = path if path.name == _CONFIG else path / _CONFIG
    if config.is_file() and not has_weights(config.parent):
        return _shape_of_config(config, format, ctx)
    try:
        checkpoint = open_checkpoint(path)
    except UnsupportedModelError as error:
        if format is None or not config.is_file() or isinstance(error, DraftHeadError):
            raise  # an unreadable model may still be planned in another format
        return _shape_of_config(config, format, ctx)
    try:
        shape = shape_from_checkpoint(checkpoint, context=ctx)
        notes = (*shape.notes, *checkpoint.notes)
        shape = replace(shape, notes=notes)
    finally:
        checkpoint.close()
    return shape if format is None else in_format(shape, format, always=True)


def _known_config(settings: Settings, known: KnownModel) -> Path:
    """Write the config included with localrt to a file in the cache; return its path."""
    path = settings.cache_dir / _CONFIGS / _folder_of(known) / _CONFIG
    write_text(path, json.dumps(dict(known.config())), sync=False, folder=True)
    return path


def _folder_of(known: KnownModel) -> str:
    return known.name.replace(":", "-")


def _cached_config(settings: Settings, repo: str) -> Path | None:
    cached = CachedRepo(settings.hub_cache, repo)
    for commit in reversed(cached.commits()):
        path = cached.snapshot(commit) / _CONFIG
        if path.is_file():
            return path
    return None


def _download_config(settings: Settings, repo: str, revision: str | None) -> Path | None:
    """Download a repository's config, a few kilobytes; None if it has none."""
    from localrt.hub.download import (
        download,
        list_repo,  # these two import huggingface_hub
    )

    remote = list_repo(repo, revision, settings)
    if _CONFIG not in remote.files:
        return None
    cached = download(remote, [_CONFIG], revision=revision, settings=settings)
    return cached.snapshot(remote.commit) / _CONFIG


def has_weights(path: Path) -> bool:
    """Whether the found ``path`` has weights, not only a config."""
    if path.is_file():
        return path.name != _CONFIG
    return any(entry.suffix in _WEIGHTS for entry in path.iterdir())


def _shape_of_config(config: Path, format: str | None, ctx: int | None) -> ModelShape:
    """Read the shape; its name is the folder's, or the repository's in the hub's cache."""
    try:
        values = parse_json(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{config} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{config} is not a JSON object")
    folder, *above = config.absolute().parents
    name = folder.name
    if len(above) > 1 and above[0].name == "snapshots":
        name = above[1].name.removeprefix("models--").replace("--", "/")
    return shape_from_config(values, name=name, format=format, folder=config.parent, context=ctx)
