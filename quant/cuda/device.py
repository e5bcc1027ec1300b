"""What a device can do, copies to it, and what is said when it is full."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.common.errors import MemoryBudgetError


class FullCard(AbstractContextManager[None]):
    """Says in our words that a card has no memory left.

    Raises:
        MemoryBudgetError: in the place of torch's error.
    """

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise MemoryBudgetError(
                "the card has no memory left: close other programs that use it, or give the model "
                "less with --gpu-memory"
            ) from error


@cache
def multiplies_bf16(device: torch.device) -> bool:
    """Whether torch's products of bf16 run on the device at full speed."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def upload(values: npt.NDArray[Any], device: torch.device, *, out: Tensor | None = None) -> Tensor:
    """A copy of ``values`` on the device, in ``out`` if given, which the host does not wait for."""
    if device.type != "cuda":
        copied = torch.from_numpy(np.array(values))
        return copied if out is None else out.copy_(copied)
    staged = torch.from_numpy(np.ascontiguousarray(values)).pin_memory()
    if out is None:
        return staged.to(device, non_blocking=True)
    return out.copy_(staged, non_blocking=True)
