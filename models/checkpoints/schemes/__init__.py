"""Quantized safetensors as others publish them, as rows of our formats.

One file a family of schemes. Each says which tensors make up a weight, and presents them as one
``RowSource`` that has the weight's name: no value changes, and only what is asked for is read.
"""

from localrt.models.checkpoints.schemes.methods import published_notes, read_scheme
from localrt.models.checkpoints.schemes.mlx import unconverted
from localrt.models.checkpoints.schemes.weights import Scheme, published_tensors

__all__ = ["Scheme", "published_notes", "published_tensors", "read_scheme", "unconverted"]
