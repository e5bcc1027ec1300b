"""Trains a DGF draft head for a target: text that it writes, its hidden states, and many steps.

Everything that takes long is kept in the folder ``work`` of the result: sequences as they are
written, weights and optimizers once a minute. The same call goes on from there, to the same head.
What the steps are is ``draft_training_torch.py``'s, how text comes to be ``draft_writing.py``'s.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from localrt.draft_data import SequenceFiles
from localrt.draft_head import target_identity
from localrt.draft_prompts import Prompts, chat_frame, line_starts
from localrt.draft_writing import write_sequences
from localrt.engine.batch import kv_room
from localrt.engine.native import NativeEngine
from localrt.engine.types import Progress, ProgressCallback
from localrt.errors import CancelledError, MissingExtraError, OptionError, StorageError
from localrt.loading import LoadedModel, LoadOptions, load_parts
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import read_config
from localrt.models.units import EMBEDDING, HEAD
from localrt.quant.formats import unpack
from localrt.speculative.dgf import MOST_BLOCKS, DgfConfig
from localrt.speculative.dgf_file import is_dgf_folder, write_dgf

if TYPE_CHECKING:
    from localrt.draft_training_torch import Frozen, LevelScore, Trainer
    from localrt.models.decoder import DecoderConfig

__all__ = ["DraftTraining", "TrainingReport", "train_draft"]

_TOGETHER = 64  # sequences of a pass that writes, where memory holds their caches
_TESTED = 16  # sequences that are not learnt from
_SAVE_S = 60.0
_LEVELS = 3  # unrolled: guesses, guesses of guesses, and those of these
_STATE = "training.pt"
_SETTINGS = "settings.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTraining:
    """The options of a training.

    ``generate`` tokens are written by the target; 0 learns from the given text as it is.
    ``tokens`` are learnt from in all, the same ones again if need be; None is three times what was
    written. ``depth`` is the number of blocks, ``vocab`` the most tokens that are guessed,
    ``length`` the tokens of a sequence and how far the head's attention sees.

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

    def __post_init__(self) -> None:
        bounds = {
            "generate": (0, 1 << 40),
            "tokens": (1, 1 << 40),
            "depth": (1, MOST_BLOCKS),
            "vocab": (2, 1 << 20),
            "length": (16, 1 << 16),
            "batch": (1, 4096),
            "seed": (0, (1 << 63) - 1),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise OptionError(f"{name} must be from {low} to {high}, is {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """What was trained: ``steps`` on ``tokens``, of ``text_tokens`` different ones.

    ``agreed`` is how often the head's best guess one, two, ... tokens ahead was the target's own,
    on sequences that it did not learn from; ``loss`` are the cross-entropies there.
    """

    path: Path
    nbytes: int = 0
    steps: int
    tokens: int
    text_tokens: int
    agreed: tuple[float, ...]
    loss: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same names and values as plain JSON."""
        return {**asdict(self), "path": str(self.path)}


def train_draft(
    target: Path,
    out: Path,
    training: DraftTraining,
    *,
    text: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    keep: bool = False,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> TrainingReport:
    """Train a head for the model at ``target`` and write it to the folder ``out``.

    The same arguments go on with what was interrupted. ``text`` gives beginnings that the target
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
    trainer_class = _trainer_class()
    work = out / "work"
    if is_dgf_folder(out) and not work.exists():
        raise OptionError(f"{out} holds a draft head already: choose another --out")
    report = _Reporter(progress, cancel)
    files, frozen, config = _written(target, work, training, text, device, threads, report)
    tokens = files.tokens()
    sequences = range(files.count)
    tested = sequences[-min(_TESTED, max(1, files.count // 8)) :]
    learnt = sequences[: -len(tested)]
    if not learnt:
        raise OptionError(
            f"{tokens.size} tokens are too few to learn from: at least {2 * training.length} are "
            "needed (--generate, --text)"
        )
    wanted = training.tokens or 3 * tokens.size
    total = max(1, round(wanted / (training.batch * training.length)))
    trainer = trainer_class(
        config.head,
        frozen,
        total=total,
        levels=_LEVELS,
        seed=training.seed,
        device=device if device.startswith("cuda") else "cpu",
        threads=threads,
    )
    _train(trainer, files, learnt, training, total, work / _STATE, report)
    scores = _test(trainer, files, tested, training.batch)
    trained = TrainingReport(
        path=out,
        steps=total,
        tokens=total * training.batch * training.length,
        text_tokens=int(tokens.size),
        agreed=tuple(round(score.agreed, 4) for score in scores),
        loss=tuple(round(score.loss, 4) for score in scores),
    )
    record = trained.to_dict()
    about = {name: record[name] for name in record if name not in ("path", "nbytes")}
    nbytes = write_dgf(out, config.head, config.draft_tokens, trainer.weights(), about=about)
    if not keep:
        shutil.rmtree(work, ignore_errors=True)
    return replace(trained, nbytes=nbytes)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the head will be."""

    head: DgfConfig
    draft_tokens: np.ndarray[Any, np.dtype[np.int64]]


class _Reporter:
    """Progress out, cancelling in."""

    def __init__(self, progress: ProgressCallback | None, cancel: threading.Event | None) -> None:
        self.progress = progress
        self.cancel = cancel

    def check(self) -> None:
        if self.cancel is not None and self.cancel.is_set():
            raise CancelledError("the training was cancelled; the same command goes on with it")

    def show(self, stage: str, done: int, total: int, detail: str = "") -> None:
        if self.progress is not None:
            self.progress(Progress(stage, done, total, "tokens", detail))


def _trainer_class() -> type[Trainer]:
    try:
        from localrt.draft_training_torch import Trainer
    except ImportError as error:
        raise MissingExtraError(
            "training computes with torch: pip install 'localrt[quantize]'"
        ) from error
    return Trainer


# -- text ----------------------------------------------------------------------------------------


def _written(
    target: Path,
    work: Path,
    training: DraftTraining,
    text: str | None,
    device: str,
    threads: int | None,
    report: _Reporter,
) -> tuple[SequenceFiles, Frozen, _Plan]:
    """All sequences, the target's frozen parts, and what the head will be; the target is freed."""
    options = LoadOptions(engine="native", device=device, threads=threads, ctx=training.length)
    parts = load_parts(target, options, progress=report.progress, cancel=report.cancel)
    engine = parts.engine
    try:
        assert isinstance(engine, NativeEngine), "it was asked for"
        ids = _text_ids(parts, text)
        count, given = _sequence_counts(training, ids)
        with closing(open_checkpoint(target)) as checkpoint:
            decoder = read_config(checkpoint)
            _claim(work, training, _Settings.of(training, text, decoder))
            files = SequenceFiles(work / "text", count, training.length)
            if given:
                _compute_given(engine, ids, files, report)
            else:
                _write(engine, parts, ids, files, training, report)
            matrix = unpack(checkpoint.read(EMBEDDING))
            head = matrix if decoder.tied_head else unpack(checkpoint.read(HEAD))
            norm = unpack(checkpoint.read("model.norm.weight")).reshape(-1)
        plan = _plan(parts, decoder, files, training)
    finally:
        engine.close()
    from localrt.draft_training_torch import freeze

    frozen = freeze(
        embedding=matrix * np.float32(decoder.embedding_scale),
        head=head[plan.draft_tokens],
        norm=norm + np.float32(decoder.norm_offset),
        eps=decoder.norm_eps,
        softcap=decoder.final_softcap,
    )
    return files, frozen, plan


def _text_ids(parts: LoadedModel, text: str | None) -> list[int]:
    if text is None:
        return []
    if parts.tokenizer is None:
        raise OptionError(f"a text needs a tokenizer: {parts.tokenizer_problem}")
    return parts.tokenizer.encode(text, add_special=False)


def _sequence_counts(training: DraftTraining, ids: Sequence[int]) -> tuple[int, bool]:
    """How many sequences, and whether they are the given text itself."""
    if training.generate:
        return max(2, -(-training.generate // training.length)), False
    count = len(ids) // training.length
    if count < 2:
        raise OptionError(
            f"the text has {len(ids)} tokens: at least {2 * training.length} are needed where the "
            "target writes none (--generate 0)"
        )
    return count, True


def _write(
    engine: NativeEngine,
    parts: LoadedModel,
    ids: Sequence[int],
    files: SequenceFiles,
    training: DraftTraining,
    report: _Reporter,
) -> None:
    """Let the target write what is missing."""
    missing = files.missing
    if not missing:
        return
    frame, starts = None, []
    if parts.tokenizer is not None:
        frame = chat_frame(parts.tokenizer, parts.template)
        starts = line_starts(parts.tokenizer, ids)
    prompts = Prompts(ids, starts, frame, seed=training.seed)
    total = files.count * training.length
    done = total - len(missing) * training.length

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        report.show("write", min(done, total), total)

    room = kv_room(engine, ram=None, gpu_memory=None)
    for written in write_sequences(
        engine,
        prompts,
        missing,
        length=training.length,
        together=max(1, min(_TOGETHER, room // engine.kv_nbytes(training.length))),
        eos_ids=parts.eos_ids,
        check=report.check,
        on_tokens=count,
    ):
        files.add(written.number, written.tokens, written.features)


def _compute_given(
    engine: NativeEngine, ids: Sequence[int], files: SequenceFiles, report: _Reporter
) -> None:
    """The hidden states of the text as it is given, window by window."""
    length = files.length
    for number in files.missing:
        report.check()
        piece = list(ids[number * length : (number + 1) * length])
        session = engine.session(length)
        with closing(session):
            features = session.record_features()
            session.extend(piece, check=report.check)
            files.add(number, np.array(piece, np.int32), features.get(0, length))
        report.show("write", (number + 1) * length, files.count * length)


def _plan(
    parts: LoadedModel, decoder: DecoderConfig, files: SequenceFiles, training: DraftTraining
) -> _Plan:
    """Sizes like those of the target's blocks; the vocabulary that was used most."""
    counts = np.bincount(files.tokens().reshape(-1), minlength=decoder.vocab_size)
    most = min(training.vocab, decoder.vocab_size)
    draft_tokens = np.sort(np.argsort(-counts, kind="stable")[:most]).astype(np.int64)
    spec = decoder.attention[-1]
    head = DgfConfig(
        target=target_identity(decoder, parts.tokenizer),
        blocks=training.depth,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=decoder.intermediate_size,
        draft_vocab=most,
        norm_eps=decoder.norm_eps,
        window=training.length,
    )
    return _Plan(head, draft_tokens)


# -- the folder ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Settings:
    """What must be the same for a training to be gone on with."""

    options: dict[str, Any]
    text: str
    target: dict[str, Any]

    @classmethod
    def of(cls, training: DraftTraining, text: str | None, decoder: DecoderConfig) -> _Settings:
        digest = hashlib.sha256((text or "").encode()).hexdigest()
        sizes = ("architecture", "layers", "hidden_size", "vocab_size")
        return cls(asdict(training), digest, {name: getattr(decoder, name) for name in sizes})


def _claim(work: Path, training: DraftTraining, settings: _Settings) -> None:
    """Begin in ``work``, or make sure that what lies there is the same training.

    Raises:
        OptionError: it is another one.
    """
    file = work / _SETTINGS
    record = json.dumps(asdict(settings), indent=1, sort_keys=True)
    try:
        if file.exists():
            if file.read_text(encoding="utf-8") != record:
                raise OptionError(
                    f"{work.parent} holds a training with other options or another text: give the "
                    "same ones to go on with it, or another --out"
                )
            return
        work.mkdir(parents=True, exist_ok=True)
        file.write_text(record, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{file}: {error.strerror or error}") from error


# -- steps ---------------------------------------------------------------------------------------


def _train(
    trainer: Trainer,
    files: SequenceFiles,
    learnt: range,
    training: DraftTraining,
    total: int,
    state: Path,
    report: _Reporter,
) -> None:
    """Take the steps that are missing."""
    trainer.load(state)
    size = training.batch * training.length
    saved = time.monotonic()
    recent: list[float] = []
    batches = _batches(learnt, training, trainer.step)
    try:
        while trainer.step < total:
            report.check()
            scores = trainer.train(*files.read(next(batches)))
            recent = [*recent[-49:], scores[0].agreed]
            detail = f"{100 * sum(recent) / len(recent):.0f} % guessed"
            report.show("train", trainer.step * size, total * size, detail)
            if time.monotonic() - saved > _SAVE_S:
                trainer.save(state)
                saved = time.monotonic()
    finally:
        trainer.save(state)


def _batches(learnt: range, training: DraftTraining, skip: int) -> Iterator[list[int]]:
    """Sequences of each step, shuffled again when all were taken; ``skip`` steps are done."""
    step, epoch, waiting = 0, 0, list[int]()
    while True:
        while len(waiting) < training.batch:
            random = np.random.default_rng((training.seed, epoch))
            waiting += [learnt[n] for n in random.permutation(len(learnt)).tolist()]
            epoch += 1
        batch, waiting = waiting[: training.batch], waiting[training.batch :]
        if step >= skip:
            yield batch
        step += 1


def _test(
    trainer: Trainer, files: SequenceFiles, tested: range, batch: int
) -> Sequence[LevelScore]:
    """Mean scores by level."""
    from localrt.draft_training_torch import mean_scores

    return mean_scores(
        [
            trainer.score(*files.read(tested[start : start + batch]))
            for start in range(0, len(tested), batch)
        ]
    )
