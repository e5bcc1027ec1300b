"""Which implementation of ``Ops`` runs on a device. Importing this module imports no backend."""

from __future__ import annotations

from localrt.errors import MissingExtraError, OptionError
from localrt.quant.ops.protocol import Ops

__all__ = ["make_ops"]


def make_ops(
    *, device: str = "auto", compute_format: str = "bf16", threads: int | None = None
) -> Ops:
    """The implementation for ``device``: ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or ``"auto"``.

    Raises:
        OptionError: the device is not on this machine.
        MissingExtraError: torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(
            "the native engine computes with torch: pip install 'torch>=2.11'"
        ) from error
    from localrt.quant.ops.torch_ops import TorchOps

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise OptionError(f"torch finds no CUDA GPU for device {device!r}: use device 'cpu'")
        index = device.removeprefix("cuda").removeprefix(":") or "0"
        if not index.isdecimal() or int(index) >= torch.cuda.device_count():
            raise OptionError(f"there is no GPU {device!r}: {torch.cuda.device_count()} found")
    return TorchOps(compute_format=compute_format, device=device, threads=threads)
