"""Opens a checkpoint by its path; a path that is not a model gets a clear error."""

from __future__ import annotations

from pathlib import Path

from localrt.common.errors import (
    CheckpointError,
    LocalrtError,
    UnsupportedModelError,
    disk_errors,
    reason_of,
)
from localrt.models.checkpoints.gguf.checkpoint import GgufCheckpoint
from localrt.models.checkpoints.safetensors.folder import SafetensorsCheckpoint
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.checkpoints.text_model import DraftHeadError, require_model
from localrt.models.tensor_source import Checkpoint
from localrt.models.weight_files import (
    ADAPTER_NAME,
    INDEX_NAME,
    MANIFEST_NAME,
    PARTIAL_NAME,
    WEIGHTS_NAME,
    is_draft_file,
    is_projector_file,
    split_part,
    weight_files,
)

_PICKLES = frozenset({".bin", ".ckpt", ".pkl", ".pt", ".pth"})


def open_checkpoint(path: Path) -> Checkpoint:
    """The model at ``path``: a GGUF file, any part of a split one, or a folder.

    A folder is a Hugging Face model (``config.json`` and safetensors), a store, or holds one GGUF
    model.

    Raises:
        CheckpointError: no file, not a model, several models, truncated or malformed.
        UnsupportedModelError: pickled weights, or an unsupported type or quantization.
        StorageError: the disk fails.
    """
    with disk_errors(path):
        return _open(path)


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.suffix in _PICKLES:
        raise _pickle_error(path)
    if path.suffix == ".safetensors" and (path.parent / "config.json").exists():
        raise CheckpointError(f"{path} is a part of a model: give its folder, {path.parent}")
    if path.suffix == ".safetensors" and (path.parent / ADAPTER_NAME).exists():
        require_model(path.parent, "adapter")
    return GgufCheckpoint(path)


def _open_folder(path: Path) -> Checkpoint:
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from error
    if not names:
        raise CheckpointError(f"{path} is an empty folder")
    has_config = "config.json" in names
    if has_config and (WEIGHTS_NAME in names or INDEX_NAME in names):
        return SafetensorsCheckpoint(path)
    # A folder with its final name lacks nothing: the other manifest is a leftover.
    if PARTIAL_NAME in names and (path.name.endswith(".partial") or MANIFEST_NAME not in names):
        raise CheckpointError(
            f"{path} is a store that is not finished: run the same `localrt quantize` again, which "
            "goes on from there"
        )
    if MANIFEST_NAME in names:
        return StoreCheckpoint(path)
    if ggufs := _gguf_models(names):
        if len(ggufs) > 1:
            raise CheckpointError(
                f"{path} holds {len(ggufs)} models, give one of: {', '.join(ggufs[:20])}"
            )
        return GgufCheckpoint(path / ggufs[0])
    if ADAPTER_NAME in names:
        require_model(path, "adapter")
    if has_config and weight_files(names, None):
        return SafetensorsCheckpoint(path)
    for name in names:
        if Path(name).suffix in _PICKLES:
            raise _pickle_error(path / name)
    if has_config:
        raise CheckpointError(
            f"{path} has a config.json but no weights: neither {WEIGHTS_NAME} nor {INDEX_NAME}"
        )
    raise CheckpointError(f"{path} is not a model: no config.json and no .gguf file in it")


def _gguf_models(names: list[str]) -> list[str]:
    """One file name per GGUF model; vision encoders (``mmproj``) and draft heads next to a model
    are not models, unless there is nothing else.
    """
    models: dict[tuple[str, int], str] = {}
    for name in names:
        if name.endswith(".gguf") and not is_projector_file(name):
            split = split_part(Path(name))
            models.setdefault((split[0], split[2]) if split else (name, 0), name)
    found = list(models.values()) or [name for name in names if name.endswith(".gguf")][:1]
    return [name for name in found if not is_draft_file(name)] or found


def _pickle_error(path: Path) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path} holds pickled weights, and unpickling runs whatever code the file contains: use "
        "the model's safetensors or GGUF version, or convert it where you trust it"
    )


def is_head(path: Path) -> bool:
    """Whether ``path`` has only a draft head, not a model."""
    open_model = SafetensorsCheckpoint if path.is_dir() else GgufCheckpoint
    try:
        open_model(path).close()
    except DraftHeadError:
        return True
    except (LocalrtError, OSError):
        pass
    return False
