"""What tests look at behind a ``Model``, in one place."""

from __future__ import annotations

from typing import Any

import localrt
from localrt.service.core import Core

__all__ = ["core_of", "engine_of"]


def core_of(model: localrt.Model) -> Core:
    """What answers for ``model``."""
    return model._core


def engine_of(model: localrt.Model) -> Any:
    """What computes for ``model``."""
    return model._core.engine
