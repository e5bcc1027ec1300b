"""Model lookup: a model's shape by its name, from its files or from its config alone.

For a hub model that is not on this machine only the config is downloaded, and no weight is read. A
config's shape comes from the loading code of the model's parts, which records the tensors that they
request, so that every supported model can be planned. Packed sizes are then estimates: all matrices
have one format, or experts one and the other matrices another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

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
from localrt.models.checkpoints.safetensors.folder import flatten_config
from localrt.models.checkpoints.schemes import read_scheme
from localrt.models.checkpoints.text_model import DraftHeadError
from localrt.models.config import CHOICE_BIAS, FIRST_INDEXER
from localrt.models.decoder import load_attention, load_mlp, load_norm
from localrt.models.layers.moe import ResidentExperts, load_expert
from localrt.models.layers.ngrams import NGRAM_TABLE
from localrt.models.raw_config import with_default_values
from localrt.models.registry import ARCHITECTURES, read_config
from localrt.models.tensor_source import EMBEDDING, HEAD, Checkpoint, TensorInfo
from localrt.models.weights import AskedTensors
from localrt.offload.shapes import ModelShape, aligned, shape_from_checkpoint
from localrt.quant.formats import F8_E4M3, F32, FORMATS, Format
from localrt.quant.methods.quantize import fitting_format

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


def in_format(shape: ModelShape, format: str, *, always: bool = False) -> ModelShape:
    """Estimate the shape with every larger matrix packed in ``format``.

    With ``always``, matrices with fewer bits are repacked too.
    """
    target = FORMATS[format]
    units = []
    for unit in shape.units:
        elements = shape.sizes.vocab * shape.sizes.hidden if unit.kind == "embedding" else unit.macs
        size = aligned(round(elements * target.bits_per_weight / 8))
        changes = elements and (always or size < unit.nbytes)
        units.append(replace(unit, nbytes=size, format=format) if changes else unit)
    return replace(shape, units=tuple(units))


# -- shapes from configs ---------------------------------------------------------------------------

_DEFAULT_FORMAT = "int4-g32"

# From ``model_type``, without underscores, to the name of an architecture.
_KINDS = {
    name.removesuffix(ending).replace("_", "").lower(): name
    for ending in ("ForConditionalGeneration", "ForCausalLM")  # the latter wins
    for name in ARCHITECTURES
    if name.endswith(ending)
}
_ALIASES = {
    "gemma": "gemma2",  # without some of Gemma 2's norms
    "hunyuanv1dense": "hunyuandensev1",
    "hunyuanv1moe": "hunyuanmoev1",
    "kimik2": "deepseekv3",
}

_TIED = "tie_word_embeddings"
_BIASED = ("glm4", "glm4_moe", "glm4v_moe", "solar_open")
"""Whose ``attention_bias`` is not the output projection's."""
_QKV_BIAS, _OUT_BIAS = (f"model.layers.0.self_attn.{name}_proj.bias" for name in "qo")

_MOST_EXPERTS = 1 << 17  # limit for all layers, since each takes time
# Methods that quantize only a mixture's experts: the experts' format, and that of other matrices.
_EXPERTS_ALONE = {"mxfp4": ("mxfp4", "bf16")}


def shape_from_config(
    config: Mapping[str, object],
    *,
    name: str,
    format: str | None = None,
    folder: Path | None = None,
    experts: int | None = None,
    context: int | None = None,
) -> ModelShape:
    """Return the shape of the model that a Hugging Face ``config`` (of ``folder``) describes.

    ``format`` packs every matrix; None means the config's quantization (possibly of experts only),
    else ``int4-g32``. ``experts`` is the most to list per layer, since thousands take time.

    Raises:
        UnsupportedModelError: an unknown ``model_type`` or format, or an unsupported quantization.
        CheckpointError: a key is missing or malformed.
    """
    whole = {_TIED: config[_TIED]} if _TIED in config else {}  # it counts, not the text's
    config = {**flatten_config(config, Path(name)), **whole}
    kind = str(config.get("model_type", ""))
    plain = kind.removesuffix("_text").replace("_", "")
    architecture = _KINDS.get(_ALIASES.get(plain, plain))
    if architecture is None:
        raise UnsupportedModelError(
            f"{name}: model_type {kind!r:.60} cannot be planned from its config: give the weights"
        )
    notes: list[str] = []
    expert_format, rest = (
        (format, format) if format else _published_formats(config, folder or Path(name), notes)
    )
    if rest not in FORMATS:
        raise UnsupportedModelError(
            f"format {format!r:.60} is not known: one of {', '.join(FORMATS)}"
        )
    model = _Described(architecture, with_default_values(config, architecture), Path(name))
    model.add(*_told_by_weights(kind, model.config))
    checkpoint = cast(Checkpoint, model)  # no tensor of it is read
    asked = _Asked(FORMATS[expert_format], FORMATS[rest])
    model.tensors = asked.tensors_of(checkpoint, experts)
    shape = shape_from_checkpoint(checkpoint, experts, context=context)
    return replace(shape, name=name, architecture=kind, notes=tuple(notes))


def _told_by_weights(kind: str, config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the small tensors whose presence changes the meaning of the config."""
    biased, kind = bool(config.get("attention_bias")), kind.removesuffix("_text")
    if kind == "ernie4_5_moe":
        return (f"model.layers.0.{CHOICE_BIAS}",)
    if kind == "glm_moe_dsa":
        return (FIRST_INDEXER,)
    if kind in ("qwen2_moe", "glm4v") or (kind in _BIASED and biased):
        return (_QKV_BIAS,)
    both = config.get("attention_out_bias") if kind == "seed_oss" else biased
    return (*((_QKV_BIAS,) if biased else ()), *((_OUT_BIAS,) if both else ()))


def _published_formats(
    config: Mapping[str, object], folder: Path, notes: list[str]
) -> tuple[str, str]:
    """Return the formats of experts and of all other matrices."""
    quantized = config.get("quantization_config")
    if isinstance(quantized, Mapping):
        method = str(quantized.get("quant_method"))
        if (both := _EXPERTS_ALONE.get(method)) is not None:
            notes.append(f"weights as published: experts in {both[0]}, the rest in {both[1]}")
            return both
    method, scheme = read_scheme(config, folder)
    if scheme is not None:
        notes += [f"weights as published: {method}, planned as {scheme.typical}", *scheme.notes]
        return scheme.typical, scheme.typical
    notes.append(
        f"weights are taken to be packed as {_DEFAULT_FORMAT}: {option('format')} says otherwise"
    )
    return _DEFAULT_FORMAT, _DEFAULT_FORMAT


@dataclass(slots=True)
class _Described:
    """A ``Checkpoint`` without weights: a config, and the tensors that it implies."""

    architecture: str
    config: Mapping[str, object]
    path: Path
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    kind: str = "safetensors"

    def add(self, *names: str) -> None:
        """Add tensors with these names."""
        self.tensors |= {name: TensorInfo(name, (0,), F32, 0) for name in names}


class _Asked(AskedTensors):
    """Records the tensors that the parts of a model request.

    If several are stacked, the first gets the whole size.
    """

    def __init__(self, expert_format: Format, format: Format) -> None:
        self._formats = expert_format, format
        self._found: dict[str, TensorInfo] = {}

    def tensors_of(
        self, checkpoint: Checkpoint, experts: int | None = None
    ) -> dict[str, TensorInfo]:
        """Return all tensors that the model would load, at most ``experts`` experts per layer."""
        config = read_config(checkpoint)
        count = sum(0 if spec is None else spec.router.count for spec in config.mixtures)
        if count > _MOST_EXPERTS:
            raise CheckpointError(f"{checkpoint.path}: {count} experts are more than can be")
        table = (config.vocab_size, config.hidden_size)
        self.matrix(table, EMBEDDING)
        for beside in config.block.tables(config):
            self.matrix(beside.shape, beside.tensor)
        for layer, at in enumerate(config.cache_places):
            if at:
                load_attention(config, layer, self, at)
            spec = config.mixture(layer)
            if config.has_mlp(layer):
                load_mlp(config, layer, self, None if spec is None else ResidentExperts())
            for number in range(0 if spec is None else spec.router.count)[:experts]:
                load_expert(config, layer, number, self)
        load_norm(config, self)
        if not config.tied_head:
            self.matrix(table, HEAD)
        return self._found

    def ask(self, shape: tuple[int, ...], *names: str) -> None:
        if len(shape) == 1:
            format = F32
        elif names[0] == NGRAM_TABLE:  # as published; its rows are read one by one
            format = F8_E4M3
        else:
            format = self._formats[0 if ".experts." in names[0] else 1]
        if shape[-1] % format.block:
            format = fitting_format(format, shape[-1])
        rest: tuple[int, ...] = shape
        for name in names:
            self._found[name] = TensorInfo(name, rest, format, 0)
            rest = (0, *shape[1:])


class _Checked(_Asked):
    """Compares the tensors that the parts of a model request with those in ``checkpoint``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._found = {}

    def ask(self, shape: tuple[int, ...], *names: str) -> None:
        self.check(shape, *names)


def check_shapes(checkpoint: Checkpoint) -> None:
    """Check that every tensor matches the config, before any is read.

    Raises:
        CheckpointError: a tensor is missing, or has another shape.
    """
    _Checked(checkpoint).tensors_of(checkpoint)
