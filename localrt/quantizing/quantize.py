"""Quantizes a model into a store, layer by layer, each calibrated on what those before it give.

What a layer takes in is measured with its own weights; what it gives to the next is computed with
those that were written. So a run that was ended goes on from the files it has finished, to the same
bytes. One layer is in memory, and with calibration the hidden states of the text.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from localrt.errors import OptionError, TokenizerError, UnsupportedModelError
from localrt.models.checkpoints import Checkpoint, TensorInfo, open_checkpoint
from localrt.models.checkpoints.store_manifest import Quantization
from localrt.models.config import EMBEDDING, HEAD, ROUTER, SHARED_GATE, DecoderConfig
from localrt.models.registry import read_config, require_readable
from localrt.models.tokenizers import load_tokenizer
from localrt.models.units import list_units
from localrt.offload.store import StoreWriter, fast_tiler
from localrt.offload.store.layout import FilePlan, plan_files
from localrt.offload.store.pack import describe_source, main_format, stored_infos
from localrt.offload.store.text import text_files
from localrt.progress import Progress, ProgressCallback
from localrt.quant.formats import CODECS, Format
from localrt.quant.methods import (
    METHODS,
    ScaleSearch,
    default_method,
    fitting_format,
    quantized_format,
)
from localrt.quant.ops.native.scales import fast_search
from localrt.quantizing.calibration import HiddenStates, calibration_ops, calibration_windows
from localrt.quantizing.layer import LayerQuantizer, folded_rotation

if TYPE_CHECKING:
    from localrt.quant.ops.torch.calibration import CalibrationOps

__all__ = ["CALIBRATION_TOKENS", "HEAD_BITS", "QuantizeReport", "Recipe", "quantize_model"]

CALIBRATION_TOKENS = 16_384
MOST_CALIBRATION_TOKENS = 65_536
_WINDOW = 512

HEAD_BITS = 8.5
"""Embedding and head stay as published up to so many bits per weight; above, they become int8."""
_HEAD_FORMAT = CODECS["int8-g32"].format
_ROUTERS = (f".{ROUTER}.weight", f".{SHARED_GATE}.weight")  # what chooses or weighs experts
_TABLES = (EMBEDDING, HEAD)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What becomes of a model's matrices. The same recipe and source give the same bytes.

    Attributes:
        format: of the layers' matrices: ``"int4-g32"``, ``"mxfp4"``, ``"bf16"``, ...
        method: ``"rtn"``, ``"gptq"`` or ``"mr-gptq"``; None takes what is best for the format.
        calibration: token ids of a text, for every method but rtn.
        calibration_tokens: how many of them to use, in windows of 512.
        seed: which windows.
        head_format: of embedding and head; None keeps the published one up to ``HEAD_BITS``.
    """

    format: str
    method: str | None = None
    calibration: Sequence[int] | None = None
    calibration_tokens: int = CALIBRATION_TOKENS
    seed: int = 0
    head_format: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeReport:
    """What was written.

    ``bits_per_weight`` counts all matrices, ``layer_bits_per_weight`` those of the layers.
    ``fallbacks`` are tensors whose rows are no whole groups of the format, and what they got.
    """

    path: Path
    format: str
    method: str
    head_format: str
    nbytes: int
    parameters: int
    bits_per_weight: float
    layer_bits_per_weight: float
    calibration_tokens: int
    fallbacks: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The same names and values as plain JSON."""
        return {**asdict(self), "path": str(self.path)}


def quantize_model(
    source: Checkpoint | Path,
    out: Path,
    recipe: Recipe,
    *,
    name: str | None = None,
    revision: str | None = None,
    threads: int | None = None,
    search: ScaleSearch | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> QuantizeReport:
    """Write ``source`` to the store ``out`` with its matrices as ``recipe`` says.

    A call that was interrupted is gone on with by the next one.

    Args:
        source: an open checkpoint, or where one lies.
        out: the store's folder, which must not exist.
        recipe: formats, method and text.
        name, revision: what the manifest calls the source.
        threads: CPU threads of the calibration passes and of the search for scales.
        search: what finds the scales of groups; None takes the fastest here.
        progress: called with ``Progress`` of the stage ``"quantize"``, in bytes.
        cancel: set it from another thread to stop with ``CancelledError``.

    Raises:
        OptionError: an unknown format or method, too little text, or ``out`` exists.
        CheckpointError: the model is damaged, or a named tensor holds NaN or infinity.
        UnsupportedModelError: an architecture or weights that localrt does not know.
        MissingExtraError: calibration needs torch.
        StorageError: the disk is full or fails.
        CancelledError: ``cancel`` was set.
    """
    target = quantized_format(recipe.format)
    method = _method(recipe.method, target, calibrated=recipe.calibration is not None)
    with ExitStack() as opened:
        if isinstance(source, Path):
            source = opened.enter_context(closing(open_checkpoint(source)))
        require_readable(source)
        config = read_config(source)
        formats = _formats(source.tensors, target, recipe.head_format)
        infos = stored_infos(source.tensors, formats)
        units = list_units(infos, config)
        windows: list[list[int]] = []
        ops: CalibrationOps | None = None
        if method != "rtn":
            windows = _windows(source, config, recipe)
            ops = calibration_ops(threads)
        rotated = folded_rotation(config, infos) if method == "mr-gptq" else 0
        manifest = describe_source(
            source,
            name=name,
            revision=revision,
            format=main_format(units, infos),
            exactness="approximate",
            quantization=Quantization(
                format=target.name,
                head_format=recipe.head_format,
                method=method,
                seed=recipe.seed,
                calibration=_digest(windows),
                calibration_tokens=sum(map(len, windows)),
                compute=ops.compute_format if ops is not None else None,
                folded=rotated,
            ),
        )
        weights = LayerQuantizer(
            source,
            config,
            infos,
            method=method,
            folded=rotated,
            tiler=fast_tiler(),
            search=search or fast_search(threads),
        )

        def show(done: int, total: int, detail: str) -> None:
            if progress is not None:
                progress(Progress("quantize", done, total, "bytes", detail))

        files = plan_files(units, infos)
        with StoreWriter(out, manifest, files, progress=show, cancel=cancel) as writer:
            for text_name, data in text_files(source):
                writer.write_bytes(text_name, data)
            if ops is not None:
                _write_calibrated_layers(writer, files, weights, ops, windows)
            for file in writer.pending:
                writer.write(file, weights.rounded)
            path = writer.finish()
        matrices = [info for info in infos.values() if len(info.shape) == 2]
        return QuantizeReport(
            path=path,
            format=target.name,
            method=method,
            head_format=infos[EMBEDDING if config.tied_head else HEAD].format.name,
            nbytes=writer.nbytes,
            parameters=sum(info.shape[0] * info.shape[1] for info in matrices),
            bits_per_weight=_bits_per_weight(matrices),
            layer_bits_per_weight=_bits_per_weight(_of_layers(matrices)),
            calibration_tokens=sum(map(len, windows)),
            fallbacks={
                info.name: info.format.name
                for info in _of_layers(matrices)
                if info.format != target and not info.name.endswith(_ROUTERS)
            },
        )


def _write_calibrated_layers(
    writer: StoreWriter,
    files: Sequence[FilePlan],
    weights: LayerQuantizer,
    ops: CalibrationOps,
    windows: Sequence[Sequence[int]],
) -> None:
    """Write the layers that are not finished; those that are only pass the text on."""
    pending = [file for file in writer.pending if file.layer is not None]
    if not pending:
        return
    step = ""
    states = HiddenStates(
        weights.source,
        weights.config,
        ops,
        windows,
        check=lambda: writer.report(step),
    )
    for layer, file in enumerate(files):
        if file in pending:
            step = f"layer {layer}: measuring inputs"
            hessians = states.observe(weights.source, layer)
            writer.write(file, weights.calibrated(layer, hessians))
        if file == pending[-1]:
            return
        step = f"layer {layer}: computing outputs"
        with closing(writer.reader(file)) as finished:
            states.advance(finished, layer)


def _method(method: str | None, target: Format, *, calibrated: bool) -> str:
    if method is None:
        return default_method(target, calibrated=calibrated)
    if method not in METHODS:
        raise OptionError(f"method must be one of {', '.join(METHODS)}, is {method!r}")
    if method != "rtn" and target.name not in CODECS:
        raise OptionError(f"{target.name} is only rounded to: leave method out")
    if method != "rtn" and not calibrated:
        raise OptionError(f"method {method} needs calibration text: give --calibration")
    return method


def _formats(
    tensors: Mapping[str, TensorInfo], target: Format, head_format: str | None
) -> dict[str, Format]:
    """What every matrix is stored in. Routers, small and touchy, stay as they are."""
    head = quantized_format(head_format) if head_format is not None else None
    formats: dict[str, Format] = {}
    for name, info in tensors.items():
        if len(info.shape) != 2:
            continue
        if name.endswith(_ROUTERS):
            formats[name] = info.format
            continue
        wanted = target
        if name in _TABLES:
            wanted = head or _default_head(info.format, target)
        kept = wanted == info.format
        formats[name] = wanted if kept else fitting_format(wanted, info.shape[1])
    return formats


def _default_head(published: Format, target: Format) -> Format:
    if published.bits_per_weight <= HEAD_BITS:
        return published
    return _HEAD_FORMAT if target.name in CODECS else target


def _windows(source: Checkpoint, config: DecoderConfig, recipe: Recipe) -> list[list[int]]:
    tokens, count = recipe.calibration, recipe.calibration_tokens
    assert tokens is not None, "checked with the method"
    length = min(_WINDOW, config.context_length)
    if not length <= count <= MOST_CALIBRATION_TOKENS:
        raise OptionError(
            f"calibration_tokens must be from {length} to {MOST_CALIBRATION_TOKENS}, is {count}"
        )
    if len(tokens) and not 0 <= min(tokens) <= max(tokens) < config.vocab_size:
        raise OptionError(f"calibration token ids must be from 0 to {config.vocab_size - 1}")
    return calibration_windows(
        tokens, length=length, count=count // length, seed=recipe.seed, bos=_bos(source)
    )


def _bos(source: Checkpoint) -> int | None:
    """The token that the model begins every text with, if it does."""
    try:
        tokenizer = load_tokenizer(source)
    except (TokenizerError, UnsupportedModelError):
        return None
    bos = tokenizer.bos_id
    return bos if tokenizer.encode("a")[:1] == [bos] else None


def _digest(windows: Sequence[Sequence[int]]) -> str | None:
    if not windows:
        return None
    return hashlib.sha256(np.array(windows, "<i8").tobytes()).hexdigest()


def _of_layers(matrices: Iterable[TensorInfo]) -> list[TensorInfo]:
    return [info for info in matrices if info.name not in _TABLES]


def _bits_per_weight(matrices: Sequence[TensorInfo]) -> float:
    weights = sum(info.shape[0] * info.shape[1] for info in matrices)
    return 8 * sum(info.nbytes for info in matrices) / weights
