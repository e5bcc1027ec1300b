"""Tokenizers from GGUF key-values, on vocabularies small enough to reason about."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.chat_format.chat_template import ChatTemplate, encode_chat
from localrt.common.errors import TokenizerError, UnsupportedModelError
from localrt.models.tokenizers.base import Tokenizer
from localrt.models.tokenizers.bpe import BYTE_TO_CHAR
from localrt.models.tokenizers.gguf import gguf_tokenizer
from localrt.models.tokenizers.pretokenizers import KNOWN_PRE_TYPES, family_pre

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def metadata(model: str, tokens: list[tuple[str, int]], **more: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [text for text, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def byte_level(**more: Any) -> Tokenizer:
    tokens = [(char, NORMAL) for char in BYTE_TO_CHAR]
    tokens += [("he", NORMAL), ("ll", NORMAL), ("hell", NORMAL), ("Ġ<", NORMAL)]
    tokens += [("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL), ("<tool>", USER)]
    given = {"pre": "qwen2", "merges": ["h e", "l l", "he ll", "Ġ <"], "eos_token_id": 261} | more
    return gguf_tokenizer(metadata("gpt2", tokens, **given))


SPM_WORDS = ["▁", "h", "i", "▁h", "▁hi", "s", "<", ">", "<s", "▁▁", "a", "▁a"]


def sentencepiece(**more: Any) -> Tokenizer:
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens += [(word, NORMAL) for word in SPM_WORDS] + [("\n\n", USER), ("<end_of_turn>", CONTROL)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(SPM_WORDS))] + [-1000.0] * 2
    return gguf_tokenizer(metadata("llama", tokens, **({"scores": scores} | more)))


def spelled(tokenizer: Tokenizer, text: str, **options: bool) -> list[str]:
    return [tokenizer.token_text(token) for token in tokenizer.encode(text, **options)]


BARE = {"add_space_prefix": False, "add_bos_token": False}


@pytest.mark.parametrize(
    ("make", "options", "text", "pieces"),
    [
        (byte_level, {}, "hello<tool>h", ["hell", "o", "<tool>", "h"]),
        (sentencepiece, {}, "hi hi", ["<s>", "▁hi", "▁hi"]),
        (sentencepiece, {}, " hi", ["<s>", "▁", "▁hi"]),
        (sentencepiece, BARE, "hi hi", ["h", "i", "▁hi"]),
        (sentencepiece, BARE, " hi", ["▁hi"]),
        (sentencepiece, BARE, "€\n\na", ["<0xE2>", "<0x82>", "<0xAC>", "\n\n", "a"]),
        (sentencepiece, BARE, "<0x41>", ["<", "<0x30>", "<0x78>", "<0x34>", "<0x31>", ">"]),
    ],
)
def test_pieces(make: Any, options: dict[str, Any], text: str, pieces: list[str]) -> None:
    tokenizer = make(**options)
    assert spelled(tokenizer, text) == pieces
    assert tokenizer.decode(tokenizer.encode(text)) == text


WRITES, SILENT = "{{ bos_token }}{{ messages[0].content }}", "A: {{ messages[0].content }}"


@pytest.mark.parametrize("source", [WRITES, SILENT])
@pytest.mark.parametrize(
    ("make", "told", "begins"),
    [
        (sentencepiece, {}, True),  # the kind's default
        (sentencepiece, {"add_bos_token": True}, True),
        (sentencepiece, {"add_bos_token": False}, False),
        (byte_level, {"bos_token_id": 260}, False),
        (byte_level, {"bos_token_id": 260, "pre": "llama-bpe"}, True),
        (byte_level, {"bos_token_id": 260, "pre": "llama-bpe", "add_bos_token": False}, False),
        (byte_level, {"bos_token_id": 260, "add_bos_token": True}, True),
    ],
)
def test_one_bos_begins_a_chat(make: Any, told: dict[str, Any], begins: bool, source: str) -> None:
    tokenizer = make(**told)
    template = ChatTemplate(source, bos=tokenizer.token_text(tokenizer.bos_id))
    ids = encode_chat(tokenizer, template.render_segments([{"role": "user", "content": "hi"}]))
    begins = begins or source == WRITES
    assert ids.count(tokenizer.bos_id) == begins
    assert (ids[0] == tokenizer.bos_id) is begins


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_empty_text_has_no_tokens_but_those_around_it(make: Any) -> None:
    tokenizer = make(add_bos_token=True, add_eos_token=True, bos_token_id=1)
    assert tokenizer.encode("", add_special=False) == []
    around = tokenizer.encode("")
    assert (around[0], len(around)) == (1, 2)
    assert around[1] in tokenizer.eos_ids


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_typed_control_tokens_stay_text_unless_parsed(make: Any) -> None:
    tokenizer = make(add_bos_token=False, add_space_prefix=False)
    for special in tokenizer.special_ids - {0}:
        name = tokenizer.token_text(special)
        typed = tokenizer.encode(f"a{name}b")
        assert tokenizer.special_ids.isdisjoint(typed)
        assert tokenizer.decode(typed) == f"a{name}b"
        assert special in tokenizer.encode(f"a{name}b", parse_special=True)


def test_a_merge_that_builds_a_control_token_does_not_let_text_reach_it() -> None:
    tokens = [(char, NORMAL) for char in BYTE_TO_CHAR] + [("<s", NORMAL), ("<s>", CONTROL)]
    tokenizer = gguf_tokenizer(metadata("gpt2", tokens, pre="bloom", merges=["< s", "<s >"]))
    assert tokenizer.special_ids == {257}
    assert 257 not in tokenizer.encode("<s>")
    assert tokenizer.decode(tokenizer.encode("<s>")) == "<s>"
    assert tokenizer.encode("<s>", parse_special=True) == [257]


@pytest.mark.parametrize(("make", "bos"), [(byte_level, 260), (sentencepiece, 1)])
@pytest.mark.parametrize(
    ("adds", "text", "begins"),
    [
        (True, "{bos}hello", 1),  # already there
        (True, "hello", 1),
        (False, "{bos}{bos}hello", 2),
        (False, "hello", 0),
    ],
)
def test_a_raw_prompt_has_no_second_bos(
    make: Any, bos: int, adds: bool, text: str, begins: int
) -> None:
    tokenizer = make(add_bos_token=adds, add_eos_token=False, bos_token_id=bos)
    ids = tokenizer.encode_raw(text.format(bos=tokenizer.token_text(bos)))
    assert ids.count(bos) == ids[:begins].count(bos) == begins
    assert tokenizer.decode(ids) == text.replace("{bos}", "")


@pytest.mark.parametrize("unit", ["hello world ", "漢"])
def test_sentencepiece_long_text_has_no_fewer_tokens_than_its_length_says(unit: str) -> None:
    tokenizer, text = sentencepiece(), unit * 5000
    least = tokenizer.least_tokens(text)
    assert 0 < least <= len(tokenizer.encode(text))
    heard: list[int] = []

    def watch(count: int) -> None:
        heard.append(count)
        if count > least // 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        tokenizer.encode(text, watch=watch)


def test_phi3_role_tokens_take_the_whitespace_after_them() -> None:
    tokens = [("<s>", CONTROL), ("<|user|>", CONTROL), ("▁", NORMAL), ("h", NORMAL), ("▁h", NORMAL)]
    scores = [0.0, 0.0, -2.0, -3.0, -1.0]
    given = metadata("llama", tokens, scores=scores, add_bos_token=False, eos_token_id=0)
    tokenizer = gguf_tokenizer(given | {"general.architecture": "phi3"})
    assert spelled(tokenizer, "<|user|>\n h", parse_special=True) == ["<|user|>", "▁h"]
    assert spelled(tokenizer, "<s> h", parse_special=True) == ["<s>", "▁", "▁h"]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@given(data=st.binary(max_size=12))
def test_malformed_utf8_is_encoded_as_its_bytes(make: Any, data: bytes) -> None:
    tokenizer = make(add_space_prefix=False, pre="gpt-2")
    ids = tokenizer.encode(data.decode("utf-8", "surrogateescape"), add_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == data


def test_ends_of_generation_come_from_ids_and_names() -> None:
    assert byte_level(eos_token_id=3, eot_token_id=4).eos_ids == {3, 4, 261}
    tokenizer = sentencepiece()
    assert {tokenizer.token_text(token) for token in tokenizer.eos_ids} == {"</s>", "<end_of_turn>"}


def test_harmony_end_of_message_does_not_end_the_turn() -> None:
    tokens = [(char, NORMAL) for char in BYTE_TO_CHAR]
    tokens += [(name, CONTROL) for name in ("<|end|>", "<|return|>", "<|call|>")]
    tokenizer = gguf_tokenizer(metadata("gpt2", tokens, pre="gpt-4o", merges=[]))
    assert {tokenizer.token_text(end) for end in tokenizer.eos_ids} == {"<|return|>", "<|call|>"}


def test_ids_outside_the_vocabulary_stand_for_nothing() -> None:
    tokenizer = byte_level()
    assert tokenizer.decode([104, 10**6, -1]) == tokenizer.decode([104])
    assert tokenizer.token_text(10**6) == ""


def test_control_tokens_are_left_out_of_text_by_default() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("<|im_start|>he", parse_special=True)
    assert tokenizer.decode(ids) == "he"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>he"


FAMILIES = [
    # architecture, a token of the vocabulary, its size, the pre-tokenizer
    ("llama", "<|begin_of_text|>", 128_256, "llama-bpe"),
    ("llama", "<|im_start|>", 49_152, "smollm"),
    ("llama", "[INST]", 131_072, "tekken"),
    ("qwen2", "<|im_start|>", 151_936, "qwen2"),
    ("qwen2", "<｜begin▁of▁sentence｜>", 151_936, "deepseek-r1-qwen"),
    ("deepseek2", "<｜begin▁of▁sentence｜>", 129_280, "deepseek-v3"),
    ("gpt-oss", "<|return|>", 201_088, "gpt-4o"),
    ("phi3", "<|assistant|>", 200_064, "gpt-4o"),
    ("glm4moe", "[gMASK]", 151_552, "glm4"),
    ("llama", "<|im_start|>", 32_000, None),  # anybody's
]


@pytest.mark.parametrize(("architecture", "token", "size", "wanted"), FAMILIES)
def test_a_familys_pre_tokenizer(
    architecture: str, token: str, size: int, wanted: str | None
) -> None:
    ids = {token: 7}
    assert family_pre(architecture, size, ids.get) == wanted
    assert wanted is None or wanted in KNOWN_PRE_TYPES
    assert family_pre(architecture, size, {}.get) is None


SMOLLM = [(char, NORMAL) for char in BYTE_TO_CHAR] + [("<|im_start|>", CONTROL)]
SMOLLM += [(f"unused-{number}", NORMAL) for number in range(49_152 - len(SMOLLM) - 1)]
SMOLLM += [("12", NORMAL)]


@pytest.mark.parametrize(
    ("pre", "architecture", "option", "wanted", "said"),
    [
        (None, "llama", None, ["1", "2"], "names no pre-tokenizer: it is read with smollm"),
        ("new-one", "llama", None, ["1", "2"], "unknown pre-tokenizer 'new-one': it is read with"),
        ("gpt-2", "llama", None, ["12"], ""),
        (None, "other", None, ["12"], "name the right one with"),
        ("new-one", "other", None, None, "name the right one with"),
        ("new-one", "other", "gpt-2", ["12"], ""),
    ],
)
def test_a_pre_tokenizer_that_is_missing_or_unknown(
    pre: str | None, architecture: str, option: str | None, wanted: list[str] | None, said: str
) -> None:
    more = {} if pre is None else {"pre": pre}
    given = metadata("gpt2", SMOLLM, merges=["1 2"], **more)
    given["general.architecture"] = architecture
    notes: list[str] = []
    if wanted is None:
        with pytest.raises(UnsupportedModelError, match=said):
            gguf_tokenizer(given, pre=option, note=notes.append)
        return
    tokenizer = gguf_tokenizer(given, pre=option, note=notes.append)
    assert spelled(tokenizer, "12") == wanted
    assert len(notes) == bool(said)
    assert said in "".join(notes)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, TokenizerError, "no tokenizer"),
        ({"tokenizer.ggml.model": "rwkv"}, UnsupportedModelError, "known are gpt2, llama"),
        (metadata("gpt2", [("a", 1)], pre="new-one", merges=[]), UnsupportedModelError, "qwen2"),
        (metadata("gpt2", [("a", 1)]), TokenizerError, "merges is missing"),
        (metadata("gpt2", [("a", 1)], merges=["x y"]), TokenizerError, "cannot be used"),
        (metadata("llama", [("a", 1)], scores=[]), TokenizerError, "1 tokens but 0 scores"),
        (metadata("llama", [("a", 1)], token_type=[1, 1]), TokenizerError, "1 tokens but 2 token"),
        (metadata("llama", [("<0xZZ>", 6)], scores=[0.0]), TokenizerError, "malformed"),
        (metadata("gpt2", []) | {"tokenizer.ggml.tokens": 5}, TokenizerError, "tokens must be"),
        (metadata("gpt2", [("a", 1)], merges=[], pre=[4]), TokenizerError, "pre must be"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(
    given: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        gguf_tokenizer(given)
    assert "\n" not in str(caught.value)
