"""What a store keeps of a model beside its weights: tokenizer and chat template, as published.

Files of a Hugging Face folder are copied. A GGUF file's key-value pairs become a GGUF file without
tensors, byte for byte, so that the readers of tokenizer and template need not know of stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from localrt.models.checkpoints.base import Checkpoint
from localrt.models.checkpoints.gguf.metadata import GgufMetadata
from localrt.models.checkpoints.ranged_file import RangedFile
from localrt.models.checkpoints.store.checkpoint import GGUF_TEXT_NAME

_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.json",
    "chat_template.jinja",
    "chat_templates/*.jinja",
)


def text_files(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files that go into a store of ``checkpoint``.

    Raises:
        CheckpointError: a file cannot be read.
    """
    metadata = checkpoint.metadata
    if isinstance(metadata, GgufMetadata):
        yield GGUF_TEXT_NAME, metadata.alone()
        return
    for pattern in _TEXT_FILES:
        for path in sorted(checkpoint.path.glob(pattern)):
            yield path.relative_to(checkpoint.path).as_posix(), _contents(path)


def _contents(path: Path) -> bytes:
    with closing(RangedFile(path)) as file:
        return file.read(0, file.size).tobytes()
