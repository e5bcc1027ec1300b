"""Which implementation of ``Ops`` runs on a device. A backend is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import cast

from localrt import system
from localrt.common.errors import MissingExtraError, OptionError
from localrt.common.extras import install
from localrt.common.option_names import option
from localrt.quant.cpu.abi import find_library
from localrt.quant.ops.attention import HOST_SPECS, IndexSpec, LatentSpec, Needed
from localrt.quant.ops.hybrid_cache import split_layers
from localrt.quant.ops.kv_formats import parse_kv_format
from localrt.quant.ops.protocol import LayerSpec, Ops, implementation
from localrt.quant.ops.recurrent import RecurrentSpec
from localrt.quant.ops.vision import VisionSteps

_WIDEST = 512  # most numbers of a head, latents or rotary: MAX_HEAD in quant/cpu/csrc/kv.h


def make_ops(
    attention: Sequence[LayerSpec],
    *,
    device: str = "auto",
    compute_format: str | None = None,
    kv_format: str | None = None,
    activations: str | None = None,
    threads: int | None = None,
) -> Ops:
    """Make the implementation for ``device``: ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or ``"auto"``.

    ``compute_format=None`` keeps weights as published where our kernels run (compiled for a CPU, or
    CUDA's), and unpacks them to bf16 elsewhere. ``attention`` lists layers that the kernels must
    support. ``activations="bf16"`` keeps their precision in our kernels too.

    Raises:
        OptionError: the device is not on this machine, or does not support ``kv_format`` or
            ``activations``.
        MissingExtraError: neither the compiled kernels nor torch can do it.
    """
    latent = any(isinstance(spec, LatentSpec) for spec in attention)
    ours = latent or any(isinstance(spec, IndexSpec) for spec in attention)
    on_host = any(isinstance(spec, HOST_SPECS) for spec in attention)
    if device == "auto":
        device = "cpu" if on_host else _default_device()
        if device != "cpu" and not _worth_it(attention, compute_format, needs_ours=ours):
            device = "cpu"
    if on_host and device != "cpu":
        how = f"use {option('device', 'cpu')}"
        raise OptionError(f"this model, in this context, runs on the CPU alone: {how}")
    kept = parse_kv_format(kv_format)
    if device == "cpu" and compute_format is None and _kernels_fit(attention):
        from localrt.quant.cpu.kv import cache_format
        from localrt.quant.cpu.ops import NativeOps

        if activations == "bf16":
            raise OptionError(
                f"{option('activations', 'bf16')} is for a GPU: the CPU's kernels multiply in 8 "
                f"bits; leave it out, or use {option('format', 'bf16')}"
            )
        cache_format(split_layers(attention)[0], kept)  # raises if the two cannot be combined
        return NativeOps(threads=threads, kv_format=kept)
    on_gpu = device.startswith("cuda") and compute_format is None
    if kept != "bf16" and (latent or not on_gpu):
        raise OptionError(_no_kv_format(kv_format))
    if device.startswith("cuda"):
        from localrt.quant.cuda.driver import count_gpus

        index, found = device.removeprefix("cuda").removeprefix(":") or "0", count_gpus()
        if not found:
            raise OptionError(
                f"there is no NVIDIA GPU for {option('device', device)}, or its driver, or "
                f"NVIDIA's bindings ({install('gpu')}): use {option('device', 'cpu')}"
            )
        if not index.isdecimal() or int(index) >= found:
            raise OptionError(f"there is no GPU {device!r}: {found} found")
        limit = _limit(attention, int(index)) if compute_format is None else ""
        if compute_format is None and not limit:
            from localrt.quant.cuda.ops import CudaOps

            fine = activations == "bf16"
            return CudaOps(device=f"cuda:{index}", kv_format=kept, fine=fine)
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(_advice(device, compute_format)) from error
    from localrt.quant.reference.ops import TorchOps

    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise OptionError(
                f"torch finds no CUDA GPU for {option('device', device)}: "
                f"use {option('device', 'cpu')}"
            )
        if kept != "bf16":
            raise OptionError(_no_kv_format(kept))
        if latent and compute_format is None:
            raise OptionError(
                f"latent attention (DeepSeek) on a GPU needs localrt's kernels, and {limit}; or "
                f"use {option('device', 'cpu')}, or {option('format', 'bf16')} for a GPU "
                "that holds the model unpacked"
            )
    return TorchOps(compute_format=compute_format or "bf16", device=device, threads=threads)


def vision_steps(ops: Ops) -> VisionSteps:
    """The steps of vision encoders on ``ops``: our kernels, or numpy between its products."""
    if ops.name == "cuda":
        from localrt.quant.cuda.ops import CudaOps
        from localrt.quant.cuda.vision import CudaVision

        return cast(VisionSteps, CudaVision(implementation(ops, CudaOps)))
    if ops.name == "native":
        from localrt.quant.cpu.ops import NativeOps
        from localrt.quant.cpu.vision import NativeVision

        return cast(VisionSteps, NativeVision(implementation(ops, NativeOps)))
    return VisionSteps(ops)


def all_vision_steps(implementations: Sequence[Ops]) -> list[VisionSteps]:
    """The implementations of a vision encoder's steps, fastest first: on a GPU with our kernels,
    then on the CPU for pictures that do not fit the GPU.
    """
    on_gpu = [ops for ops in implementations if ops.name == "cuda"]
    host = next((ops for ops in implementations if ops.device == "cpu" and ops not in on_gpu), None)
    if host is None and find_library() is not None:
        from localrt.quant.cpu.ops import NativeOps

        host = NativeOps()
    usable = [*on_gpu[:1], *([] if host is None else [host])]
    return [vision_steps(ops) for ops in usable or implementations[:1]]


def _no_kv_format(name: str | None) -> str:
    return (
        f"{option('kv_format', name)} is for the compiled CPU kernels and a GPU that ours run on, "
        "there not for latent attention: leave it out here"
    )


def _worth_it(
    attention: Sequence[LayerSpec], compute_format: str | None, *, needs_ours: bool
) -> bool:
    """Whether the first GPU takes a model better than the CPU does."""
    if compute_format is None:
        if not _limit(attention, 0):
            return True
        # Such attention on packed weights needs our kernels. Attention that none of those for GPUs
        # support is the CPU's too: it keeps weights packed, and may stream them.
        if needs_ours or (_kernels_fit(attention) and missing_on_gpu(attention)):
            return False
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _default_device() -> str:
    """``"cuda"`` if a GPU can be used; NVIDIA's bindings are imported only if there is a driver."""
    if not system.has_nvidia_driver() or find_spec("cuda") is None:
        return "cpu"
    from localrt.quant.cuda.driver import count_gpus

    return "cuda" if count_gpus() else "cpu"


def why_not_our_kernels(ops: Ops, attention: Sequence[LayerSpec], device: str) -> str:
    """Why ``ops``, made for ``device`` without a format, do not use our kernels on the GPU, in one
    line; empty if they do, or if there is no GPU.
    """
    if ops.name == "cuda" or (device if device != "auto" else _default_device()) == "cpu":
        return ""
    index = ops.device.removeprefix("cuda").removeprefix(":")
    limit = _limit(attention, int(index) if index.isdecimal() else 0)
    if not limit:
        return ""
    if ops.device == "cpu":
        other = ""
        if not any(isinstance(spec, (LatentSpec, IndexSpec, *HOST_SPECS)) for spec in attention):
            other = f"; {option('device', 'cuda')} computes with torch, on weights in bf16 or NF4"
        return f"the GPU is not used: this model needs localrt's own kernels, and {limit}{other}"
    return f"the GPU computes without localrt's kernels, on weights in bf16 or NF4: {limit}"


def _limit(attention: Sequence[LayerSpec], index: int) -> str:
    """Why our kernels do not run on a GPU, and what to do; empty if they do.

    A broken installation counts as none: torch can compute on unpacked weights.
    """
    from localrt.quant.cuda.attention import takes_heads, takes_latents
    from localrt.quant.cuda.driver import device_of
    from localrt.quant.cuda.programs import NO_COMPILER, OLDEST, has_compiler

    major, minor = device_of(f"cuda:{index}").capability
    if 10 * major + minor < OLDEST:
        return f"they need a GPU of compute capability {OLDEST / 10}, and this has {major}.{minor}"
    if missing := missing_on_gpu(attention):
        return missing
    for spec in split_layers(attention)[0]:
        if isinstance(spec, LatentSpec):
            if not takes_latents(spec.rope_dim, spec.latent):
                sizes = f"{spec.latent} numbers and {spec.rope_dim} rotary ones"
                return f"they do not take latents of {sizes}"
        elif not takes_heads(spec.head_dim):
            return f"they do not take heads of {spec.head_dim} numbers"
    return "" if has_compiler() else NO_COMPILER


def missing_on_gpu(memory: Sequence[LayerSpec]) -> str:
    """What our GPU kernels lack for a model with layers of ``memory``; empty if nothing."""
    return next(filter(None, map(lacking, memory)), "")


def kernels_take_heads(size: int) -> bool:
    """Whether the compiled kernels attend with heads of ``size`` numbers."""
    return size % 16 == 0 and size <= _WIDEST


def _kernels_fit(attention: Sequence[LayerSpec]) -> bool:
    attending, _ = split_layers(attention)
    return find_library() is not None and all(
        _take_latents(spec) if isinstance(spec, LatentSpec) else kernels_take_heads(spec.head_dim)
        for spec in attending
        if not isinstance(spec, HOST_SPECS)
    )


def _take_latents(spec: LatentSpec) -> bool:
    """Whether the compiled kernels support these latents: whole tiles of 16 everywhere."""
    sizes = (spec.rope_dim, spec.latent, spec.value, spec.nope)
    return all(size % 16 == 0 for size in sizes) and max(spec.rope_dim, spec.latent) <= _WIDEST


def _advice(device: str, compute_format: str | None) -> str:
    if device.startswith("cuda"):
        return f"this model, or this format, needs torch on a GPU: {install('torch')}"
    if compute_format is not None:
        return f"format {compute_format} computes with torch: pip install 'torch>=2.11'"
    if find_library() is None:
        return (
            "the compiled CPU kernels are missing, and so is torch: install a C++ compiler and "
            "localrt again, or pip install 'torch>=2.11'"
        )
    return "this model's head size needs torch: pip install 'torch>=2.11'"


_PROTOCOLS: Mapping[Needed, str] = {
    "IndexOps": "they do not choose the tokens that attention sees",
    "ParallelOps": "they do not compute attention and an MLP in parallel",
    "StreamOps": "they do not keep several residual streams",
}
"""Those that ``CudaOps`` does not have."""


def lacking(spec: LayerSpec) -> str:
    """What they lack for a layer, for "they" are our kernels; empty if nothing."""
    if spec.needs:
        return _PROTOCOLS[spec.needs]
    if isinstance(spec, RecurrentSpec) and spec.decay_floor:
        return "they do not compute decays that have a floor"
    if isinstance(spec, LatentSpec) and spec.head_gates:
        return "they do not gate the heads of latent attention"
    return ""
