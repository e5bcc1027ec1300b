"""Copies tensors between torch and our device memory, via the host.

torch and localrt use streams that do not wait for each other, so the host waits for each copy.
"""

from __future__ import annotations

import torch

from localrt.quant.cuda.device import Device
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32, INT16, INT32, INT64, UINT8, Tensor, upload

DTYPES = {
    torch.float32: FLOAT32,
    torch.bfloat16: BFLOAT16,
    torch.int64: INT64,
    torch.int32: INT32,
    torch.int16: INT16,
    torch.uint8: UINT8,
}


def there(tensor: torch.Tensor, device: Device) -> Tensor:
    """A copy of a torch tensor on the device."""
    whole = tensor.detach().cpu().contiguous()
    bits = whole.view(torch.uint16) if tensor.dtype is torch.bfloat16 else whole
    return upload(bits.numpy(), device, dtype=DTYPES[tensor.dtype])


def back(tensor: Tensor) -> torch.Tensor:
    """A copy of a device tensor in RAM, for torch."""
    bits = torch.from_numpy(tensor.bits())
    return bits.view(torch.bfloat16) if tensor.dtype is BFLOAT16 else bits
