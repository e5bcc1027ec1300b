"""Reads published quantized safetensors as rows of localrt's formats, on request and without
changing values.

Quantized folders keep a weight in several tensors: codes, scales, zero points, orders. Each family
of schemes has a module that checks that the tensors fit together and builds one ``RowSource`` per
weight. The config names the family; types and shapes of tensors decide the rest, so a folder may
mix schemes. The format follows from the scales' type and the group size, before any data is read.
``docs/models.md`` lists the format for each scheme.

Start reading at ``weights.py``, then ``methods.py``.
"""

from localrt.models.checkpoints.schemes.methods import published_notes, read_scheme
from localrt.models.checkpoints.schemes.weights import Scheme, published_tensors

__all__ = ["Scheme", "published_notes", "published_tensors", "read_scheme"]
