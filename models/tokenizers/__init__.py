"""Text to token ids and back, as the model's own files define it.

``load_tokenizer`` picks the reader for the checkpoint's kind: ``gguf.py`` or ``hf.py``, which make
one of the two BPEs of ``bpe.py`` or leave all to the ``tokenizers`` package. Nothing heavy is
imported before it is called. The ids are those of that package and of SentencePiece, from packed
tables (``tables.py``).

A long text is read in stretches of 16 KB, which end where its words do; a word of more than 32 KB
is cut. Long words are joined a block at a time. A ``Watch`` hears how many tokens there are so far
and ends the reading of a prompt that is cancelled or far too long; ``least_tokens`` tells from a
text's length that it cannot fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from localrt.common.free_memory import return_free_memory
from localrt.models.tokenizers.base import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from localrt.models.checkpoints.base import Checkpoint

__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer"]


def load_tokenizer(
    checkpoint: Checkpoint,
    *,
    pre: str | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Tokenizer:
    """The tokenizer of ``checkpoint``.

    ``pre`` is the pre-tokenizer of a GGUF file that names a wrong one or none; ``note`` hears what
    a user should know.

    Raises:
        TokenizerError: it has none (then only ``token_ids`` can be used), or a broken one.
        UnsupportedModelError: a kind of tokenizer that is not known here.
    """
    # Only one of the two is needed, and not by those who know a tokenizer's contract alone
    try:
        if checkpoint.kind == "gguf":
            from localrt.models.tokenizers.gguf import gguf_tokenizer

            return gguf_tokenizer(checkpoint.metadata, pre=pre, note=note)
        from localrt.models.tokenizers.hf import hf_tokenizer

        return hf_tokenizer(checkpoint.path, eos=checkpoint.generation_config.get("eos_token_id"))
    finally:
        return_free_memory()
