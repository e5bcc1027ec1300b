"""Writes matrices as each scheme publishes them, and says in float32 what others read there.

What the values are is said by compressed-tensors, bitsandbytes or transformers where they run here,
and else by a plain float64 path that follows the scheme's specification. Their packages, which take
seconds to import, are imported when a scheme is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
Values = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Published:
    """A scheme: its config's keys, and a weight's tensors by what follows the module's name."""

    config: Mapping[str, Any]
    format: str
    write: Callable[[torch.Tensor], tuple[Tensors, Values]]
    note: str = ""
    rtol: float = 0.0
    error: float = 0.2  # of the largest value


def floats(tensor: torch.Tensor) -> Values:
    return tensor.detach().float().contiguous().numpy()


def packed_words(codes: np.ndarray, bits: int) -> torch.Tensor:
    """(rows, n) whole numbers as (rows, n * bits / 32) int32, the first in the lowest bits."""
    rows = [sum(int(code) << i * bits for i, code in enumerate(row)) for row in codes]
    size = codes.shape[1] * bits // 8
    data = b"".join((row % (1 << 8 * size)).to_bytes(size, "little") for row in rows)
    return torch.from_numpy(np.frombuffer(data, "<i4").reshape(len(codes), -1).copy())


# -- compressed-tensors ----------------------------------------------------------------------------


def _extremes(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        height, width = args.block_structure
        grid = weight.reshape(rows // height, height, columns // width, width)
        return grid.amin((1, 3)), grid.amax((1, 3))
    grouped = weight.reshape(rows, -1, args.group_size)
    return grouped.amin(-1), grouped.amax(-1)


def compressed(kind: str, name: str, dtype: torch.dtype, **changed: Any) -> Any:
    """By one of compressed-tensors' presets."""
    from compressed_tensors.compressors import BaseCompressor, unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme, quant_scheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    preset = getattr(quant_scheme, name)
    weights = preset["weights"].model_copy(update=changed)
    scheme = QuantizationScheme(targets=["Linear"], **{**preset, "weights": weights})
    compressor = BaseCompressor.get_value_from_registry(kind)

    def write(weight: torch.Tensor) -> tuple[Tensors, Values]:
        weight = weight.to(dtype)
        low, high = _extremes(weight, weights)
        state: Tensors = {"weight": weight}
        if kind.startswith("nvfp4"):
            state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
        scale, zero = calculate_qparams(
            low, high, weights, global_scale=state.get("weight_global_scale")
        )
        state["weight_scale"] = scale
        if not weights.symmetric:
            state["weight_zero_point"] = zero
        stored = compressor.compress(state, scheme)
        exact = dict(stored)
        if stored["weight_scale"].dtype in (torch.float16, torch.bfloat16):
            exact["weight_scale"] = stored["weight_scale"].float()
        if "fp4" in kind:  # its own method's results are in bfloat16
            packed = exact["weight_packed"]
            codes = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], torch.float32)
            factor = exact.get("weight_global_scale")
            scales = compressor._decompress_scale(exact["weight_scale"], torch.float32)
            values = floats(dequantize(codes, scales, args=weights, global_scale=factor))
        else:
            values = floats(compressor.decompress(exact, scheme)["weight"])
        return {f"{name}": tensor.contiguous() for name, tensor in stored.items()}, values

    group = scheme.model_dump(mode="json", exclude_none=True)
    config = {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": kind,
            "config_groups": {"group_0": {**group, "targets": ["Linear"]}},
            "ignore": ["lm_head", "re:.*gate$"],
            "quantization_status": "compressed",
        }
    }
    return config, write


# -- GPTQ and AWQ ----------------------------------------------------------------------------------


def affine(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (rows, columns), scales and zero points (rows, groups)."""
    grouped = weight.reshape(len(weight), -1, group).double()
    top = (1 << bits) - 1
    if symmetric:
        scale = grouped.abs().amax(-1) * 2 / top
        zero = torch.full_like(scale, 1 << (bits - 1))
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scale = (high - low) / top
        zero = (-low / scale).round()
    scale = scale.half().double()
    codes = (grouped / scale[..., None] + zero[..., None]).round().clamp(0, top)
    return codes.reshape(weight.shape).numpy().astype(np.uint8), scale.numpy(), zero.numpy()


def gptq(
    bits: int, group: int, *, symmetric: bool, version: str = "gptq", ordered: bool = False
) -> Any:
    def write(weight: torch.Tensor) -> tuple[Tensors, Values]:
        columns = weight.shape[1]
        order = np.arange(columns) // group
        place = np.arange(columns)
        if ordered:  # groups are of columns that are anywhere
            place = np.random.default_rng(0).permutation(columns)
            order = np.argsort(place) // group
        codes, scale, zero = affine(weight[:, place], bits, group, symmetric=symmetric)
        codes = codes[:, np.argsort(place)]
        values = (codes - zero[:, order]) * scale[:, order]
        stored = zero.T.astype(np.int64)  # (groups, rows)
        if version == "gptq" and bits == 3:
            stored = stored - 1 & 7
        zeros = packed_words(stored, bits).numpy().view(np.uint32)
        if version == "gptq" and bits != 3:
            zeros = zeros - np.uint32({2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[bits])
        return {
            "qweight": packed_words(codes, bits).T.contiguous(),
            "qzeros": torch.from_numpy(zeros.view(np.int32)).contiguous(),
            "scales": torch.from_numpy(scale.T.copy()).half(),
            "g_idx": torch.from_numpy(order.astype(np.int32)),
        }, np.ascontiguousarray(values, np.float32)

    config = {
        "quantization_config": {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "desc_act": ordered,
            "sym": symmetric,
            "checkpoint_format": version,
        }
    }
    return config, write


def awq(group: int) -> Any:
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    def write(weight: torch.Tensor) -> tuple[Tensors, Values]:
        codes, scale, zero = affine(weight, 4, group, symmetric=False)
        order = [0, 2, 4, 6, 1, 3, 5, 7]

        def rows_packed(numbers: np.ndarray) -> torch.Tensor:  # (n, rows)
            turned = numbers.reshape(len(numbers), -1, 8)[..., order]
            return packed_words(turned.reshape(len(numbers), -1), 4)

        tensors = {
            "qweight": rows_packed(codes.T),
            "qzeros": rows_packed(zero.T),
            "scales": torch.from_numpy(scale.T.copy()).half(),
        }
        converter = AutoAWQConverter(group_size=group)
        found = converter._convert_gemm_module(
            tensors["qweight"], tensors["scales"], tensors["qzeros"]
        )
        whole, scales, zeros = (tensor.double().numpy() for tensor in found)
        columns = np.arange(weight.shape[1]) // group
        return tensors, ((whole - zeros[:, columns]) * scales[:, columns]).astype(np.float32)

    config = {
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["gate"],
        }
    }
    return config, write


# -- bitsandbytes ----------------------------------------------------------------------------------


def nf4(*, double: bool) -> Any:
    import bitsandbytes

    def write(weight: torch.Tensor) -> tuple[Tensors, Values]:
        packed, state = bitsandbytes.functional.quantize_4bit(
            weight.float(), blocksize=64, compress_statistics=double, quant_type="nf4"
        )
        values = bitsandbytes.functional.dequantize_4bit(packed, state)
        parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        return {"weight": packed, **parts}, floats(values)

    config = {
        "quantization_config": {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": double,
        }
    }
    return config, write


def llm_int8() -> Any:
    import bitsandbytes

    def write(weight: torch.Tensor) -> tuple[Tensors, Values]:
        codes, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.half())
        values = bitsandbytes.functional.int8_vectorwise_dequant(codes, scales)
        order = torch.tensor(0, dtype=torch.uint8)
        return {"weight": codes, "SCB": scales, "weight_format": order}, floats(values)

    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    return config, write


# -- FP8 -------------------------------------------------------------------------------------------


def fp8(block: tuple[int, int] | None) -> Any:
    """Blocks with ``weight_scale_inv``, or with None one scale for each row."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def write(weight: torch.Tensor) -> tuple[Tensors, Values]:
        rows, columns = weight.shape
        height, width = block or (1, columns)
        grid = weight.float().reshape(rows // height, height, columns // width, width)
        scales = grid.abs().amax((1, 3)) / 448
        codes = (grid / scales[:, None, :, None]).to(torch.float8_e4m3fn).reshape(rows, -1)
        values = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
        name = "weight_scale_inv" if block else "weight_scale"
        return {"weight": codes, name: scales}, floats(values)

    method = "fp8" if block else "fbgemm_fp8"
    config: dict[str, Any] = {"quant_method": method, "activation_scheme": "dynamic"}
    if block:
        config["weight_block_size"] = list(block)
    return {"quantization_config": config}, write


# -- ModelOpt --------------------------------------------------------------------------------------


def modelopt(algorithm: str) -> Any:
    _, nvfp4 = compressed("nvfp4-pack-quantized", "NVFP4A16", torch.bfloat16)

    def write(weight: torch.Tensor) -> tuple[Tensors, Values]:
        if algorithm == "FP8":
            scale = weight.abs().max().float() / 448
            codes = (weight.float() / scale).to(torch.float8_e4m3fn)
            values = floats(codes.float() * scale)
            return {"weight": codes, "weight_scale": scale, "input_scale": scale * 3}, values
        tensors, values = nvfp4(weight)
        return {
            "weight": tensors["weight_packed"],
            "weight_scale": tensors["weight_scale"],
            "weight_scale_2": 1 / tensors["weight_global_scale"].reshape(()),
            "input_scale": torch.tensor(0.02),
        }, values

    inner = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    return {"quantization_config": {"quant_method": "modelopt", **inner}}, write


# -- AutoRound -------------------------------------------------------------------------------------


def auto_round(made: Any, packing: str | None, **more: Any) -> Any:
    """Another method's tensors under AutoRound's own description."""
    config, write = made
    quantization = {**config["quantization_config"], "quant_method": "auto-round", **more}
    quantization.pop("checkpoint_format", None)
    if packing is not None:
        quantization["packing_format"] = packing
    return {"quantization_config": quantization}, write


def scheme(format_: str, made: Any, note: str = "", **more: Any) -> Published:
    config, write = made
    return Published(config, format_, write, note, **more)


def two_bits(format_: str, made: Any) -> Published:
    return scheme(format_, made, error=0.6)


BF16 = torch.bfloat16
_PACK, _NAIVE, _FLOAT = "pack-quantized", "int-quantized", "float-quantized"
_TWO_FACTORS = 2.0**-22
"""Their product of a group's scale and the tensor's is rounded before the code is multiplied."""

SCHEMES: dict[str, Callable[[], Published]] = {
    "W4A16": lambda: scheme("int4-g128b", compressed(_PACK, "W4A16", BF16)),
    "W4A16 g32": lambda: scheme("int4-g32b", compressed(_PACK, "W4A16", BF16, group_size=32)),
    "W4A16 asymmetric": lambda: scheme("int4-g128z", compressed(_PACK, "W4A16_ASYM", BF16)),
    "W3A16 asymmetric": lambda: scheme(
        "int4-g128z", compressed(_PACK, "W4A16_ASYM", BF16, num_bits=3)
    ),
    "W2A16": lambda: two_bits("int4-g128b", compressed(_PACK, "W4A16", BF16, num_bits=2)),
    "W8A16 asymmetric": lambda: scheme(
        "int8-g128z", compressed(_PACK, "W4A16_ASYM", BF16, num_bits=8)
    ),
    "W8A8": lambda: scheme("int8-g128b", compressed(_NAIVE, "INT8_W8A8", BF16), "(W8A8)"),
    "compressed FP8 blocks": lambda: scheme(
        "e4m3-g128", compressed(_FLOAT, "FP8_BLOCK", BF16), "(W8A8)"
    ),
    "compressed FP8 blocks of 64": lambda: scheme(
        "e4m3-g64", compressed(_FLOAT, "FP8_BLOCK", BF16, block_structure=[32, 64]), "(W8A8)"
    ),
    "NVFP4A16": lambda: scheme(
        "nvfp4", compressed("nvfp4-pack-quantized", "NVFP4A16", BF16), rtol=_TWO_FACTORS
    ),
    "MXFP4A16": lambda: scheme("mxfp4", compressed("mxfp4-pack-quantized", "MXFP4A16", BF16)),
    "GPTQ": lambda: scheme("int4-g128", gptq(4, 128, symmetric=True)),
    "GPTQ g32": lambda: scheme("int4-g32", gptq(4, 32, symmetric=True, version="gptq_v2")),
    "GPTQ asymmetric": lambda: scheme("int4-g128z", gptq(4, 128, symmetric=False)),
    "GPTQ 8 bits asymmetric": lambda: scheme("int8-g32z", gptq(8, 32, symmetric=False)),
    "GPTQ 3 bits": lambda: scheme("int4-g128", gptq(3, 128, symmetric=True)),
    "GPTQ 2 bits": lambda: two_bits("int4-g64", gptq(2, 64, symmetric=True, version="gptq_v2")),
    "GPTQ ordered": lambda: scheme(
        "f32", gptq(4, 128, symmetric=True, ordered=True), "take 32 bits each"
    ),
    "AWQ": lambda: scheme("int4-g128z", awq(128)),
    "AWQ g64": lambda: scheme("int4-g64z", awq(64)),
    "NF4": lambda: scheme("nf4-f32", nf4(double=False)),
    "NF4 twice": lambda: scheme("nf4-f32", nf4(double=True)),
    "LLM.int8()": lambda: scheme("int8-g128z", llm_int8(), "(W8A8)", rtol=_TWO_FACTORS),
    "FP8 blocks": lambda: scheme("e4m3-g128", fp8((128, 128)), "(W8A8)"),
    "FP8 blocks of 64": lambda: scheme("e4m3-g64", fp8((32, 64)), "(W8A8)"),
    "FP8 rows": lambda: scheme("e4m3-g128", fp8(None), "(W8A8)"),
    "ModelOpt NVFP4": lambda: scheme("nvfp4", modelopt("NVFP4"), "(W4A4)", rtol=_TWO_FACTORS),
    "ModelOpt FP8": lambda: scheme("e4m3-g128", modelopt("FP8"), "(W8A8)"),
    "AutoRound": lambda: scheme("int4-g128", auto_round(gptq(4, 128, symmetric=True), None)),
    "AutoRound plain": lambda: scheme(
        "int4-g128z",
        auto_round(gptq(4, 128, symmetric=False, version="gptq_v2"), "auto_round", sym=False),
    ),
    "AutoRound AWQ": lambda: scheme(
        "int4-g64z", auto_round(awq(64), "auto_round:auto_awq", sym=False)
    ),
}
