"""What the fixture learns from: Python's sources and language reference, which every Python has.

Code with its comments, docstrings and prose: a part of the files, chosen by their names' digest, is
kept apart for measuring. A small byte-level BPE is trained on the rest. It knows no model.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["END", "Texts", "encode", "read_texts", "train_tokenizer"]

END = "<|endoftext|>"
_APART = {"test", "tests", "idlelib", "site-packages", "lib2to3", "encodings", "pydoc_data"}
_HELD_OUT = 16  # one text in so many is kept apart
_LARGEST = 400_000  # characters: larger files are tables

Ids = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts to learn from and texts to measure on, and what they are, in words."""

    learnt: tuple[str, ...]
    held_out: tuple[str, ...]
    source: str


def read_texts(more: Path | None = None) -> Texts:
    """The standard library of the Python that runs this, and the UTF-8 files of ``more``."""
    library = Path(sysconfig.get_path("stdlib"))
    found = {f"topic {name}": text for name, text in topics.items()}
    paths = [path for path in library.rglob("*.py") if not _APART & set(path.parts)]
    if more is not None:
        paths += [path for path in more.rglob("*") if path.is_file()]
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")
        if 200 <= len(text) <= _LARGEST:
            found[path.name if more else str(path.relative_to(library))] = text
    ordered = sorted(found, key=_digest)
    held = [name for name in ordered if int(_digest(name), 16) % _HELD_OUT == 0]
    apart = set(held)
    version = ".".join(map(str, sys.version_info[:2]))
    source = f"Python {version}'s standard library (without tests) and language reference"
    return Texts(
        tuple(found[name] for name in ordered if name not in apart),
        tuple(found[name] for name in held),
        source if more is None else f"{source}, and files of the user's",
    )


def train_tokenizer(texts: Texts, vocab: int) -> Tokenizer:
    """A byte-level BPE of GPT-2's kind with ``vocab`` tokens; token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts.learnt, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: tuple[str, ...]) -> Ids:
    """All texts one after another, each with its end."""
    end = tokenizer.token_to_id(END)
    batches = tokenizer.encode_batch(list(texts))
    return np.concatenate([np.array([*batch.ids, end], np.uint16) for batch in batches])


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:12]
