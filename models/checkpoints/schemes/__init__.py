"""Quantized safetensors as others publish them, as rows of our formats: no value changes, and only
what is asked for is read.

Quantized folders keep a weight in several tensors: codes, scales, zero points, orders. Each family
of schemes has a file, which checks that the tensors fit each other and makes them one ``RowSource``
of the weight's name. The config says which family it is; the tensors' types and shapes say the
rest, so that a folder may mix schemes. The format follows from the type of the scales and the
columns that share one, before any data is read. ``docs/models.md`` lists what becomes of each
scheme.

Start reading at ``weights.py``, then ``methods.py``.
"""

from localrt.models.checkpoints.schemes.methods import published_notes, read_scheme
from localrt.models.checkpoints.schemes.mlx import unconverted
from localrt.models.checkpoints.schemes.weights import Scheme, published_tensors

__all__ = ["Scheme", "published_notes", "published_tensors", "read_scheme", "unconverted"]
