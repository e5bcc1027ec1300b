"""Trains a draft head for a target: text that it writes, its hidden states, and many steps.

Everything that takes long is kept in the folder ``work`` of the result: the text as it is written,
weights and optimizers once a minute. The same call continues from there, to the same head.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from localrt.drafts.head import target_identity
from localrt.drafts.training_text import (
    Report,
    SequenceFile,
    beginnings,
    chat_frame,
    pieces,
    write_text,
)
from localrt.engine.native.engine import NativeEngine
from localrt.errors import CancelledError, MissingExtraError, OptionError
from localrt.files import write_bytes
from localrt.loading.options import LoadOptions
from localrt.loading.parts import LoadedModel, load_parts
from localrt.models.checkpoints import open_checkpoint
from localrt.models.config import DecoderConfig
from localrt.models.registry import read_config
from localrt.option_names import option
from localrt.progress import Progress, ProgressCallback
from localrt.quant.ops.attention import LatentSpec
from localrt.speculative.draft_head import target_parts
from localrt.speculative.draft_head_file import MOST_BLOCKS, HeadConfig, is_head_folder, write_head

if TYPE_CHECKING:
    from localrt.drafts.training_torch import Trainer

__all__ = ["DraftTraining", "TrainingReport", "train_draft"]

_TESTED = 16  # sequences that are not learnt from
_SAVE_S = 60.0
_BOUNDS = {
    "generate": (0, 1 << 40),
    "tokens": (1, 1 << 40),
    "depth": (1, MOST_BLOCKS),
    "vocab": (2, 1 << 20),
    "length": (16, 1 << 16),
    "batch": (1, 4096),
    "seed": (0, (1 << 63) - 1),
    "threads": (1, 1 << 16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTraining:
    """The options of a training.

    ``generate`` tokens are written by the target; 0 learns from the given text as it is.
    ``tokens`` are learnt from in all, the same ones again if need be; None is three times what was
    written. ``depth`` is the number of blocks, ``vocab`` the most tokens that are guessed,
    ``length`` the tokens of a sequence and how far the head's attention sees. ``device`` is
    ``"cpu"`` or ``"cuda"``.

    Raises:
        OptionError: a number out of bounds, with its bounds.
    """

    generate: int = 500_000
    tokens: int | None = None
    depth: int = 1
    vocab: int = 8192
    length: int = 384
    batch: int = 4
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise OptionError(f"{option(name)} must be from {low} to {high}, is {value}")
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise OptionError(f"{option('device')} must be cpu or cuda, is {self.device!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """What was trained: ``steps`` on ``tokens``, of ``text_tokens`` different ones.

    ``agreed`` is how often the head's best guess one, two, ... tokens ahead was the target's own,
    on sequences that it did not learn from.
    """

    path: Path
    nbytes: int
    steps: int
    tokens: int
    text_tokens: int
    agreed: tuple[float, ...]


def train_draft(
    target: Path,
    out: Path,
    training: DraftTraining,
    *,
    text: str | None = None,
    keep: bool = False,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> TrainingReport:
    """Train a head for the model at ``target`` and write it to the folder ``out``.

    The same arguments continue what was interrupted. ``text`` gives beginnings that the target
    continues. ``keep`` leaves what was written in ``out/work``: about 2 bytes times the hidden size
    for each token. ``progress`` gets ``Progress`` of the stages ``"load"``, ``"write"`` and
    ``"train"``, in tokens.

    Raises:
        OptionError: too little text, or ``out`` holds something else.
        LocalrtError: the target cannot be loaded, or runs on another engine.
        MissingExtraError: torch is not installed.
        StorageError: the disk is full or fails.
        CancelledError: ``cancel`` was set.
    """
    try:
        from localrt.drafts.training_torch import Trainer  # torch takes seconds to import
    except ImportError as error:
        raise MissingExtraError(
            "training computes with torch: pip install 'localrt[quantize]'"
        ) from error

    def report(stage: str, done: int, total: int, detail: str) -> None:
        if cancel is not None and cancel.is_set():
            raise CancelledError("the training was cancelled; the same command continues it")
        if progress is not None:
            progress(Progress(stage, done, total, "tokens", detail))

    work = out / "work"
    if is_head_folder(out) and not work.exists():
        raise OptionError(f"{out} holds a draft head already: choose another --out")
    options = LoadOptions(
        engine="native", device=training.device, threads=training.threads, ctx=training.length
    )
    parts = load_parts(target, options, progress=progress, cancel=cancel)
    with closing(parts.engine) as engine:
        assert isinstance(engine, NativeEngine), "it was asked for"
        sequences = _sequences(engine, parts, training, text, work, report)
    count, size = sequences.count, training.batch * training.length
    learnt = count - min(_TESTED, max(1, count // 8))
    text_tokens = count * training.length
    total = max(1, round((training.tokens or 3 * text_tokens) / size))
    with closing(open_checkpoint(target)) as checkpoint:
        decoder = read_config(checkpoint)
        values = _head(parts, decoder, sequences, training)
        config = HeadConfig.of(out, values)
        shared = target_parts(checkpoint, decoder, config.draft_tokens)
        trainer = Trainer(config, shared, training, total)
    _train(trainer, sequences, learnt, training, work / "training.pt", report)
    batches = [
        range(n, min(n + training.batch, count)) for n in range(learnt, count, training.batch)
    ]
    scores = [trainer.score(*sequences.read(batch)) for batch in batches]
    about: dict[str, Any] = {"steps": total, "tokens": total * size, "text_tokens": text_tokens}
    about["agreed"] = tuple(np.mean(scores, axis=0).round(4).tolist())
    nbytes = write_head(out, {**values, "about": about}, trainer.weights())
    if not keep:
        shutil.rmtree(work, ignore_errors=True)
    return TrainingReport(path=out, nbytes=nbytes, **about)


def _sequences(
    engine: NativeEngine,
    parts: LoadedModel,
    training: DraftTraining,
    text: str | None,
    work: Path,
    report: Report,
) -> SequenceFile:
    """What the head learns from; what is missing of it is computed."""
    ids: list[int] = []
    if text is not None:
        if parts.tokenizer is None:
            raise OptionError(f"a text needs a tokenizer: {parts.tokenizer_problem}")
        ids = parts.tokenizer.encode(text, add_special=False)
    length = training.length
    count = max(2, -(-training.generate // length)) if training.generate else len(ids) // length
    if count < 2:
        raise OptionError(
            f"the text has {len(ids)} tokens: at least {2 * length} are needed where the target "
            "writes none (--generate 0)"
        )
    _claim(work, training, text, parts)

    sequences = SequenceFile(work / "text", count, length, engine.hidden_size)
    given = pieces(ids, length)
    begun = beginnings(ids, chat_frame(parts), training.seed) if training.generate else given
    write_text(engine, begun, sequences, parts.eos_ids, training.seed, report)
    return sequences


def _claim(work: Path, training: DraftTraining, text: str | None, parts: LoadedModel) -> None:
    """Begin in the folder ``work``, or make sure that what lies there is the same training."""
    options = asdict(training)
    del options["device"], options["threads"]  # it may continue elsewhere
    info = parts.engine.info
    record = {
        "options": options,
        "text": hashlib.sha256((text or "").encode()).hexdigest(),
        "target": [info.architecture, info.layers, info.vocab_size],
    }
    data = json.dumps(record, indent=1).encode()
    file = work / "settings.json"
    if not file.exists():
        write_bytes(file, data, folder=True)
    elif file.read_bytes() != data:
        raise OptionError(
            f"{work.parent} holds a training with other options or another text: give the same "
            "ones to continue it, or another --out"
        )


def _head(
    parts: LoadedModel, decoder: DecoderConfig, sequences: SequenceFile, training: DraftTraining
) -> dict[str, Any]:
    """A config with sizes like those of the target's blocks; the vocabulary that was used most."""
    counts = np.bincount(sequences.tokens().reshape(-1), minlength=decoder.vocab_size)
    most = min(training.vocab, decoder.vocab_size)
    spec = decoder.attending[-1]
    return {
        "target": target_identity(decoder, parts.tokenizer),
        "draft_tokens": np.sort(np.argsort(-counts, kind="stable")[:most]).tolist(),
        "vocab_size": decoder.vocab_size,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": training.depth,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.value if isinstance(spec, LatentSpec) else spec.head_dim,
        "rms_norm_eps": decoder.norm_eps,
        "max_position_embeddings": training.length,
        "sliding_window": training.length,
    }


def _train(
    trainer: Trainer,
    sequences: SequenceFile,
    count: int,
    training: DraftTraining,
    state: Path,
    report: Report,
) -> None:
    """Take the steps that are missing, on the first ``count`` sequences, shuffled each round."""
    trainer.load(state)
    size = training.batch * training.length
    each = max(1, count // training.batch)  # steps of a round
    saved = time.monotonic()
    recent: list[float] = []
    try:
        while trainer.step < trainer.total:
            order, place = divmod(trainer.step, each)
            numbers = np.random.default_rng((training.seed, order)).permutation(count)
            batch = numbers[place * training.batch :][: training.batch]
            recent = [*recent[-49:], trainer.train(*sequences.read(batch.tolist()))]
            detail = f"{100 * sum(recent) / len(recent):.0f} % guessed"
            report("train", trainer.step * size, trainer.total * size, detail)
            if time.monotonic() - saved > _SAVE_S:
                trainer.save(state)
                saved = time.monotonic()
    finally:
        trainer.save(state)
