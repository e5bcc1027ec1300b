"""Models on disk: GGUF files, Hugging Face folders and stores, behind one protocol."""

from localrt.models.checkpoints.base import Checkpoint, TensorInfo
from localrt.models.checkpoints.gguf.checkpoint import GgufCheckpoint
from localrt.models.checkpoints.opening import open_checkpoint
from localrt.models.checkpoints.safetensors.folder import SafetensorsCheckpoint
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint

__all__ = [
    "Checkpoint",
    "GgufCheckpoint",
    "SafetensorsCheckpoint",
    "StoreCheckpoint",
    "TensorInfo",
    "open_checkpoint",
]
