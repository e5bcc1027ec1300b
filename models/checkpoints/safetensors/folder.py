"""A Hugging Face folder as a checkpoint: ``config.json`` with whole or sharded safetensors.

Opening reads headers; weights are read on request. Only the decoder is presented
(``text_model.py``), with separate experts (``names.py``). The config is normalized to the flat,
older form of a text model: multimodal configs nest the text model's parameters, and transformers 5
moved rotary parameters into ``rope_parameters``. Never unpickles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePath

import numpy as np

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints.family_tensors import family_tensors, is_hash_constant
from localrt.models.checkpoints.safetensors.names import plain_tensors
from localrt.models.checkpoints.safetensors_header import (
    is_raw,
    read_header,
    read_json,
    unread_type_error,
)
from localrt.models.checkpoints.schemes import published_notes, published_tensors, read_scheme
from localrt.models.checkpoints.text_model import (
    HEADS,
    TEXT_KEYS,
    DraftHeadError,
    decoder_tensor,
    is_multimodal,
    prediction_config,
    prediction_tensor,
)
from localrt.models.raw_config import with_default_values
from localrt.models.registry import find_family
from localrt.models.row_order import rotary_rows
from localrt.models.tensor_source import (
    EMBEDDING,
    HEAD,
    RangedFile,
    RowSource,
    SourcedCheckpoint,
    StoredTensor,
)
from localrt.models.weight_files import DENSE, INDEX_NAME, WEIGHTS_NAME, model_stamp, weight_files

NO_HEAD = (
    "the model has no head for text: lm_head.weight is not in its files. It embeds texts; if its "
    'embedding is its head, set "tie_word_embeddings": true in config.json'
)
_COMPARED = 1 << 20  # bytes compared at a time
TIED_OUTSIDE = frozenset({"gemma3", "gemma4", "internvl", "lfm2_vl", "mistral3", "paddleocr_vl"})
"""``model_type`` of vision models whose outer config ties the head by default."""
_WITHOUT_HEAD = ("embed_tokens.", "layers.", "norm.", "ple.", "embedding_projection.")
_KIMIS_LENGTH = "model_max_length"
HEADS_LAYER = "transformer_layer_config"


def flatten_config(config: Mapping[str, object], path: Path) -> dict[str, object]:
    """Return the config of the text model, or of a draft head's layer, in the flat, older form.

    Raises:
        CheckpointError: a part is of a wrong type.
    """
    flat = dict(config)
    for key in (*TEXT_KEYS, HEADS_LAYER):
        text = flat.pop(key, None) or {}
        if not isinstance(text, dict):
            raise CheckpointError(f"{path}: {key} is not an object")
        flat.update({name: value for name, value in text.items() if name != "architectures"})
    if flat.get(_KIMIS_LENGTH) is not None:
        flat.setdefault("max_position_embeddings", flat[_KIMIS_LENGTH])
    _add_older_rope(flat, path)
    return flat


def _add_older_rope(config: dict[str, object], path: Path) -> None:
    """Add ``rope_theta`` and ``rope_scaling`` from ``rope_parameters``, which take precedence.

    Gemma 3 has parameters for each kind of layer: full attention's become the model's, the sliding
    window's base becomes ``rope_local_base_freq``.
    """
    rope = config.get("rope_parameters")
    if rope is None:
        return
    if not isinstance(rope, dict):
        raise CheckpointError(f"{path}: rope_parameters is not an object")
    full, sliding = rope.get("full_attention"), rope.get("sliding_attention")
    if isinstance(sliding, dict) and "rope_theta" in sliding:
        config["rope_local_base_freq"] = sliding["rope_theta"]
    scaling = dict(full if isinstance(full, dict) else rope)
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in scaling:
            config[key] = scaling.pop(key)
    if scaling.get("rope_type", "default") != "default" or "mrope_section" in scaling:
        config["rope_scaling"] = scaling


_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


class SafetensorsCheckpoint(SourcedCheckpoint):
    """A folder of ``config.json`` and safetensors. See ``Checkpoint``.

    With ``predicts`` it is the draft head in the folder: the first MTP block, as a model of one
    layer, or the whole folder if that is one of ``HEADS``.

    Raises:
        CheckpointError: a file is missing, truncated or malformed; there is no MTP block.
        UnsupportedModelError: an unsupported quantization or data type.
    """

    kind = "safetensors"

    def __init__(self, path: Path, *, predicts: bool = False) -> None:
        self.path, self.stamp = path, model_stamp(path)
        self.metadata: Mapping[str, object] = {}
        self._files: dict[str, RangedFile] = {}
        config = read_json(path / "config.json")
        flat = flatten_config(config, path / "config.json")
        self.architecture = _architecture(flat, path / "config.json")
        self._published = with_default_values(flat, self.architecture)
        self.config: Mapping[str, object] = self._published
        self.only_predicts = self.architecture in HEADS
        if self.only_predicts and not predicts:
            raise DraftHeadError(path, self.architecture)
        self._predicts = predicts and not self.only_predicts
        if self._predicts:
            if not find_family(self.architecture).predicts:
                raise CheckpointError(f"{path} holds no MTP block that can draft")
            self.config = prediction_config(self._published)
        self._method, self._scheme = read_scheme(self.config, path)
        self.notes: tuple[str, ...] = ()
        self.generation_config: Mapping[str, object] = _generation_config(path, self.config)
        try:
            super().__init__(self._locate(multimodal=is_multimodal(config)))
        except BaseException:
            self.close()
            raise
        if not (self.only_predicts or predicts):
            self.config = {**self.config, **self._head(config)}

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _head(self, config: Mapping[str, object]) -> dict[str, bool]:
        """Whether the head is tied to the embedding, as in transformers: a head in the file that
        differs from the embedding is used, even if the config ties them.
        """
        asked = self.config.get("tie_word_embeddings", self.config.get("tie_embedding"))
        if HEAD in self.tensors:
            tied = asked is True and self._is_copy(HEAD, EMBEDDING)
            if asked is True and not tied:
                self.notes += ("the head in the file is used: it is not the embedding",)
            return {"tie_word_embeddings": tied}
        outside = config.get("tie_word_embeddings", str(config.get("model_type")) in TIED_OUTSIDE)
        if asked is False and not outside:
            self.notes += (NO_HEAD,)
            return {"tie_word_embeddings": True, "headless": True}
        return {"tie_word_embeddings": True}

    def _is_copy(self, name: str, of: str) -> bool:
        """Whether two matrices are equal. If their formats differ, the config decides."""
        one, other = self.tensors[name], self.tensors.get(of)
        if other is None or (one.format, one.shape) != (other.format, other.shape):
            return True
        rows = max(1, _COMPARED * one.shape[0] // one.nbytes)
        ranges = (
            (start, min(start + rows, one.shape[0])) for start in range(0, one.shape[0], rows)
        )
        return all(
            np.array_equal(self.read(name, *part).data, self.read(of, *part).data)
            for part in ranges
        )

    def _locate(self, *, multimodal: bool) -> dict[str, RowSource]:
        """Every tensor of the decoder, by its name in localrt."""
        located = self._located(multimodal=multimodal)
        if any(map(_is_of_mlx, located.values())):
            raise UnsupportedModelError(
                f"{self.path} was converted for MLX: take a GGUF file of it or the original"
            )
        published = published_tensors(located, self._scheme)
        if self._scheme is not None:
            self.notes += published_notes(self._method, self._scheme, published)
        family = find_family(self.architecture)
        tensors = plain_tensors(family, self.architecture, self.config, published)
        tensors = family.convert(family_tensors(tensors, self.config), self.config)
        if family.in_pairs:
            tensors |= rotary_rows(tensors, self.config, self.path)
        for name, tensor in tensors.items():
            if is_raw(tensor.info.format):
                path = located[name].file.path if name in located else self.path
                raise unread_type_error(path, name, tensor.info.format.name.upper())
        return tensors

    def _located(self, *, multimodal: bool) -> dict[str, StoredTensor]:
        """Every tensor of the decoder, by its name without prefixes."""
        located: dict[str, StoredTensor] = {}

        def decoders(name: str) -> str | None:
            if self._predicts:
                return prediction_tensor(name, self._published)
            if not self.only_predicts and name.startswith(_WITHOUT_HEAD):
                name = f"model.{name}"  # as without a head, and DeepSeek-V4's
            return decoder_tensor(name, self.config, multimodal=multimodal)

        for name, tensor, file_path in self._listed(decoders):
            plain = decoders(name)
            if plain is None or not self._wanted(plain):
                continue
            if isinstance(tensor, str):
                raise unread_type_error(file_path, name, tensor)
            if plain in located:
                raise CheckpointError(f"{file_path}: tensor {name!r:.80} appears twice")
            located[plain] = replace(tensor, info=replace(tensor.info, name=plain))
        if not located:
            what = "MTP block" if self._predicts else "weights of a text model"
            raise CheckpointError(f"{self.path} holds no {what}")
        return located

    def _wanted(self, name: str) -> bool:
        """Whether a tensor is read: constants are not."""
        return not is_hash_constant(name) and not name.endswith("embeddings.position_ids")

    def _listed(
        self, decoders: Callable[[str], str | None]
    ) -> Iterator[tuple[str, StoredTensor | str, Path]]:
        """The tensors that the index lists, from files that hold parts of the decoder; without an
        index, the tensors of all files.
        """
        names = {entry.name for entry in self.path.iterdir()}
        for folder in DENSE & names if find_family(self.architecture).encoder else ():
            kind = read_json(self.path / folder / "config.json").get("activation_function")
            if not str(kind).endswith(".Identity"):
                raise UnsupportedModelError(f"{folder}: activation {kind!r:.60} is not supported")
            for name, tensor in self._open(f"{folder}/{WEIGHTS_NAME}").items():
                yield name.replace("linear", f"dense_{folder[0]}"), tensor, self.path / folder
        shards: dict[str, set[str]] = {}
        if INDEX_NAME in names:
            for name, shard in weight_map(self.path, whole=WEIGHTS_NAME in names).items():
                shards.setdefault(shard, set()).add(name)
            shards = {shard: own for shard, own in shards.items() if any(map(decoders, own))}
        files = weight_files(names, shards if INDEX_NAME in names else None)
        if files != sorted(shards) or files == [WEIGHTS_NAME]:
            if not files and (missing := shards.keys() - names):
                raise CheckpointError(
                    f"{self.path / min(missing)} is missing: {INDEX_NAME} lists it; download the "
                    "model again"
                )
            for file in files or [WEIGHTS_NAME]:
                for name, tensor in self._open(file).items():
                    yield name, tensor, self.path / file
            return
        if WEIGHTS_NAME in names - shards.keys():
            self.notes += (f"{WEIGHTS_NAME} is not read: {INDEX_NAME} lists other files",)
        for shard, listed in sorted(shards.items()):
            path = self.path / shard
            header = self._open(shard)
            if missing := listed - header.keys():
                raise CheckpointError(
                    f"{path} has no tensor {min(missing)[:80]!r}, despite {INDEX_NAME}"
                )
            for name, tensor in header.items():
                if name in listed:
                    yield name, tensor, path

    def _open(self, name: str) -> dict[str, StoredTensor | str]:
        file = self._files[name] = RangedFile(self.path / name)
        return read_header(file)


def _is_of_mlx(tensor: StoredTensor) -> bool:
    """Whether mlx-lm renamed or turned a tensor; it may have changed values of others then."""
    name, shape = tensor.info.name, tensor.info.shape
    turned = name.endswith("conv1d.weight") and len(shape) == 3 and shape[1] > 1 == shape[2]
    return turned or ".switch_mlp." in name or name.endswith(".embed_q.weight")


def _architecture(config: Mapping[str, object], path: Path) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else config.get("model_type")
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{path} names no architecture: it is not a model's config")
    return name


def _generation_config(path: Path, config: Mapping[str, object]) -> dict[str, object]:
    file = path / "generation_config.json"
    found = read_json(file) if file.exists() else {}
    for key in _TOKEN_KEYS:
        if found.get(key) is None and config.get(key) is not None:
            found[key] = config[key]
    return found


def weight_map(folder: Path, *, whole: bool) -> dict[str, str]:
    """The index's tensor names and the files that have them; empty if the index is malformed and
    there is a ``whole`` file.
    """
    try:
        return _weight_map(folder / INDEX_NAME)
    except CheckpointError:
        if not whole:
            raise
        return {}


def _weight_map(path: Path) -> dict[str, str]:
    """The index's tensor names and their files, which must be in its folder."""
    found = read_json(path).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{path} has no weight_map")
    for name, shard in found.items():
        if (
            not isinstance(shard, str)
            or PurePath(shard).name != shard
            or "\\" in shard
            or ".safetensors" not in shard
        ):
            raise CheckpointError(f"{path}: tensor {name[:80]!r} lies in no file of this folder")
    return found
