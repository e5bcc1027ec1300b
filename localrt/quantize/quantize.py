"""Quantizes a model into a store, calibrating each layer on the output of those written before it.

A layer's inputs are measured with its original weights; its outputs are computed with the written
ones. So an interrupted run continues from its finished files and gives the same bytes. One layer is
in memory and, with calibration, the hidden states of the text. A vision encoder is copied as
published.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from localrt.common.errors import LocalrtError, OptionError
from localrt.common.option_names import option
from localrt.common.progress import Progress, ProgressCallback, note_to
from localrt.drafts.heads.files import open_head
from localrt.drafts.heads.load import kept_format, read_head_config
from localrt.models.checkpoints import Checkpoint, TensorInfo, open_checkpoint
from localrt.models.checkpoints.gguf.vision import VisionGguf
from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.checkpoints.store.manifest import PREDICTION, Quantization
from localrt.models.config import DecoderConfig
from localrt.models.encoders import POSITIONS, SCORE, TYPES
from localrt.models.registry import read_config, read_encoder_config, require_readable
from localrt.models.tensor_source import EMBEDDING, HEAD, RangedFile, WeightBlock
from localrt.models.units import Unit, list_encoder_units, list_units
from localrt.models.vision.registry import VisionSource, vision_source
from localrt.models.weight_files import STORED_ENCODER, WEIGHTS_NAME
from localrt.offload.store.pack import describe_source, main_format, stored_infos, text_files
from localrt.offload.store.writer import FilePlan, StoreWriter, plan_files
from localrt.quant.cpu.scales import fast_search
from localrt.quant.formats import CODECS, Format
from localrt.quant.methods import (
    METHODS,
    ScaleSearch,
    default_method,
    fitting_format,
    quantized_format,
)
from localrt.quantize.calibration import Calibration, calibration_ops
from localrt.quantize.layer import ROUTERS, LayerQuantizer, folded_rotation

_PIECE = 16 << 20


class StoredEncoder:
    """The encoder of the model at ``path``, if it has one; ``problem`` says why it cannot be used:
    the model then answers text alone. ``projectors`` are those of ``vision_source``.
    """

    def __init__(self, path: Path, projectors: Sequence[Path] = ()) -> None:
        self.problem = ""
        self._source: VisionSource | None = None
        self._header = b""
        try:
            self._source = vision_source(path, projectors)
        except LocalrtError as error:
            self.problem = f"pictures are refused: {error}"
        if isinstance(self._source, VisionFolder):
            self._header = _header(self._source)

    @property
    def nbytes(self) -> int:
        """Size of the encoder's file of weights in bytes; 0 without an encoder."""
        if self._source is None:
            return 0
        if isinstance(self._source, VisionGguf):
            return self._source.path.stat().st_size
        weights = sum(info.nbytes for info in self._source.tensors.values())
        return len(self._header) + weights

    def write(self, writer: StoreWriter) -> None:
        """Write the encoder, unless an earlier run of the same packing has.

        Raises:
            CheckpointError: the encoder's files are damaged.
            StorageError: the disk is full, or fails.
            CancelledError: the writer was cancelled.
        """
        source = self._source
        if source is None:
            shutil.rmtree(writer.folder / STORED_ENCODER, ignore_errors=True)
            return
        if isinstance(source, VisionGguf):
            name, pieces = "mmproj.gguf", _contents(source.path)
        else:
            name, pieces = WEIGHTS_NAME, self._safetensors(source)
            # The settings are merged already: the nested copy would say them twice.
            processor = {key: v for key, v in source.processor.items() if key != "image_processor"}
            settings = {"config": source.config, "preprocessor_config": processor}
            for file, values in settings.items():
                writer.write_bytes(f"{STORED_ENCODER}/{file}.json", json.dumps(values).encode())
        path = writer.folder / STORED_ENCODER / name
        if not path.is_file() or path.stat().st_size != self.nbytes:
            writer.write_pieces(f"{STORED_ENCODER}/{name}", _reported(pieces, writer, name))

    def close(self) -> None:
        """Close the encoder's files."""
        if self._source is not None:
            self._source.close()

    def _safetensors(self, source: VisionFolder) -> Iterator[bytes]:
        yield self._header
        for name in source.tensors:
            for block in source.blocks(name):
                yield block.data.tobytes()


def _contents(path: Path) -> Iterator[bytes]:
    with closing(RangedFile(path)) as file:
        for first in range(0, file.size, _PIECE):
            yield file.read(first, min(_PIECE, file.size - first)).tobytes()


def _header(source: VisionFolder) -> bytes:
    """Build the safetensors header of all tensors."""
    entries, position = {}, 0
    for name, info in source.tensors.items():
        end = position + info.nbytes
        entries[name] = {
            "dtype": info.format.name.upper(),
            "shape": info.shape,
            "data_offsets": (position, end),
        }
        position = end
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header


def _reported(pieces: Iterator[bytes], writer: StoreWriter, name: str) -> Iterator[bytes]:
    for piece in pieces:
        writer.report(name)  # which raises if the writer was cancelled
        yield piece


CALIBRATION_TOKENS = 16_384

HEAD_BITS = 8.5
"""Embedding and head stay as published up to this many bits per weight, else they become int8."""
_HEAD_FORMAT = CODECS["int8-g32"].format
_TABLES = (EMBEDDING, HEAD)
_KEPT = (*ROUTERS, POSITIONS, TYPES, SCORE)
"""Matrices that stay as published."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to quantize a model's matrices. The same recipe and source give the same bytes.

    Attributes:
        format: the layers' format: ``"int4-g32"``, ``"mxfp4"``, ``"bf16"``, ...
        method: ``"rtn"``, ``"gptq"`` or ``"mr-gptq"``; None takes the best one for the format.
        calibration: token ids of a text, for every method but rtn.
        calibration_tokens: how many of them to use, in windows of 512.
        seed: chooses the windows.
        head_format: format of embedding and head; None keeps the source's up to ``HEAD_BITS``.
    """

    format: str
    method: str | None = None
    calibration: Sequence[int] | None = None
    calibration_tokens: int = CALIBRATION_TOKENS
    seed: int = 0
    head_format: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeReport:
    """Describes the written store.

    ``bits_per_weight`` counts all matrices, ``layer_bits_per_weight`` only those of the layers.
    ``formats`` counts the layers' matrices by format. ``fallbacks`` has the format of each tensor
    whose rows do not divide into groups of the chosen one. ``vision_bytes`` are the vision
    encoder's, stored as published, not in ``nbytes``; else 0.
    ``blind`` is why a vision model has none here.
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
    formats: Mapping[str, int]
    vision_bytes: int = 0
    blind: str = ""

    def to_dict(self) -> dict[str, object]:
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
    projectors: Sequence[Path] = (),
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> QuantizeReport:
    """Quantize ``source`` by ``recipe`` and write it to the store ``out``.

    The next call continues an interrupted one.

    Args:
        source: an open checkpoint, or the path of one.
        out: the store's folder, which must not exist.
        recipe: formats, method and text.
        name, revision: name and revision of the source in the manifest.
        threads: CPU threads of the calibration passes and of the search for scales.
        projectors: the model's vision encoders in other folders.
        progress: called with ``Progress`` of the stage ``"quantize"``, in bytes, or if it is
            calibrated, in steps of about equal time.
        cancel: set it from another thread to stop with ``CancelledError``.

    Raises:
        OptionError: an unknown format or method, too little text, or ``out`` exists.
        CheckpointError: the model is damaged, or a named tensor holds NaN or infinity.
        UnsupportedModelError: an architecture or weights that localrt does not know.
        MissingExtraError: calibration needs torch.
        StorageError: the disk is full or fails.
        CancelledError: ``cancel`` was set.
    """
    target, method = quantized_format(recipe.format), method_of(recipe)
    search = fast_search(threads)

    steps = 0  # the finished layers

    def show(done: int, total: int, detail: str) -> None:
        unit = "bytes"
        if calibration is not None:
            done, total, unit = steps, calibration.config.layers, "steps"
        if progress is not None:
            progress(Progress("quantize", done, total, unit, detail))

    def finish_step() -> None:
        nonlocal steps
        steps += 1

    with ExitStack() as opened:
        if isinstance(source, Path):
            source = opened.enter_context(closing(open_checkpoint(source)))
        require_readable(source)
        config = None if read_encoder_config(source) else read_config(source)

        calibration: Calibration | None = None
        if method != "rtn":
            if config is None:
                raise OptionError(f"an encoder is only rounded: use {option('method', 'rtn')}")
            calibration = Calibration(
                source,
                config,
                calibration_ops(threads),
                recipe.calibration or (),
                count=recipe.calibration_tokens,
                seed=recipe.seed,
            )
        formats = _formats(source.tensors, target, recipe.head_format)
        infos = stored_infos(source.tensors, formats)
        units = list_encoder_units(infos) if config is None else list_units(infos, config)
        rotated = folded_rotation(config, infos) if config and method == "mr-gptq" else 0
        manifest = describe_source(
            source,
            name=name,
            revision=revision,
            format=main_format(units, infos),
            exactness="approximate",
            quantization=Quantization(
                format=recipe.format,
                head_format=recipe.head_format,
                method=method,
                seed=recipe.seed,
                calibration=None if calibration is None else calibration.digest,
                calibration_tokens=0 if calibration is None else calibration.tokens,
                compute=None if calibration is None else calibration.ops.compute_format,
                folded=rotated,
            ),
        )
        weights = LayerQuantizer(source, config, infos, search, method=method, folded=rotated)
        own: dict[str, TensorInfo] = {}
        block = None if config is None else _prediction_block(source, config, search)
        if block is not None:
            opened.callback(block.source.close)
            named = {f"{PREDICTION}.{info.name}": info for info in block.infos.values()}
            own = {name: replace(info, name=name) for name, info in named.items()}
            units = (*units, Unit(PREDICTION, tuple(own)))

        def rounded(name: str) -> Iterator[WeightBlock]:
            part = block if block is not None and name in own else weights
            return part.rounded(name.removeprefix(f"{PREDICTION}."))

        files = plan_files(units, infos | own)
        encoder = opened.enter_context(closing(StoredEncoder(source.path, projectors)))
        with StoreWriter(
            out,
            manifest,
            files,
            beside=encoder.nbytes,
            progress=show,
            note=note_to(progress),
            cancel=cancel,
        ) as writer:
            for text_name, data in text_files(source):
                writer.write_bytes(text_name, data)
            encoder.write(writer)
            if calibration is not None:
                _write_calibrated_layers(writer, files, weights, calibration, finish_step)
                steps = calibration.config.layers
            for file in writer.pending:
                writer.write(file, rounded)
            path = writer.finish()
        matrices = [info for info in infos.values() if len(info.shape) == 2]
        changed = [info for info in _of_layers(matrices) if not info.name.endswith(_KEPT)]
        return QuantizeReport(
            path=path,
            format=recipe.format,
            method=method,
            head_format=infos[HEAD if config and not config.tied_head else EMBEDDING].format.name,
            nbytes=writer.nbytes,
            parameters=sum(info.shape[0] * info.shape[1] for info in matrices),
            bits_per_weight=_bits_per_weight(matrices),
            layer_bits_per_weight=_bits_per_weight(_of_layers(matrices)),
            calibration_tokens=0 if calibration is None else calibration.tokens,
            fallbacks={info.name: info.format.name for info in changed if info.format != target},
            formats=dict(Counter(info.format.name for info in changed)),
            vision_bytes=encoder.nbytes,
            blind=encoder.problem,
        )


def _prediction_block(
    source: Checkpoint, config: DecoderConfig, search: ScaleSearch
) -> LayerQuantizer | None:
    """Return a quantizer of the model's MTP block to the formats of stored heads; None if the
    model has no block that can be read.
    """
    with suppress(LocalrtError), ExitStack() as opened:
        block = opened.enter_context(closing(open_head(source.path)))
        decoder = read_head_config(block, config).decoder
        formats = {name: kept_format(info) for name, info in block.tensors.items()}
        infos = stored_infos(block.tensors, formats)
        opened.pop_all()
        return LayerQuantizer(block, decoder, infos, search)
    return None


def _write_calibrated_layers(
    writer: StoreWriter,
    files: Sequence[FilePlan],
    weights: LayerQuantizer,
    calibration: Calibration,
    finish_step: Callable[[], None],
) -> None:
    """Write the unfinished layers; finished ones only compute the text's hidden states."""
    pending = [file for file in writer.pending if file.layer is not None]
    if not pending:
        return
    step = ""
    states = calibration.states(check=lambda: writer.report(step))
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
        finish_step()


def method_of(recipe: Recipe) -> str:
    """The method that quantizes by ``recipe``.

    Raises:
        OptionError: format, method and text cannot be combined, or one is unknown.
    """
    target = quantized_format(recipe.format)
    if recipe.head_format is not None:
        quantized_format(recipe.head_format)
    method, calibrated = recipe.method, recipe.calibration is not None
    if method is None:
        return default_method(target, calibrated=calibrated)
    if method not in METHODS:
        raise OptionError(f"{option('method')} must be one of {', '.join(METHODS)}, is {method!r}")
    if method != "rtn" and target.name not in CODECS:
        raise OptionError(f"{target.name} takes only rtn: leave {option('method')} out")
    if method != "rtn" and not calibrated:
        raise OptionError(f"method {method} needs calibration text: give {option('calibration')}")
    return method


def _formats(
    tensors: Mapping[str, TensorInfo], target: Format, head_format: str | None
) -> dict[str, Format]:
    """The stored format of each matrix. Those that are small and sensitive are not quantized."""
    head = quantized_format(head_format) if head_format is not None else None
    formats: dict[str, Format] = {}
    for name, info in tensors.items():
        if len(info.shape) != 2:
            continue
        if name.endswith(_KEPT):
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


def _of_layers(matrices: Iterable[TensorInfo]) -> list[TensorInfo]:
    return [info for info in matrices if info.name not in _TABLES]


def _bits_per_weight(matrices: Sequence[TensorInfo]) -> float:
    weights = sum(info.shape[0] * info.shape[1] for info in matrices)
    return 8 * sum(info.nbytes for info in matrices) / weights
