"""Calibration: measures the inputs of a layer's matrices on a text, one layer at a time.

``HiddenStates`` carries the text through the layers: ``observe`` measures the inputs of a layer,
``advance`` moves the states past it. Only hidden states, one layer and its statistics are in
memory. It knows no formats and no files; a checkpoint supplies the weights.

The calibration text comes from a file, a folder of files, or Python's installation.

By default it is Python's language reference: English prose and code that every full installation
has. It gives far less loss than rounding; a text like the model's real work gives even less.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from localrt.common.errors import (
    MissingExtraError,
    OptionError,
    TokenizerError,
    UnsupportedModelError,
)
from localrt.common.extras import install
from localrt.common.files import read_text as read_file
from localrt.common.option_names import option
from localrt.models.config import DecoderConfig, Part
from localrt.models.decoder import load_attention, load_resident_mlp
from localrt.models.layers.moe import ResidentExperts
from localrt.models.layers.parts import Chain, PassState, Residual, SideBySide
from localrt.models.tensor_source import EMBEDDING
from localrt.models.tokenizers import load_tokenizer
from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import Hidden
from localrt.quant.ops.protocol import Batch, Check

if TYPE_CHECKING:
    from localrt.models.checkpoints import Checkpoint
    from localrt.quant.reference.calibration import CalibrationOps, Tensor
Windows = Sequence[Sequence[int]]
Layer = Sequence[Residual | SideBySide]
_WINDOW = 512
_MOST_TOKENS = 65_536


def calibration_windows(
    tokens: Sequence[int],
    *,
    length: int = 512,
    count: int = 32,
    seed: int = 0,
    bos: int | None = None,
) -> list[list[int]]:
    """Cut ``count`` windows of ``length`` tokens from all over a text, in order, or all there are.

    ``seed`` chooses the windows. ``bos`` replaces each window's first token.

    Raises:
        OptionError: the text is shorter than one window.
    """
    starts = range(0, len(tokens) - length + 1, length)
    if not starts:
        raise OptionError(
            f"the calibration text has {len(tokens)} tokens: at least {length} are needed"
        )
    draw = random.Random(seed)
    chosen = sorted(draw.sample(starts, min(count, len(starts))))

    def cut(start: int) -> list[int]:
        window = list(tokens[start : start + length])
        return window if bos is None else [bos, *window[1:]]

    return [cut(start) for start in chosen]


def calibration_ops(threads: int | None = None) -> CalibrationOps:
    """Return the operations that compute calibration passes.

    Raises:
        MissingExtraError: torch or scipy is not installed.
    """
    try:
        import scipy.linalg  # noqa: F401  gptq's, which imports it when it has sums

        from localrt.quant.reference.calibration import CalibrationOps, calibration_format
    except ImportError as error:
        raise MissingExtraError(
            f"gptq and mr-gptq need torch and scipy: {install('quantize')}, "
            f"or take {option('method', 'rtn')}"
        ) from error
    return CalibrationOps(compute_format=calibration_format(), threads=threads)


def _last(part: Part) -> Residual | SideBySide:
    """The layer in a unit's part, which may have a ``Tap`` before it."""
    layer = part.parts[-1] if isinstance(part, Chain) else part
    assert isinstance(layer, Residual | SideBySide), "others have been refused"
    return layer


class HiddenStates:
    """The hidden states of ``windows`` before a layer; at first the embeddings.

    ``check`` is called between passes and may raise to stop.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        ops: CalibrationOps,
        windows: Windows,
        *,
        check: Check = lambda: None,
    ) -> None:
        if any(spec.value_norm or spec.needs for spec in config.attending):
            raise OptionError(
                f"gptq and mr-gptq do not know {config.architecture}'s layers: use "
                + option("method", "rtn")
            )
        self._config = config
        self.ops = ops
        self._check = check
        # All windows share one cache: each layer finishes a window before the next one writes.
        cache = ops.kv_cache(config.memory, max(map(len, windows)))
        used, numbers = np.unique(
            np.concatenate([np.array(w) for w in windows]), return_inverse=True
        )
        self._batches: list[Batch] = []
        self.hidden: list[Tensor] = []  # (tokens of the window, D) for each window
        with ops.scope():
            rows = [checkpoint.read(EMBEDDING, token, token + 1) for token in used.tolist()]
            table = ops.weight((len(used), config.hidden_size), rows)
            ends = np.cumsum([len(window) for window in windows])[:-1]
            for ids in np.split(numbers.reshape(-1), ends):
                batch = Batch.extend([(cache, ids.tolist())])
                self._batches.append(batch)
                self.hidden.append(ops.embed(table, ops.begin(batch), config.embedding_scale))

    def observe(self, checkpoint: Checkpoint, layer: int) -> Mapping[str, Floats]:
        """Return H of the layer's inputs with the weights of ``checkpoint``; keeps the states.

        The keys are the first names of the groups of matrices that share an input.
        """
        parts = self._load(checkpoint, layer)
        with self.ops.scope():
            weights: dict[str, Tensor] = {}
            for part in parts:
                weights |= cast("dict[str, Tensor]", part.matrices())
            self.ops.watch(weights.values())
            self._through(parts, [self.ops.copy(x) for x in self.hidden])
            return {name: self.ops.take_hessian(weight) for name, weight in weights.items()}

    def advance(self, checkpoint: Checkpoint, layer: int) -> None:
        """Move the states past the layer, with the weights of ``checkpoint``."""
        self.hidden = self._through(self._load(checkpoint, layer), self.hidden)

    def _load(self, checkpoint: Checkpoint, layer: int) -> Layer:
        """Load a layer's parts with the weights of ``checkpoint``."""
        with self.ops.scope():
            weights, parts = (
                WeightLoader(checkpoint, self.ops),
                list[Residual | SideBySide](),
            )
            if self._config.memory_of(layer):
                parts.append(_last(load_attention(self._config, layer, weights)))
            if self._config.has_mlp(layer):
                experts = ResidentExperts()
                parts.append(
                    _last(load_resident_mlp(self._config, layer, weights, self.ops, experts))
                )
            return parts

    def _through(self, parts: Layer, hidden: Sequence[Tensor]) -> list[Tensor]:
        """Run ``parts`` on the states ``hidden``, which are overwritten, and return the results."""
        behind: list[Tensor] = []
        with self.ops.scope():
            for x, batch in zip(hidden, self._batches, strict=True):
                self._check()
                ops = self.ops
                state = PassState(ops, ops.begin(batch), cast(Hidden, x))
                for part in parts:
                    part(state)
                behind.append(cast("Tensor", state.x))
        return behind


class Calibration:
    """Passes over ``windows`` of a text.

    ``count`` of the text's ``tokens`` are used, chosen by ``seed``.

    Raises:
        OptionError: too few tokens, or tokens that the model does not have.
    """

    def __init__(
        self,
        source: Checkpoint,
        config: DecoderConfig,
        ops: CalibrationOps,
        tokens: Sequence[int],
        *,
        count: int,
        seed: int,
    ) -> None:
        self.source, self.config, self.ops = source, config, ops
        length = min(_WINDOW, config.context_length)
        if not length <= count <= _MOST_TOKENS:
            raise OptionError(
                f"{option('calibration_tokens')} must be from {length} to {_MOST_TOKENS}, "
                f"is {count}"
            )
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) < config.vocab_size:
            raise OptionError(f"calibration token ids must be from 0 to {config.vocab_size - 1}")
        self.windows = calibration_windows(
            tokens, length=length, count=count // length, seed=seed, bos=_bos(source)
        )
        self.digest = hashlib.sha256(np.array(self.windows, "<i8").tobytes()).hexdigest()
        self.tokens = sum(map(len, self.windows))

    def states(self, check: Check) -> HiddenStates:
        """The states of the windows before the first layer."""
        return HiddenStates(self.source, self.config, self.ops, self.windows, check=check)


def _bos(source: Checkpoint) -> int | None:
    """The token that begins every text of the model, if there is one."""
    try:
        tokenizer = load_tokenizer(source)
    except (TokenizerError, UnsupportedModelError):
        return None
    bos = tokenizer.bos_id
    return bos if tokenizer.encode("a")[:1] == [bos] else None


BUILTIN = "Python's language reference"
_MOST_BYTES = 8 << 20  # a hundred times the size of the windows, which come from all over it


def builtin_text() -> str | None:
    """Python's language reference, or None if Python was installed without it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return None
    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(path: Path) -> str:
    """Return the text of a file, or of all UTF-8 files in a folder, in order of their paths.

    Hidden files, and text beyond 8 MiB, are left out.

    Raises:
        OptionError: no such file, not UTF-8, or no text in the folder.
    """
    if not path.is_dir():
        return read_file(path)
    texts = list(_texts(path))
    if not texts:
        raise OptionError(f"{path} holds no UTF-8 text to calibrate with")
    return "\n\n".join(texts)


def _texts(folder: Path) -> Iterator[str]:
    room = _MOST_BYTES
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts) or not path.is_file():
            continue
        with path.open("rb") as stream:
            data = stream.read(room)
        try:
            # The last character may have been cut.
            text = data.decode("utf-8", "ignore" if len(data) == room else "strict")
        except UnicodeDecodeError:
            continue
        if "\0" in text or not text.strip():
            continue
        yield text
        room -= len(data)
        if room <= 0:
            return
