"""The vision encoder in a Hugging Face folder: the tensors that are not the decoder's.

They keep the publisher's names, without a leading ``model.``, and have two axes at most (see
``matrix_shape``). InternVL's get SigLIP's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.safetensors.folder import weight_map
from localrt.models.checkpoints.safetensors_header import (
    is_raw,
    read_header,
    read_json,
    unread_type_error,
)
from localrt.models.checkpoints.text_model import decoder_tensor
from localrt.models.tensor_source import RangedFile, RowSource, SourcedCheckpoint, matrix_shape
from localrt.models.weight_files import INDEX_NAME, WEIGHTS_NAME, weight_files

_OTHERS = ("mtp.", "mtp_", "audio_tower.", "embed_audio.", "audio_model.")
"""Prefixes of tensors that belong to neither the decoder nor a vision encoder."""
_INTERNVL = {
    "patch_embeddings.projection": "patch_embedding",
    "position_embeddings": "position_embedding.weight",
    "encoder.layer.": "encoder.layers.",
    "attention.projection_layer": "self_attn.out_proj",
    ".attention.": ".self_attn.",
    "layernorm_before": "layer_norm1",
    "layernorm_after": "layer_norm2",
    **{f".lambda_{n}": f".scale{n}.weight" for n in (1, 2)},
}
"""Parts of InternVL's names, and SigLIP's for the same."""
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


class VisionFolder(SourcedCheckpoint):
    """See ``TensorSource``. ``config`` is the folder's ``config.json``, ``processor`` its image
    processor's config; missing keys mean the publisher's defaults.

    Raises:
        CheckpointError: a file is missing, truncated or malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Mapping[str, object] = read_json(path / "config.json")
        self.architecture = str(self.config.get("model_type"))
        self.processor = _processor(path)
        self._files: list[RangedFile] = []
        try:
            super().__init__(self._located())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def _located(self) -> dict[str, RowSource]:
        located: dict[str, RowSource] = {}
        names = {entry.name for entry in self.path.iterdir()}
        whole = WEIGHTS_NAME in names
        listed = weight_map(self.path, whole=whole) if INDEX_NAME in names else {}
        shards = set(listed.values())
        for shard in weight_files(names, shards or None) or [WEIGHTS_NAME]:
            file = RangedFile(self.path / shard)
            self._files.append(file)
            for name, tensor in read_header(file).items():
                plain = name.removeprefix("model.")
                if decoder_tensor(name, {}, multimodal=True) is not None:
                    continue
                if "." not in plain or plain.startswith(_OTHERS):
                    continue
                if isinstance(tensor, str) or is_raw(tensor.info.format):
                    kind = tensor if isinstance(tensor, str) else tensor.info.format.name.upper()
                    raise unread_type_error(file.path, name, kind)
                if self.architecture == "internvl":
                    for theirs, ours in _INTERNVL.items():
                        plain = plain.replace(theirs, ours)
                shape = matrix_shape(tensor.info.shape or (1,))
                info = replace(tensor.info, name=plain, shape=shape)
                located[plain] = replace(tensor, info=info)
        if not located:
            raise CheckpointError(f"{self.path} holds no vision tower")
        return located


def _processor(path: Path) -> dict[str, object]:
    """The folder's config of its image processor."""
    found: dict[str, object] = {}
    for name in _PROCESSORS:
        if (path / name).exists():
            read = read_json(path / name)
            own = read.get("image_processor") or {}
            if not isinstance(own, dict):
                raise CheckpointError(f"{path / name}: image_processor is not an object")
            found = {**read, **own, **found}
    return found
