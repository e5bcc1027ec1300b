"""Agreement with transformers and llama.cpp on the vocabularies of real GGUF files.

Three differences are the oracles' own; each is undone where it is known, so that the original
tokenizer.json decides:
- transformers reads SmolLM2's GGUF without the rule that digits stand alone;
- transformers and llama.cpp read Qwen2.5's GGUF without Unicode normalization (NFC), which
  transformers' own Qwen2 tokenizer does;
- llama.cpp takes "</s>", a piece of HTML to Gemma and Qwen, for a control token by its name, and
  does not read a typed U+2581 as the space that it is in SentencePiece.
"""

import unicodedata
from functools import cache
from typing import Any

import pytest

from localrt.models.checkpoints import open_checkpoint
from localrt.models.tokenizers import load_tokenizer
from localrt.models.tokenizers.base import Tokenizer
from tests.real_models import real_model
from tests.tokenizers.varied_text import varied_strings

pytestmark = pytest.mark.real
ARCHITECTURES = ["llama", "qwen2", "gemma3"]
NAMES = ["smollm2", "qwen0.5b", "gemma270m"]


@cache
def loaded(name: str) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and its metadata in transformers' spelling."""
    checkpoint = open_checkpoint(real_model(name))
    prefix = "tokenizer.ggml."
    keys = [key for key in checkpoint.metadata if key.startswith(prefix)]
    values = {key.removeprefix(prefix): checkpoint.metadata[key] for key in keys}
    tokenizer = load_tokenizer(checkpoint)
    checkpoint.close()
    return tokenizer, values


@pytest.mark.parametrize(("name", "architecture"), zip(NAMES, ARCHITECTURES, strict=True))
def test_agrees_with_transformers(name: str, architecture: str) -> None:
    import transformers
    from tokenizers import pre_tokenizers

    gguf = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    ours, metadata = loaded(name)
    spec = {**metadata, "tokenizer_type": metadata["model"]}
    if (scores := spec.get("scores")) is not None:
        spec["scores"] = list(scores)
    theirs, _ = gguf.convert_gguf_tokenizer(architecture, spec)
    if name == "smollm2":
        theirs.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if name == "qwen0.5b":
        rules = transformers.Qwen2Tokenizer().backend_tokenizer
        theirs.pre_tokenizer, theirs.normalizer = rules.pre_tokenizer, rules.normalizer
    texts = varied_strings(2500)
    encodings = theirs.encode_batch(texts, add_special_tokens=False)
    for text, expected in zip(texts, (found.ids for found in encodings), strict=True):
        assert ours.encode(text, add_special=False, parse_special=True) == expected, text
        assert ours.decode(expected, skip_special=False) == theirs.decode(
            expected, skip_special_tokens=False
        )


@pytest.mark.parametrize("parse_special", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_llamacpp(name: str, parse_special: bool) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    ours, _ = loaded(name)
    theirs = llama_cpp.Llama(str(real_model(name)), vocab_only=True, verbose=False)
    for text in varied_strings(2500):
        if "</s>" in text or (name == "gemma270m" and "▁" in text):
            continue
        raw = unicodedata.normalize("NFC", text) if name == "qwen0.5b" else text
        expected = theirs.tokenize(raw.encode(), add_bos=True, special=parse_special)
        assert ours.encode(text, parse_special=parse_special) == expected, text
    theirs.close()


@pytest.mark.parametrize(
    ("name", "text", "count"),  # llama.cpp's counts
    [
        ("smollm2", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", 10),
        ("smollm2", "<|im_start|>user\nName a river.<|im_end|>\n<|im_start|>assistant\n", 13),
        (
            "qwen0.5b",
            "<|fim_prefix|>def add(a, b):\n    return <|fim_suffix|>\n\nprint(add(1, 2))"
            "<|fim_middle|>",
            21,
        ),
        ("gemma270m", "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n", 10),
    ],
)
def test_a_template_that_a_program_has_written(name: str, text: str, count: int) -> None:
    tokenizer, _ = loaded(name)
    assert len(tokenizer.encode_raw(text)) == count


def test_ends_of_generation() -> None:
    expected = {
        "smollm2": {"<|im_end|>", "<|endoftext|>"},
        "qwen0.5b": {"<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"},
        "gemma270m": {"<eos>", "<end_of_turn>"},
    }
    for name in NAMES:
        tokenizer, _ = loaded(name)
        assert {tokenizer.token_text(end) for end in tokenizer.eos_ids} == expected[name]
