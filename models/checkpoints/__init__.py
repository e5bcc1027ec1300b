"""Models as published: GGUF files and Hugging Face folders, behind one protocol."""

from localrt.models.checkpoints.base import Checkpoint, TensorInfo
from localrt.models.checkpoints.gguf_checkpoint import GgufCheckpoint
from localrt.models.checkpoints.opening import open_checkpoint
from localrt.models.checkpoints.safetensors_folder import SafetensorsCheckpoint

__all__ = [
    "Checkpoint",
    "GgufCheckpoint",
    "SafetensorsCheckpoint",
    "TensorInfo",
    "open_checkpoint",
]
