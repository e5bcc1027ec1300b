"""Trains a draft head for a target: text that it writes, its hidden states, and many steps.

Everything that takes long is kept in the folder ``work`` of the result: sequences as they are
written, weights and optimizers once a minute. The same call goes on from there, to the same head.
What the steps are is ``training_torch.py``'s, where text comes from ``text.py``'s.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from localrt.drafts.data import SequenceFiles
from localrt.drafts.text import learnt_text
from localrt.drafts.training_work import DraftTraining, Reporter
from localrt.errors import MissingExtraError, OptionError
from localrt.progress import ProgressCallback
from localrt.speculative.draft_head_file import is_head_folder, write_head

if TYPE_CHECKING:
    from localrt.drafts.training_torch import LevelScore, Trainer

__all__ = ["DraftTraining", "TrainingReport", "train_draft"]

_TESTED = 16  # sequences that are not learnt from
_SAVE_S = 60.0
_LEVELS = 3  # unrolled: guesses, guesses of guesses, and those of these
_STATE = "training.pt"


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
    torch_part = _torch_part()
    work = out / "work"
    if is_head_folder(out) and not work.exists():
        raise OptionError(f"{out} holds a draft head already: choose another --out")
    report = Reporter(progress, cancel)
    learnt_from = learnt_text(
        target, work, training, text, device=device, threads=threads, report=report
    )
    files = learnt_from.files
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
    trainer = torch_part.Trainer(
        learnt_from.config,
        torch_part.freeze(learnt_from),
        total=total,
        levels=_LEVELS,
        seed=training.seed,
        device=device if device.startswith("cuda") else "cpu",
        threads=threads,
    )
    _train(trainer, files, learnt, training, total, work / _STATE, report)
    scores = torch_part.mean_scores(list(_tested(trainer, files, tested, training.batch)))
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
    nbytes = write_head(
        out, learnt_from.config, learnt_from.draft_tokens, trainer.weights(), about=about
    )
    if not keep:
        shutil.rmtree(work, ignore_errors=True)
    return replace(trained, nbytes=nbytes)


def _torch_part() -> Any:
    """The module that computes.

    Raises:
        MissingExtraError: torch is not installed.
    """
    try:
        from localrt.drafts import training_torch
    except ImportError as error:
        raise MissingExtraError(
            "training computes with torch: pip install 'localrt[quantize]'"
        ) from error
    return training_torch


def _train(
    trainer: Trainer,
    files: SequenceFiles,
    learnt: range,
    training: DraftTraining,
    total: int,
    state: Path,
    report: Reporter,
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


def _tested(
    trainer: Trainer, files: SequenceFiles, tested: range, batch: int
) -> Iterator[Sequence[LevelScore]]:
    """Scores of each batch, by level."""
    for start in range(0, len(tested), batch):
        yield trainer.score(*files.read(tested[start : start + batch]))
