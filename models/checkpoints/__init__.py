"""Models on disk: GGUF files, Hugging Face folders and stores, behind one protocol.

A ``Checkpoint`` maps Hugging Face tensor names to shapes and formats, has a config with Hugging
Face's keys, and reads ranges of rows. It presents only the decoder:
``models/checkpoints/text_model.py`` strips prefixes of multimodal models and omits encoders and
prediction blocks, which are never read, packed or planned for. One table translates GGUF's tensor
names, another its keys. GGUF files of Llama and folders of ERNIE store rotary rows in another
order; Qwen3-Next groups rows by key head. Reading undoes this by moving whole packed rows, so no
value changes. Data is read with ``pread``, not mapped: mapped pages would count as this process's
memory, and a model could be in memory twice. Every count and length in a header is checked against
the file's size before use. Tensors of types that localrt cannot unpack are still listed, so that
llama.cpp can run the file.

``unpack`` returns float32 for every format, in numpy, bit for bit what the ``gguf`` package
returns.

These modules know no devices, and of architectures what ``Family`` says of their files. Start
reading at ``models/tensor_source.py``, then ``gguf/checkpoint.py``.
"""

from localrt.models.checkpoints.gguf.checkpoint import GgufCheckpoint
from localrt.models.checkpoints.opening import open_checkpoint
from localrt.models.checkpoints.safetensors.folder import SafetensorsCheckpoint
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.tensor_source import Checkpoint, TensorInfo

__all__ = [
    "Checkpoint",
    "GgufCheckpoint",
    "SafetensorsCheckpoint",
    "StoreCheckpoint",
    "TensorInfo",
    "open_checkpoint",
]
