"""Names the quantization of a model's files.

It is taken from the file's name, else from its metadata, else from the format of most weights.
"""

from __future__ import annotations

from collections import Counter

from localrt.hub.files import quantization_label
from localrt.models.checkpoints import Checkpoint
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint

# ``general.file_type`` of the GGUF specification; missing numbers are obsolete.
_FILE_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1"}
_FILE_TYPES |= {10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M"}
_FILE_TYPES |= {16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S"}
_FILE_TYPES |= {22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M"}
_FILE_TYPES |= {28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0"}
_FILE_TYPES |= {37: "TQ2_0", 38: "MXFP4_MOE"}


def quantization_name(checkpoint: Checkpoint) -> str:
    """Return ``"Q4_K_M"`` for a GGUF file, ``"int4-g128"`` for a folder; empty without weights."""
    if isinstance(checkpoint, StoreCheckpoint):
        return checkpoint.manifest.format
    if checkpoint.kind == "gguf":
        label = quantization_label(checkpoint.path.stem.partition("-00001-of-")[0])
        told = checkpoint.metadata.get("general.file_type")
        name = label or (_FILE_TYPES.get(told) if isinstance(told, int) else None)
        if name is not None:
            return name
    return most_used_format(checkpoint)


def most_used_format(checkpoint: Checkpoint) -> str:
    """Return the format of most bytes of the matrices, not counting embeddings; empty if none."""
    bytes_of: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if len(info.shape) == 2 and "embed_tokens" not in info.name:
            bytes_of[info.format.name] += info.nbytes
    return bytes_of.most_common(1)[0][0] if bytes_of else ""
