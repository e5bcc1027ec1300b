"""Hugging Face folders: as transformers reads them, on tokenizers trained here."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from localrt.common.errors import TokenizerError, UnsupportedModelError
from localrt.models.tokenizers import bpe, hf, load_tokenizer
from localrt.models.tokenizers.base import Tokenizer, Vocabulary
from localrt.models.tokenizers.hf import hf_tokenizer, read_packed
from localrt.models.tokenizers.tables import PieceTable
from tests.conftest import write_byte_tokenizer
from tests.mutations import changed
from tests.tokenizers.varied_text import varied_strings

SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>"]
CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

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
FOLDER_CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "unk_token": None,
    "added_tokens_decoder": {"0": ADDED[0], "300": {"content": "new", "special": True}},
    "chat_template": "{{ bos_token }}{{ messages[0].content }}",
}


def folder_checkpoint(folder: Path) -> Any:
    return SimpleNamespace(kind="safetensors", path=folder, generation_config={}, metadata={})


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(folder_checkpoint(folder))


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        varied_strings(300, seed=1),
        trainers.BpeTrainer(
            vocab_size=700, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return backend


def byte_fallback(prefixed: bool) -> Backend:
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    names = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(
        [text for text in varied_strings(300, seed=1) if text.isascii()],
        trainers.BpeTrainer(vocab_size=700, special_tokens=names, show_progress=False),
    )
    spec = json.loads(backend.to_str())  # bytes are ordinary pieces, not added tokens
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] in SPECIALS]
    backend = Backend.from_str(json.dumps(spec))
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return backend


def save(folder: Path, backend: Backend, config: dict[str, Any] | None = None) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    declared = CONFIG | {"tokenizer_class": "PreTrainedTokenizerFast"} | (config or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    return folder


_SPLIT = {"pattern": {"Regex": r"(?<=a)\w+|\w+"}, "behavior": "Isolated", "invert": False}
_BYTES = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
LOOKS_BACK = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Split", **_SPLIT}, {"type": "ByteLevel", **_BYTES}],
}

BACKENDS = {
    "byte-level": byte_level,
    "prefixed": lambda: byte_fallback(prefixed=True),
    "gemma-like": lambda: byte_fallback(prefixed=False),
}


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), BACKENDS[request.param]())


def test_agrees_with_transformers_on_varied_strings(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder))
    ours = load(folder)
    for text in varied_strings(1000):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text, parse_special=True) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids)
    assert ours.bos_id == theirs.bos_token_id
    assert theirs.eos_token_id in ours.eos_ids
    assert ours.special_ids == set(theirs.all_special_ids) | {ours.token_id("<|im_start|>")}


@pytest.mark.parametrize("whole_words", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_packed_tables_yield_what_the_package_yields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_words: bool, late: bool
) -> None:
    backend = byte_level()
    spec = json.loads(backend.to_str())
    spec["model"]["ignore_merges"] = whole_words
    for token in spec["added_tokens"]:
        token["normalized"] = late
    backend = Backend.from_str(json.dumps(spec))
    backend.add_tokens(
        [AddedToken(name, normalized=late) for name in ("<tool>", "the", "<tool>x", "start")]
    )
    save(tmp_path, backend)
    packed = load(tmp_path)
    assert read_packed(tmp_path / "tokenizer.json", {}, undescribed) is not None
    monkeypatch.setattr(hf, "read_packed", lambda *_, **__: None)
    whole = load(tmp_path)
    tools = ["<tool>x", "a<tool>", "<tool><tool>xthe</s>the", "<s><|im_start|>the start"]
    for text in [*varied_strings(600, seed=3), *tools]:
        for parse_special in (True, False):
            ids = whole.encode(text, parse_special=parse_special)
            assert packed.encode(text, parse_special=parse_special) == ids
        assert packed.decode(ids) == whole.decode(ids)
    assert packed.vocab_size == whole.vocab_size
    tokens = range(-1, whole.vocab_size + 1)
    for of in ("token_text", "token_bytes"):
        assert [getattr(packed, of)(t) for t in tokens] == [getattr(whole, of)(t) for t in tokens]
    names = [whole.token_text(token) for token in tokens] + ["", "none such"]
    assert [packed.token_id(name) for name in names] == [whole.token_id(name) for name in names]
    assert (packed.special_ids, packed.eos_ids) == (whole.special_ids, whole.eos_ids)


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_words_that_see_what_is_before_them(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long texts are read in stretches but for these."""
    other = {"pre_tokenizer": LOOKS_BACK, "normalizer": {"type": "Lowercase"}}[part]
    backend = Backend.from_str(json.dumps(json.loads(byte_level().to_str()) | {part: other}))
    monkeypatch.setattr(bpe, "_LONG_TEXT", 1)
    ours = load(save(tmp_path, backend))
    for text in varied_strings(300, seed=8):
        assert ours.encode(text, parse_special=True) == backend.encode(text).ids


def test_a_text_has_no_fewer_tokens_than_its_length_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bpe, "_LONG_TEXT", 1)
    ours = load(folder)
    for text in varied_strings(300, seed=9):
        assert ours.least_tokens(text) <= len(ours.encode(text, parse_special=True))
    assert ours.least_tokens("a" * 100_000) > 500


def test_reading_a_long_text_can_be_ended(folder: Path) -> None:
    def watch(count: int) -> None:
        if count > 5_000:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        load(folder).encode("漢" * 100_000, watch=watch)


def test_a_text_that_the_package_cannot_encode_is_one_clear_line(tmp_path: Path) -> None:
    backend = Backend(models.Unigram([("a", -1.0), ("b", -2.0)]))  # no unknown token
    backend.decoder = decoders.Metaspace()
    tokenizer = load(save(tmp_path, backend))
    assert tokenizer.encode("ab", add_special=False) == [0, 1]
    with pytest.raises(TokenizerError, match="cannot encode this text"):
        tokenizer.encode("c")


def undescribed(_: Backend, pieces: PieceTable) -> Vocabulary:
    return Vocabulary(pieces)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        (("model", "dropout"), 0.5),
        (("model", "unk_token"), "<unk>"),
        (("added_tokens", 1, "lstrip"), True),
        (("added_tokens", 1, "id"), 7),
        (("pre_tokenizer",), {"type": "WhitespaceSplit"}),
        (("model", "merges"), [["a", "none such"]]),
    ],
)
def test_what_is_left_to_the_package(tmp_path: Path, part: Any, value: Any) -> None:
    path = save(tmp_path, byte_level()) / "tokenizer.json"
    assert read_packed(path, {1: "<s>"}, undescribed) is not None
    assert read_packed(path, {9999: "<more>"}, undescribed) is None
    path.write_text(json.dumps(changed(json.loads(path.read_text("utf-8")), [(part, value)])))
    assert read_packed(path, {}, undescribed) is None


def test_typed_control_tokens_stay_text(folder: Path) -> None:
    tokenizer = load(folder)
    for name in SPECIALS[1:]:
        ids = tokenizer.encode(f"a {name} b", add_special=False)
        assert tokenizer.special_ids.isdisjoint(ids)
        assert tokenizer.decode(ids) == f"a {name} b"
        assert tokenizer.token_id(name) in tokenizer.encode(name, parse_special=True)


def test_malformed_utf8_is_encoded_as_its_bytes(folder: Path) -> None:
    tokenizer = load(folder)
    ids = tokenizer.encode(b"a\xff\xfe\xe2\x82".decode("utf-8", "surrogateescape"))
    assert b"".join(map(tokenizer.token_bytes, ids)).endswith(b"a\xff\xfe\xe2\x82")


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("with_post_processor", [True, False])
def test_bos_and_eos_flags_count_as_in_transformers(
    tmp_path: Path, flag: bool, with_post_processor: bool
) -> None:
    from transformers import AutoTokenizer

    backend = byte_fallback(prefixed=False) if with_post_processor else byte_level()
    save(tmp_path, backend, {"add_bos_token": flag, "add_eos_token": not flag})
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    assert load(tmp_path).encode("a") == theirs("a")["input_ids"]


def test_generation_config_adds_ends(tmp_path: Path) -> None:
    checkpoint = folder_checkpoint(save(tmp_path, byte_level()))
    checkpoint.generation_config["eos_token_id"] = [2, 3]
    assert load_tokenizer(checkpoint).eos_ids == {2, 3}


def test_truncation_stored_in_the_file_is_ignored(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    save(tmp_path, backend)
    assert len(load(tmp_path).encode("a 1 b 2 c 3")) > 2


def test_no_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="only token_ids can be used"):
        load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(("tokenizer", bad, "read as a tokenizer") for bad in ("{", '{"model": 1}')),
        ("tokenizer_config", "[", r"tokenizer_config\.json"),
    ],
)
def test_a_broken_file(tmp_path: Path, name: str, content: str, message: str) -> None:
    (save(tmp_path, byte_level()) / f"{name}.json").write_text(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_decoder_that_cannot_stream_is_refused(tmp_path: Path) -> None:
    backend = byte_level()
    backend.decoder = decoders.CTC()
    save(tmp_path, backend)
    with pytest.raises(UnsupportedModelError, match="known are ByteLevel"):
        load(tmp_path)


X, Y = "<|x|>", "<|y|>"
AS_OBJECT = {"content": X, "__type": "AddedToken", "special": True} | dict.fromkeys(
    ("lstrip", "rstrip", "normalized", "single_word"), False
)


@pytest.mark.parametrize("known", [False, True], ids=["new", "in the vocabulary"])
@pytest.mark.parametrize(
    "named",
    [
        *({f"{kind}_token": X} for kind in ("bos", "eos", "pad")),
        {"extra_special_tokens": [AS_OBJECT]},
        {"additional_special_tokens": [X]},
        {"model_specific_special_tokens": {"image_token": X}},
        {"extra_special_tokens": {"image_token": X, "pad_token": Y}, "eoi_token": Y},
        {"added_tokens_decoder": {"259": {**AS_OBJECT, "content": Y}}, "eos_token": X},
    ],
    ids=str,
)
def test_special_tokens_beside_the_file(named: dict[str, Any], known: bool, tmp_path: Path) -> None:
    """Those that only tokenizer_config.json names have transformers' ids, and end answers."""
    from transformers import AutoTokenizer

    write_byte_tokenizer(tmp_path)
    if known:
        path = tmp_path / "tokenizer.json"
        spec = json.loads(path.read_text("utf-8"))
        spec["model"]["vocab"] |= {X: 259, Y: 260}
        path.write_text(json.dumps(spec))
    path = tmp_path / "tokenizer_config.json"
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | kind | named))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours, text = hf_tokenizer(tmp_path), f"a{X} b{Y}c<|im_end|>"
    assert ours.encode(text, parse_special=True) == theirs.encode(text, add_special_tokens=False)
    assert ours.eos_ids == {theirs.eos_token_id}
