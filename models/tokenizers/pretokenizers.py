"""Pre-tokenizers of byte-level BPE vocabularies, by their names in GGUF.

GGUF stores only the name (``tokenizer.ggml.pre``); the rules are those of the tokenizer.json behind
each name. Patterns apply in order: matches and the gaps between them become words that no merge
crosses. If llama.cpp simplified a rule (its regexes lack ``(?i:)`` and letter categories, and it
skips Unicode normalization), the original is used. Knows no vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localrt.common.errors import UnsupportedModelError
from localrt.common.option_names import option

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer


@dataclass(frozen=True, slots=True)
class PreType:
    """A pre-tokenizer: Oniguruma patterns in order, and other rules of the tokenizer.json.

    ``nfc``: text is normalized first. ``whole_words``: a word that is in the vocabulary is not
    merged from parts. ``add_bos``: the default if the file does not say. ``digits_of_bytes``:
    Falcon splits digits in the byte alphabet, some of whose characters (superscripts, fractions)
    count as digits.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False
    digits_of_bytes: bool = False

    def normalizer(self) -> Normalizer | None:
        """The normalizer that runs first, if there is one."""
        from tokenizers import normalizers

        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> PreTokenizer:
        """The splits followed by the byte alphabet."""
        from tokenizers import Regex, pre_tokenizers

        def split(pattern: str) -> PreTokenizer:
            return pre_tokenizers.Split(Regex(pattern), "isolated")

        steps = [split(pattern) for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        if self.digits_of_bytes:
            steps += [pre_tokenizers.Digits(individual_digits=False), split("[0-9][0-9][0-9]")]
        return pre_tokenizers.Sequence(steps)


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # case matters
)


def _cl100k(digits: str) -> str:
    """OpenAI's pattern of 2023, with a variable number of digits per word."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _o200k(contraction: str, digits: str, *, but: str = "", behind: str = "/") -> str:
    """OpenAI's pattern of 2024: words also end where lower case turns to upper case.

    ``but`` excludes letters from words; ``behind`` may follow punctuation, like line ends.
    """
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n{behind}]*|{_SPACES}"
    )


_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_WORDS = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+"
)
_DEEPSEEK_V3 = (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", rf"{_WORDS}[\r\n]*|{_SPACES}")
_ASIAN = (
    "[一-鿿㐀-䶿\uf900-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdf\u0e40-\u0e7f\u0e80-\u0effក-\u17ffက-႟"
    "ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
)
# From the Unicode version that DeepSeek LLM used; escaped where NFC would change characters
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳ"
    "Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_CJK_AND_KANA = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _CJK_AND_KANA,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_KANA, r"\p{N}")
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"

_FAMILIES: dict[str, PreType] = {
    "default": PreType((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 gigachat mellum a.x-4.0 trillion granite-docling jais exaone4": PreType((_GPT2,)),
    "mpt olmo modern-bert": PreType((_GPT2,), nfc=True),
    "starcoder refact smollm codeshell exaone minerva-7b mellum2": PreType((r"\p{N}", _GPT2)),
    "command-r": PreType((r"\p{N}", _GPT2), nfc=True),
    "falcon": PreType((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2), digits_of_bytes=True),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreType(
        (_cl100k(r"\p{N}{1,3}"),), whole_words=True, add_bos=True
    ),
    "glm4": PreType((_cl100k(r"\p{N}{1,3}"),), whole_words=True),
    "dbrx smaug-bpe chatglm-bpe": PreType((_cl100k(r"\p{N}{1,3}"),)),
    "qwen2 deepseek-r1-qwen": PreType((_cl100k(r"\p{N}"),), nfc=True),
    "stablelm2 megrez hunyuan solar-open kormo grok-2": PreType((_cl100k(r"\p{N}"),)),
    "qwen35": PreType(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
        nfc=True,
    ),
    "tekken": PreType((_o200k("", r"\p{N}"),), whole_words=True, add_bos=True),
    "gpt-4o llama4 kanana2 minimax-m2": PreType((_o200k(f"{_CONTRACTION}?", r"\p{N}{1,3}"),)),
    "tiny_aya cohere2moe": PreType(
        (r"\d{1,3}(?=(?:\d{3})*\b)", _o200k(f"{_CONTRACTION}?", r"\p{N}{1,3}"))
    ),
    "exaone-moe": PreType(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "kimi-k2": PreType(
        (r"\p{Han}+|" + _o200k(f"{_CONTRACTION}?", r"\p{N}{1,3}", but=r"&&[^\p{Han}]", behind=""),),
        whole_words=True,
    ),
    "deepseek-llm": PreType(_DEEPSEEK_LLM),
    "deepseek-coder": PreType(_DEEPSEEK_CODER),
    "deepseek-v3 hunyuan-dense joyai-llm": PreType(_DEEPSEEK_V3),
    "afmoe": PreType((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEPSEEK_V3[2])),
    "laguna": PreType((r"[^\n]+|\n+", _cl100k(r"\p{N}"))),
    "seed-coder": PreType(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
        )
    ),
    "bailingmoe bailingmoe2 llada-moe": PreType(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "poro-chat bloom gpt3-finnish": PreType((_BLOOM,)),
    "viking": PreType((_BLOOM, r"\p{N}")),
}
_TABLE = {name: kind for names, kind in _FAMILIES.items() for name in names.split()}

KNOWN_PRE_TYPES: tuple[str, ...] = tuple(sorted(_TABLE))


def pre_type(name: str) -> PreType:
    """The pre-tokenizer that GGUF files call ``name``.

    Raises:
        UnsupportedModelError: an unknown name; guessing would silently corrupt every prompt.
    """
    found = _TABLE.get(name)
    if found is None:
        raise UnsupportedModelError(
            f"the GGUF tokenizer's pre-tokenizer {name!r:.60} is not known: name the right one "
            f"with {option('pre_tokenizer')}; known are {', '.join(KNOWN_PRE_TYPES)}"
        )
    return found


# Families: name, architectures, a token that their vocabularies have, and vocabulary sizes
_BEGIN, _DEEPSEEK_BEGIN = "<|begin_of_text|>", "<｜begin▁of▁sentence｜>"
_TOLD: tuple[tuple[str, str, str, range], ...] = (
    ("llama-bpe", "llama smollm3", _BEGIN, range(128_000, 129_000)),
    ("llama-bpe", "llama", _DEEPSEEK_BEGIN, range(128_000, 129_000)),
    ("deepseek-r1-qwen", "qwen2 qwen3", _DEEPSEEK_BEGIN, range(151_600, 152_100)),
    ("qwen2", "qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe qwen3next",
     "<|im_start|>", range(151_600, 152_100)),
    ("qwen35", "qwen35 qwen35moe qwen4exp", "<|im_start|>", range(248_000, 249_000)),
    ("smollm", "llama", "<|im_start|>", range(49_152, 49_160)),
    ("tekken", "llama mistral3", "[INST]", range(131_072, 131_080)),
    ("deepseek-v3", "deepseek2", _DEEPSEEK_BEGIN, range(128_800, 129_300)),
    ("deepseek-llm", "llama deepseek deepseek2", _DEEPSEEK_BEGIN, range(102_000, 102_500)),
    ("deepseek-coder", "llama", _DEEPSEEK_BEGIN, range(32_000, 32_300)),
    ("gpt-4o", "gpt-oss", "<|return|>", range(200_000, 201_100)),
    ("gpt-4o", "phi3", "<|assistant|>", range(200_000, 200_100)),
    ("dbrx", "phi3", "<|im_sep|>", range(100_300, 100_400)),
    ("dbrx", "olmo2", "<|endoftext|>", range(100_200, 100_400)),
    ("dbrx", "granite granitemoe granitehybrid", "<|start_of_role|>", range(100_300, 100_400)),
    ("refact", "granite granitemoe granitehybrid", "<|start_of_role|>", range(49_150, 49_170)),
    ("glm4", "glm4moe deepseek2", "[gMASK]", range(151_000, 155_000)),
    ("lfm2", "lfm2 lfm2moe", "<|startoftext|>", range(64_000, 66_000)),
)  # fmt: skip


def family_pre(architecture: str, size: int, find: Callable[[str], int | None]) -> str | None:
    """The family's name, if architecture and vocabulary ``size`` match one.

    ``find`` returns a token's id.
    """
    return next(
        (
            name
            for name, architectures, token, sizes in _TOLD
            if size in sizes and architecture in architectures.split() and find(token) is not None
        ),
        None,
    )
