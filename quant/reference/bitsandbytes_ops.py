"""``Ops`` on CUDA where our kernels do not run: torch, and bitsandbytes for NF4.

An NF4 matrix stays packed, in bitsandbytes' order of nibbles, and is multiplied by its kernels;
everything else is unpacked to bf16 as ``TorchOps`` does. bitsandbytes' FP4 is a code of its own,
not E2M1: MXFP4 and NVFP4 are unpacked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.quant.formats import NF4
from localrt.quant.formats.fp4 import NF4_CODEC
from localrt.quant.formats.packed import Format, PackedTensor
from localrt.quant.formats.tiled import TiledTensor, untile
from localrt.quant.reference.ops import TorchOps
from localrt.quant.reference.streams import rows_of_tokens


@dataclass(frozen=True, slots=True)
class BnbWeight:
    """NF4 as bitsandbytes has it: two codes a byte, the first in the high nibble."""

    shape: tuple[int, int]
    packed: Tensor  # (rows * columns / 2, 1) uint8
    absmax: Tensor  # (rows * columns / 64,) float32
    state: Any  # bitsandbytes' QuantState

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.packed.nbytes + self.absmax.nbytes


class BnbOps(TorchOps):
    """See ``TorchOps``; what is stored as NF4 stays so."""

    name = "bitsandbytes"

    def __init__(self, *, device: str = "cuda") -> None:
        super().__init__(compute_format="bf16", device=device)
        self.compute_format = "packed"

    def weight(  # type: ignore[override]
        self, shape: tuple[int, int], blocks: Iterable[PackedTensor | TiledTensor]
    ) -> Tensor | BnbWeight:
        """NF4 where all blocks are; else bf16."""
        held = list(blocks)
        rotated = any(isinstance(block, TiledTensor) and block.hadamard for block in held)
        if rotated or any(block.format != NF4 for block in held):
            return super().weight(shape, held)
        plain = [untile(b) if isinstance(b, TiledTensor) else b for b in held]
        data = np.concatenate([block.data.reshape(-1, NF4.block_bytes) for block in plain])
        if len(data) * NF4.block != shape[0] * shape[1]:
            raise ValueError(f"blocks hold {len(data)} groups of 64, the matrix is {shape}")
        codes, scales = NF4_CODEC.split(data)
        packed = torch.from_numpy(codes[:, ::2] << 4 | codes[:, 1::2]).reshape(-1, 1)
        absmax = torch.from_numpy(scales.reshape(-1))
        return self._made(shape, packed.to(self._device), absmax.to(self._device))

    def weight_nbytes(self, shape: tuple[int, int], format: Format) -> int:
        """Bytes of a packed matrix (scales are float32), or of an unpacked one."""
        if format == NF4:
            return shape[0] * shape[1] // 2 + shape[0] * shape[1] // 64 * 4
        return super().weight_nbytes(shape, format)

    def embed(
        self,
        table: Tensor | BnbWeight,
        step: Any,
        scale: float = 1.0,
        *,
        tokens: npt.NDArray[np.int64] | None = None,
        each: int = 1,
    ) -> Tensor:
        if isinstance(table, Tensor):
            return super().embed(table, step, scale, tokens=tokens, each=each)
        ids = step.tokens if tokens is None else torch.from_numpy(tokens).to(self._device)
        if each > 1:
            ids = rows_of_tokens(ids, each, table.shape[0])
        from bitsandbytes import functional

        columns = table.shape[1]
        packed = table.packed.view(-1, columns // 2)[ids].reshape(-1, 1)
        absmax = table.absmax.view(-1, columns // 64)[ids].reshape(-1)
        some = self._made((len(ids), columns), packed, absmax)
        x: Tensor = functional.dequantize_4bit(some.packed, some.state)
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype, device=x.device)

    def linear(self, x: Tensor, weight: Tensor | BnbWeight, bias: Tensor | None = None) -> Tensor:
        """The product, on packed bytes where they are."""
        if isinstance(weight, Tensor):
            return super().linear(x, weight, bias)
        from bitsandbytes import matmul_4bit

        y: Tensor = matmul_4bit(x.contiguous(), weight.packed.t(), quant_state=weight.state)
        return y if bias is None else y + bias

    def _made(self, shape: tuple[int, int], packed: Tensor, absmax: Tensor) -> BnbWeight:
        from bitsandbytes import functional

        state = functional.QuantState(
            absmax=absmax,
            shape=torch.Size(shape),
            code=functional.get_4bit_type("nf4", device=self._device),
            blocksize=NF4.block,
            quant_type="nf4",
            dtype=torch.bfloat16,
        )
        return BnbWeight(shape, packed, absmax, state)
