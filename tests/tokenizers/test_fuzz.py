"""Whatever a tokenizer's files say, reading them works or ends in one line."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.chat_format.chat_template import load_template
from localrt.common.errors import TemplateError, TokenizerError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.tensor_source import Checkpoint
from localrt.models.tokenizers import Tokenizer, load_tokenizer
from localrt.models.tokenizers.hf import hf_tokenizer
from tests.checkpoints.make_gguf import write_gguf
from tests.conftest import write_byte_tokenizer
from tests.mutations import FUZZ, changed, changes_of, is_line, paths, refusal

WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h"]
_FLAGS = {
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    "special": True,
}
ADDED = [{"id": number, "content": WORDS[number], **_FLAGS} for number in range(3)]
SPACES: dict[str, Any] = {"replacement": "▁", "prepend_scheme": "always", "split": True}
AROUND = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}
WITH_SPACES = {
    "version": "1.0",
    "added_tokens": ADDED,
    "normalizer": None,
    "pre_tokenizer": {"type": "Metaspace", **SPACES},
    "post_processor": AROUND,
    "decoder": {"type": "Metaspace", **SPACES},
    "model": {
        "type": "BPE",
        "unk_token": "<unk>",
        "byte_fallback": True,
        "continuing_subword_prefix": None,
        "vocab": {word: number for number, word in enumerate(WORDS)},
        "merges": [["▁", "h"]],
    },
}
CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "unk_token": None,
    "added_tokens_decoder": {"0": ADDED[0], "300": {"content": "new", "special": True}},
    "chat_template": "{{ bos_token }}{{ messages[0].content }}",
}
METADATA = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "h", "i", "hi"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1],
    "tokenizer.ggml.scores": [0.0, 0.0, -1.0, -2.0, -3.0],
    "tokenizer.ggml.merges": ["h i"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    "tokenizer.chat_template.tool_use": "{{ tools }}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


def byte_level(folder: Path) -> Any:
    write_byte_tokenizer(folder)
    return json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))


def write_all(folder: Path) -> None:
    """The files of a folder, and GGUF files with a vocabulary of either kind."""
    files = {"tokenizer.json": WITH_SPACES, "tokenizer_config.json": CONFIG}
    write(folder, {**files, "special_tokens_map.json": {"eos_token": "</s>"}})
    tensors = {"token_embd.weight": (np.zeros((5, 32), np.float32), "f32")}
    for kind in ("gpt2", "llama"):
        keys = {**METADATA, "tokenizer.ggml.model": kind}
        keys.pop("general.architecture")
        write_gguf(folder / f"{kind}.gguf", "llama", keys, tensors)


def use_file(path: Path) -> None:
    """Read a GGUF file, or the tokenizer and the template of the folder around another file."""
    if path.suffix == ".gguf":
        use_checkpoint(path)
        return
    use(hf_tokenizer(path.parent, eos=[2, -1]))
    load_template(cast(Checkpoint, SimpleNamespace(kind="safetensors", path=path.parent)))


def use(tokenizer: Tokenizer) -> None:
    for token in (-1, 0, 1, 300, 1 << 40):
        refusal(lambda token=token: tokenizer.token_bytes(token))


def use_checkpoint(path: Path) -> None:
    with closing(open_checkpoint(path)) as checkpoint:
        use(load_tokenizer(checkpoint))
        load_template(checkpoint)


@FUZZ
@given(data=st.data(), plain=st.booleans())
def test_any_folder(folder: Path, data: Any, plain: bool) -> None:
    files = {
        "tokenizer.json": byte_level(folder) if plain else WITH_SPACES,
        "tokenizer_config.json": CONFIG,
        "special_tokens_map.json": {"eos_token": "</s>"},
    }
    write(folder, changed(files, data.draw(changes_of(list(paths(files))))))
    described = cast(Checkpoint, SimpleNamespace(kind="safetensors", path=folder))
    assert is_line(refusal(lambda: use(hf_tokenizer(folder, eos=[2, -1]))))
    assert is_line(refusal(lambda: load_template(described)))


@FUZZ
@given(data=st.data(), model=st.sampled_from(["gpt2", "llama"]))
def test_any_key_of_a_gguf_file(folder: Path, data: Any, model: str) -> None:
    metadata = changed(
        METADATA | {"tokenizer.ggml.model": model},
        data.draw(changes_of([(key,) for key in METADATA])),
    )
    path = folder / "fuzzed.gguf"
    path.unlink(missing_ok=True)
    tensors = {"token_embd.weight": (np.zeros((5, 32), np.float32), "f32")}
    kept = {key: value for key, value in metadata.items() if _writable(value)}
    kept.pop("general.architecture", None)
    write_gguf(path, "llama", kept, tensors)
    assert is_line(refusal(lambda: use_checkpoint(path)))


def _writable(value: Any) -> bool:
    """Whether GGUF has a type for it."""
    if isinstance(value, list):
        return bool(value) and all(type(each) in (int, float, str) for each in value)
    if isinstance(value, int):
        return -(1 << 31) <= value < 1 << 32
    if isinstance(value, float):
        return not abs(value) > 1e38  # float32, and not a number too
    return isinstance(value, str) and value != "\ud800"


WORD_PIECE = {
    **{"type": "WordPiece", "unk_token": "<u>", "vocab": {"x": 0}},
    **{"continuing_subword_prefix": "##", "max_input_chars_per_word": 9},
}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        # The package panics at both, while it adds what stands around a text.
        (("post_processor", "single", 0, "SpecialToken", "id"), "nowhere"),
        (("model", "continuing_subword_prefix"), "too long for a merge"),
        (("model",), WORD_PIECE),
    ],
)
def test_what_the_package_fails_at_is_one_line(tmp_path: Path, part: Any, value: Any) -> None:
    write(tmp_path, {"tokenizer.json": changed(WITH_SPACES, [(part, value)])})
    with pytest.raises(TokenizerError, match="tokenizer") as caught:
        hf_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["bos_token", "eos_token"])
def test_a_name_that_cannot_be_encoded_is_no_token(tmp_path: Path, key: str) -> None:
    config = CONFIG | {key: "\ud800"}
    write(tmp_path, {"tokenizer.json": WITH_SPACES, "tokenizer_config.json": config})
    tokenizer = hf_tokenizer(tmp_path)
    assert tokenizer.bos_id == (None if key == "bos_token" else 1)


def test_a_template_that_is_not_utf8_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TemplateError, match="is not UTF-8 text"):
        load_template(cast(Checkpoint, SimpleNamespace(kind="safetensors", path=tmp_path)))
