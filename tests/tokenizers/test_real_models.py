"""Agreement with transformers and its tokenizers on the vocabularies of real GGUF files.

Two differences are transformers' own; each is undone where it is known, so that the original
tokenizer.json decides: it reads SmolLM2's GGUF without the rule that digits stand alone, and
Qwen2.5's without Unicode normalization (NFC), which its own Qwen2 tokenizer does.
"""

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
