"""The contract of a checkpoint: named tensors that are read one at a time, and a config.

Names and config keys are Hugging Face's whatever the file format: a GGUF file is translated by one
table (``gguf_names.py``), so that an architecture is written once. A checkpoint does not know
architectures or devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from localrt.quant.formats.packed import Format, PackedTensor
from localrt.quant.formats.tiled import TiledTensor

__all__ = ["Checkpoint", "TensorInfo", "TensorSource", "WeightBlock"]

WeightBlock: TypeAlias = PackedTensor | TiledTensor
"""Rows of a matrix or a whole vector as published, or a matrix as a store holds it."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor without reading it. ``shape`` is row-major: (out, in)."""

    name: str
    shape: tuple[int, ...]
    format: Format
    nbytes: int


class TensorSource(Protocol):
    """Named tensors and where they are from: all that building a part of a model takes."""

    @property
    def path(self) -> Path:
        """The folder, or the (first) GGUF file."""

    @property
    def architecture(self) -> str:
        """As the file names it: ``"llama"`` (GGUF) or ``"LlamaForCausalLM"`` (config.json)."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its Hugging Face name, in file order."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        """Rows ``start`` to ``stop`` of a tensor, read from disk now and owned by the caller.

        Raises:
            CheckpointError: no such tensor, or the file ends before its data.
        """

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[WeightBlock]:
        """The tensor's rows in order, in pieces of at most ``max_bytes`` packed bytes each.

        A store gives a matrix as one ``TiledTensor``, however large.
        """


class Checkpoint(TensorSource, Protocol):
    """A model on disk: a GGUF file (possibly split), a Hugging Face folder, or a store."""

    @property
    def kind(self) -> str:
        """Whose conventions config and text files follow: ``"gguf"`` or ``"safetensors"``.

        A store keeps those of the model that it was packed from.
        """

    @property
    def config(self) -> Mapping[str, Any]:
        """The architecture's parameters under the keys of a Hugging Face ``config.json``."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Sampling defaults under the keys of ``generation_config.json``; may be empty."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how the weights are read, a line each; mostly nothing."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """GGUF key-value pairs, read lazily; empty for a Hugging Face folder."""

    def close(self) -> None:
        """Close the files. Reading afterwards raises ``CheckpointError``."""
