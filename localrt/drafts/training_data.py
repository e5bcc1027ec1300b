"""What a draft head learns from: sequences of tokens with the target's hidden states, in files.

The target is loaded for it, writes or reads, and is freed again. A file holds one sequence, and is
there whole or not at all, so that a run that was ended continues behind the last one. Hidden states
are kept in bfloat16. It knows nothing of how a head is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localrt.drafts.head import target_identity
from localrt.drafts.training_options import DraftTraining, Reporter, claim
from localrt.drafts.training_text import Prompts, chat_frame, line_starts, write_sequences
from localrt.engine.batch.batch import kv_room
from localrt.engine.native.engine import NativeEngine
from localrt.errors import OptionError, StorageError
from localrt.files import atomic_write
from localrt.loading.options import LoadOptions
from localrt.loading.parts import LoadedModel, load_parts
from localrt.models.checkpoints import open_checkpoint
from localrt.models.config import EMBEDDING, HEAD, DecoderConfig
from localrt.models.registry import read_config
from localrt.quant.formats import unpack
from localrt.quant.ops.attention import LatentSpec
from localrt.speculative.draft_head_file import HeadConfig

__all__ = ["Learnt", "SequenceFiles", "learnt_text", "to_bfloat16"]

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]
Halves = npt.NDArray[np.uint16]

_TOGETHER = 64  # sequences of a pass that writes, where memory holds their caches


def to_bfloat16(values: Floats) -> Halves:
    """The upper halves of float32 numbers, rounded to nearest (ties away from zero)."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    halves: Halves = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    return halves


class SequenceFiles:
    """The sequences of a folder: ``count`` of ``length`` tokens are wanted in all."""

    def __init__(self, folder: Path, count: int, length: int) -> None:
        self._folder = folder
        self.count = count
        self.length = length

    @property
    def missing(self) -> list[int]:
        """The numbers of the sequences that are not there yet, in order."""
        return [number for number in range(self.count) if not self._file(number).exists()]

    def add(self, number: int, tokens: Tokens, features: Floats) -> None:
        """Write sequence ``number``.

        Raises:
            StorageError: the disk is full or fails.
        """
        file = self._file(number)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as stream:
                np.savez(stream, tokens=tokens, features=to_bfloat16(features))
        except OSError as error:
            raise StorageError(f"{file}: {error.strerror or error}") from error

    def tokens(self) -> Tokens:
        """All tokens, (count, length)."""
        return np.stack([self._read(number, "tokens") for number in range(self.count)])

    def read(self, numbers: Sequence[int]) -> tuple[Tokens, Halves]:
        """Some sequences: tokens (n, length) and features (n, length, hidden)."""
        tokens = np.stack([self._read(number, "tokens") for number in numbers])
        return tokens, np.stack([self._read(number, "features") for number in numbers])

    def _read(self, number: int, name: str) -> npt.NDArray[np.generic]:
        with np.load(self._file(number)) as arrays:
            values: npt.NDArray[np.generic] = arrays[name]
            return values

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:07}.npz"


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
    target: Path, work: Path, training: DraftTraining, text: str | None, report: Reporter
) -> Learnt:
    """Write what is missing to the folder ``work``.

    Raises:
        OptionError: too little text, or ``work`` is another training's.
        LocalrtError: the target cannot be loaded.
    """
    options = LoadOptions(
        engine="native", device=training.device, threads=training.threads, ctx=training.length
    )
    parts = load_parts(target, options, progress=report.progress, cancel=report.cancel)
    engine = parts.engine
    try:
        assert isinstance(engine, NativeEngine), "it was asked for"
        ids = _text_ids(parts, text)
        count = _sequence_count(training, ids)
        with closing(open_checkpoint(target)) as checkpoint:
            decoder = read_config(checkpoint)
            claim(work, training, text, decoder)
            files = SequenceFiles(work / "text", count, training.length)
            if training.generate:
                _write(engine, parts, ids, files, training.seed, report)
            else:
                _compute_given(engine, ids, files, report)
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


def _sequence_count(training: DraftTraining, ids: Sequence[int]) -> int:
    length = training.length
    if training.generate:
        return max(2, -(-training.generate // length))
    if len(ids) < 2 * length:
        raise OptionError(
            f"the text has {len(ids)} tokens: at least {2 * length} are needed where the target "
            "writes none (--generate 0)"
        )
    return len(ids) // length


def _write(
    engine: NativeEngine,
    parts: LoadedModel,
    ids: Sequence[int],
    files: SequenceFiles,
    seed: int,
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
    total = files.count * files.length
    done = total - len(missing) * files.length

    def passed(rows: int) -> None:
        nonlocal done
        done += rows
        report.show("write", min(done, total), total)
        report.check()

    room = kv_room(engine, ram=None, gpu_memory=None)
    for written in write_sequences(
        engine,
        Prompts(ids, starts, frame, seed=seed),
        missing,
        length=files.length,
        together=max(1, min(_TOGETHER, room // engine.kv_nbytes(files.length))),
        eos_ids=parts.eos_ids,
        on_pass=passed,
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
