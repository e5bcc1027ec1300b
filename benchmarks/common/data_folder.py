"""A data folder for models that only a benchmark has: the user's own is not to remember them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "XDG_DATA_HOME"


@contextmanager
def own_data_folder() -> Iterator[None]:
    """What loading a model writes into the data folder is gone when the block ends."""
    before = os.environ.get(_VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_VARIABLE] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before
