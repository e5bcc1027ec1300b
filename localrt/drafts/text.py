"""The text that a draft head learns from, with the target's hidden states, and what the head is.

The target is loaded for it, writes or reads, and is freed again. Sequences that an earlier run had
finished are not made again. It knows nothing of how a head is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from localrt.drafts.data import SequenceFiles
from localrt.drafts.head import target_identity
from localrt.drafts.prompts import Prompts, chat_frame, line_starts
from localrt.drafts.training_work import DraftTraining, Reporter, claim
from localrt.drafts.writing import write_sequences
from localrt.engine.batch.batch import kv_room
from localrt.engine.native.engine import NativeEngine
from localrt.errors import OptionError
from localrt.loading.parts import LoadedModel, LoadOptions, load_parts
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import read_config
from localrt.models.units import EMBEDDING, HEAD
from localrt.quant.formats import unpack
from localrt.quant.ops.attention import LatentSpec
from localrt.speculative.draft_head_file import HeadConfig

if TYPE_CHECKING:
    from localrt.models.decoder import DecoderConfig

__all__ = ["Learnt", "learnt_text"]

Floats = npt.NDArray[np.float32]

_TOGETHER = 64  # sequences of a pass that writes, where memory holds their caches


@dataclass(frozen=True, slots=True)
class Learnt:
    """All sequences, and the head that is to be trained on them.

    ``embedding`` (V, D), ``head`` (draft vocabulary, D) and ``norm`` (D,) are the target's.
    """

    files: SequenceFiles
    config: HeadConfig
    draft_tokens: npt.NDArray[np.int64]
    embedding: Floats
    head: Floats
    norm: Floats
    eps: float
    softcap: float | None


def learnt_text(
    target: Path,
    work: Path,
    training: DraftTraining,
    text: str | None,
    *,
    device: str,
    threads: int | None,
    report: Reporter,
) -> Learnt:
    """Write what is missing to the folder ``work``.

    Raises:
        OptionError: too little text, or ``work`` is another training's.
        LocalrtError: the target cannot be loaded.
    """
    options = LoadOptions(engine="native", device=device, threads=threads, ctx=training.length)
    parts = load_parts(target, options, progress=report.progress, cancel=report.cancel)
    engine = parts.engine
    try:
        assert isinstance(engine, NativeEngine), "it was asked for"
        ids = _text_ids(parts, text)
        count, given = _sequence_counts(training, ids)
        with closing(open_checkpoint(target)) as checkpoint:
            decoder = read_config(checkpoint)
            claim(work, training, text, decoder)
            files = SequenceFiles(work / "text", count, training.length)
            if given:
                _compute_given(engine, ids, files, report)
            else:
                _write(engine, parts, ids, files, training, report)
            matrix = unpack(checkpoint.read(EMBEDDING))
            head = matrix if decoder.tied_head else unpack(checkpoint.read(HEAD))
            norm = unpack(checkpoint.read("model.norm.weight")).reshape(-1)
        config, draft_tokens = _plan(parts, decoder, files, training)
    finally:
        engine.close()
    return Learnt(
        files=files,
        config=config,
        draft_tokens=draft_tokens,
        embedding=matrix * np.float32(decoder.embedding_scale),
        head=head[draft_tokens],
        norm=norm + np.float32(decoder.norm_offset),
        eps=decoder.norm_eps,
        softcap=decoder.final_softcap,
    )


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
    report: Reporter,
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
    engine: NativeEngine, ids: Sequence[int], files: SequenceFiles, report: Reporter
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
) -> tuple[HeadConfig, npt.NDArray[np.int64]]:
    """Sizes like those of the target's blocks; the vocabulary that was used most."""
    counts = np.bincount(files.tokens().reshape(-1), minlength=decoder.vocab_size)
    most = min(training.vocab, decoder.vocab_size)
    draft_tokens = np.sort(np.argsort(-counts, kind="stable")[:most]).astype(np.int64)
    spec = decoder.attention[-1]
    head = HeadConfig(
        target=target_identity(decoder, parts.tokenizer),
        blocks=training.depth,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.value if isinstance(spec, LatentSpec) else spec.head_dim,
        intermediate_size=decoder.intermediate_size,
        draft_vocab=most,
        norm_eps=decoder.norm_eps,
        window=training.length,
    )
    return head, draft_tokens
