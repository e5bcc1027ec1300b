"""Text to token ids and back, as the model's own files define it.

``load_tokenizer`` picks the reader for the checkpoint's kind: ``gguf.py`` or ``hf.py``, which make
one of the two BPEs of ``bpe.py`` or use the ``tokenizers`` package. Nothing heavy is imported
before it is called. BPEs use packed tables (``tables.py``) and give the same ids as that package
and SentencePiece.

A long text is encoded in segments of 16 KB that end at word boundaries; a word of more than 32 KB
is cut. Long words are merged block by block. A ``Watch`` gets the number of tokens so far and stops
encoding a prompt that is cancelled or far too long; ``least_tokens`` bounds the tokens from a
text's length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from localrt.common.errors import disk_errors
from localrt.models.tokenizers.base import Detokenizer, Tokenizer
from localrt.system import return_free_memory

if TYPE_CHECKING:
    from localrt.models.tensor_source import Checkpoint

__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer"]


def load_tokenizer(
    checkpoint: Checkpoint,
    *,
    pre: str | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Tokenizer:
    """The tokenizer of ``checkpoint``.

    ``pre`` is the pre-tokenizer of a GGUF file that names a wrong one or none; ``note`` is called
    with lines for the user.

    Raises:
        TokenizerError: none (then only ``token_ids`` can be used), or a broken one.
        UnsupportedModelError: an unknown type of tokenizer.
        StorageError: the disk fails.
    """
    # Imported here: only one of the two is needed, and importers of the protocol need neither
    try:
        if checkpoint.kind == "gguf":
            from localrt.models.tokenizers.gguf import gguf_tokenizer

            return gguf_tokenizer(checkpoint.metadata, pre=pre, note=note)
        from localrt.models.tokenizers.hf import hf_tokenizer

        eos = checkpoint.generation_config.get("eos_token_id")
        with disk_errors(checkpoint.path):
            return hf_tokenizer(checkpoint.path, eos=cast("int | list[int] | None", eos))
    finally:
        return_free_memory()
