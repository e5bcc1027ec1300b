"""Trains a draft head for a target: text that it writes, its hidden states, and many steps.

Everything that takes long is kept in the folder ``work`` of the result: sequences as they are
written, weights and optimizers once a minute. The same call continues from there, to the same head.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from localrt.drafts.training_data import SequenceFiles, learnt_text
from localrt.drafts.training_options import DraftTraining, Reporter
from localrt.errors import MissingExtraError, OptionError
from localrt.progress import ProgressCallback
from localrt.speculative.draft_head_file import is_head_folder, write_head

if TYPE_CHECKING:
    from localrt.drafts.training_torch import Trainer

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
    nbytes: int
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
    work = out / "work"
    if is_head_folder(out) and not work.exists():
        raise OptionError(f"{out} holds a draft head already: choose another --out")
    report = Reporter(progress, cancel)
    learnt = learnt_text(target, work, training, text, report)
    files = learnt.files
    text_tokens = files.count * files.length
    tested = min(_TESTED, max(1, files.count // 8))
    if files.count <= tested:
        raise OptionError(
            f"{text_tokens} tokens are too few to learn from: at least {2 * training.length} are "
            "needed (--generate, --text)"
        )
    size = training.batch * training.length
    total = max(1, round((training.tokens or 3 * text_tokens) / size))
    trainer = Trainer(learnt, training, total=total, levels=_LEVELS)
    _train(trainer, files, files.count - tested, training, total, work / _STATE, report)
    numbers = range(files.count - tested, files.count)
    batches = [numbers[at : at + training.batch] for at in range(0, tested, training.batch)]
    loss, agreed = np.mean([trainer.score(*files.read(batch)) for batch in batches], axis=0)
    about: dict[str, Any] = {
        "steps": total,
        "tokens": total * size,
        "text_tokens": text_tokens,
        "agreed": tuple(agreed.round(4).tolist()),
        "loss": tuple(loss.round(4).tolist()),
    }
    nbytes = write_head(out, learnt.config, learnt.draft_tokens, trainer.weights(), about=about)
    if not keep:
        shutil.rmtree(work, ignore_errors=True)
    return TrainingReport(path=out, nbytes=nbytes, **about)


def _train(
    trainer: Trainer,
    files: SequenceFiles,
    count: int,
    training: DraftTraining,
    total: int,
    state: Path,
    report: Reporter,
) -> None:
    """Take the steps that are missing, on the first ``count`` sequences."""
    trainer.load(state)
    size = training.batch * training.length
    saved = time.monotonic()
    recent: list[float] = []
    batches = _batches(count, training, trainer.step)
    try:
        while trainer.step < total:
            report.check()
            recent = [*recent[-49:], trainer.train(*files.read(next(batches)))]
            detail = f"{100 * sum(recent) / len(recent):.0f} % guessed"
            report.show("train", trainer.step * size, total * size, detail)
            if time.monotonic() - saved > _SAVE_S:
                trainer.save(state)
                saved = time.monotonic()
    finally:
        trainer.save(state)


def _batches(count: int, training: DraftTraining, skip: int) -> Iterator[list[int]]:
    """Sequences of each step, shuffled again when all were taken; ``skip`` steps are done."""
    step, epoch, waiting = 0, 0, list[int]()
    while True:
        while len(waiting) < training.batch:
            waiting += np.random.default_rng((training.seed, epoch)).permutation(count).tolist()
            epoch += 1
        batch, waiting = waiting[: training.batch], waiting[training.batch :]
        if step >= skip:
            yield batch
        step += 1
