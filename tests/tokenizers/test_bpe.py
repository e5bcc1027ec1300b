"""Byte-level BPE yields what the ``tokenizers`` package yields as a whole, and takes little memory.

The package is built from the same key-values, with the vocabulary and merges as its own model.
"""

import json
import random
import re
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from localrt.models.tokenizers import bpe
from localrt.models.tokenizers.base import Tokenizer
from localrt.models.tokenizers.gguf import gguf_tokenizer
from localrt.models.tokenizers.pretokenizers import KNOWN_PRE_TYPES, pre_type
from tests.checkpoints.make_gguf import write_gguf
from tests.real_models import real_model
from tests.tokenizers.varied_text import varied_strings

PRE_TYPES = ["qwen2", "llama-bpe", "smollm", "falcon", "deepseek-v3"]
NORMAL, CONTROL, USER = 1, 3, 4
RUNS = [*"aBé漢あῼ1² \n\r\t\xa0'-/_!👋", "e\u0301", "\u0301", "'s", "'RE", "\u200d"]
RUNS += ["\u0e31", "\u1100", "\u1161"]


def as_a_whole(metadata: dict[str, Any], pre_name: str) -> Backend:
    """The package's own tokenizer of normal pieces; it knows no added tokens."""
    pre = pre_type(pre_name)
    typed = zip(metadata["tokens"], metadata["token_type"], strict=True)
    words = {piece: t for t, (piece, kind) in enumerate(typed) if kind in (NORMAL, USER)}
    merges = [tuple(merge.split(" ")) for merge in metadata["merges"]]
    backend = Backend(models.BPE(words, merges, ignore_merges=pre.whole_words))
    backend.pre_tokenizer = pre.pre_tokenizer()
    if (normalizer := pre.normalizer()) is not None:
        backend.normalizer = normalizer
    return backend


@cache
def trained() -> dict[str, Any]:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, show_progress=False, max_token_length=10
    )
    backend.train_from_iterator(varied_strings(500, seed=3), trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"tokens": tokens, "token_type": [NORMAL] * len(tokens), "merges": merges}


@cache
def made(pre_name: str) -> tuple[Tokenizer, Backend]:
    named = {f"tokenizer.ggml.{key}": value for key, value in trained().items()}
    named |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre_name}
    return gguf_tokenizer(named), as_a_whole(trained(), pre_name)


def agree(pair: tuple[Tokenizer, Backend], text: str) -> None:
    ours, theirs = pair
    expected = theirs.encode(text, add_special_tokens=False).ids
    ids = ours.encode(text, add_special=False)
    assert ids == expected, text


@pytest.mark.parametrize("pre_name", PRE_TYPES)
def test_agrees_on_varied_strings(pre_name: str) -> None:
    long = ("x" * 3000, "=-" * 2000, " " * 3000, "漢é" * 1000, "the" * 500 + "\n" * 700)
    for text in (*varied_strings(600, seed=4), *long):
        agree(made(pre_name), text)


@pytest.mark.parametrize("pre_name", PRE_TYPES)
@given(text=st.text(max_size=60))
def test_agrees_on_any_text(pre_name: str, text: str) -> None:
    agree(made(pre_name), text)


@pytest.mark.parametrize("pre_name", {pre_type(name): name for name in KNOWN_PRE_TYPES}.values())
def test_long_text_is_read_in_stretches_that_change_nothing(
    pre_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bpe, "_LONG_TEXT", 1)
    for text in varied_strings(100, seed=6):
        agree(made(pre_name), text)
    rng = random.Random(7)
    for _ in range(100):  # what patterns treat apart, in long and short runs
        runs = (rng.choice(RUNS) * rng.choice([1, 1, 2, 7]) for _ in range(rng.randrange(12)))
        agree(made(pre_name), "".join(runs))


@given(text=st.text(st.sampled_from("".join(RUNS)), max_size=60), times=st.integers(1, 9))
def test_a_text_has_no_fewer_tokens_than_its_length_says(text: str, times: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "_LONG_TEXT", 1)
        for name in ("qwen2", "llama-bpe"):
            ours, _ = made(name)
            assert ours.least_tokens(text * times) <= len(ours.encode(text * times))
    assert made("llama-bpe")[0].least_tokens("a" * 100_000) >= 10_000


def test_reading_a_long_text_can_be_ended() -> None:
    ours, _ = made("llama-bpe")
    for text in ("one two " * 20_000, "x" * 200_000):
        heard: list[int] = []

        def watch(count: int) -> None:
            heard.append(count)  # noqa: B023 - it is called here alone
            if count > 10_000:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            ours.encode(text, watch=watch)
        assert heard == sorted(heard)
        assert 10_000 < heard[-1] < 40_000


GROWTH = """
import sys
from pathlib import Path
import numpy
import localrt
from localrt.models.checkpoints import open_checkpoint
from localrt.models.tokenizers import load_tokenizer

def mib(key):
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024

before = mib("VmRSS")
tokenizer = load_tokenizer(open_checkpoint(Path(sys.argv[1])))
ids = tokenizer.encode("def main(): return 'hello, world'")
print(mib("VmRSS") - before, mib("VmHWM") - before)
"""


@pytest.mark.real
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
@pytest.mark.parametrize("name", ["qwen1.5b", "gemma270m"])
def test_a_large_vocabulary_takes_little_memory(name: str) -> None:
    command = [sys.executable, "-c", GROWTH, str(real_model(name))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, peak = map(float, done.stdout.split())
    assert grown < 25
    assert peak < 60


def _is_number(character: str) -> bool:
    return unicodedata.category(character).startswith("N")


@pytest.mark.llamacpp
@pytest.mark.parametrize("pre_name", ["laguna", "deepseek-v3", "afmoe"])
def test_agrees_with_llama_cpp(pre_name: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    named = {f"tokenizer.ggml.{key}": value for key, value in trained().items()}
    named |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre_name}
    (file,) = write_gguf(tmp_path / "m.gguf", "llama", named, {})
    theirs = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    ours = gguf_tokenizer(named)
    for text in (
        *varied_strings(600, seed=9),
        "a1234567 12 x12345678 가나다12ไทย\n\n\n y\r\n\r\n  -- 1234,\n",
    ):
        # Its tables of Unicode are older than the package's.
        text = "".join(c for c in text if ord(c) < 1 << 16 and c not in "²½")
        if pre_name == "afmoe":  # there, space and a number's first digits are one word at first
            text = re.sub(r"\s+(\S)", lambda m: f" {m[1]}" if _is_number(m[1]) else m[0], text)
        expected = theirs.tokenize(text.encode(), add_bos=False, special=False)
        assert ours.encode(text, add_special=False) == expected, text
    theirs.close()
