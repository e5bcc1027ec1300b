"""What the fixture learns from: the source code of Python's standard library (PSF licence).

Every twentieth file is held out: neither the tokenizer nor the model sees it.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 1024
_END = "<|endoftext|>"  # token 0
_NO_CODE = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_HELD = 20


def source_files(*, held: bool) -> list[Path]:
    """The library's modules but for tests and tables, in order; those held out, or all others."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(library.rglob("*.py")) if not _NO_CODE & set(f.parts)]
    return [f for n, f in enumerate(files) if (n % _HELD == _HELD // 2) is held]


def read_tokens(folder: Path) -> npt.NDArray[np.int64]:
    """All text to learn from (N,), each file behind a token 0, with the tokenizer of ``folder``,
    which is trained if there is none.
    """
    texts = [f.read_text(encoding="utf-8", errors="replace") for f in source_files(held=False)]
    path = folder / "tokenizer.json"
    if not path.exists():
        trained = Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[_END], initial_alphabet=alphabet
        )
        trained.train_from_iterator(texts, trainer)
        trained.save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    return np.concatenate([[0, *each.ids] for each in tokenizer.encode_batch(texts)])
