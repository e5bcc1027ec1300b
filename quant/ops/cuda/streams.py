"""Steps that have no kernels here: models that take them compute with torch on a card.

``quant/ops/choose.py`` sees to it: by their attention, which norms values or chooses tokens.
"""

from __future__ import annotations

from typing import Any, NoReturn


def _missing(self: object, *args: Any) -> NoReturn:
    """See ``Ops``."""
    raise NotImplementedError("models that take this step compute with torch on a card")


class StreamSteps:
    """A part of ``CudaOps``."""

    norm = project_inputs = gate_inputs = low_rank = _missing
    repeat_stream = read_streams = share_out = add_ngrams = choose_tokens = _missing
    split_streams = predict_streams = correct_streams = add_to_streams = join_streams = _missing
