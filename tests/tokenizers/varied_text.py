"""Strings that tell tokenizers apart: languages, emoji, code, whitespace, odd characters."""

import random

_WORDS = (
    "the quick Brown isn't we'll I'M don'T naïve café Straße ÀÉ привет Ελληνικά שלום "
    "العربية हिन्दी ไทย 你好世界 こんにちは 안녕하세요 日本語テスト ﷽ 's 'LL 'ſ x² ½ ① Ⅷ ٣٤٥ १२३ "
    "123 4567 89012 3.14 1,000,000 0xFF e\u0301 A\u030a \u1100\u1161 ﬁ 👋 "
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 "
    "\U0001f3f3\ufe0f\u200d\U0001f308 🇩🇪 👍🏽 ❤️ \u200b \u200d \ufeff \xa0 \u2028 \x00 \x07 "
    "\x1b[31m \x7f \x85 � 🧿 𐐀 𝐀𝐁 \U000e0041 \U0010fffd def self.x range(10): += "
    "#!/usr/bin/env </s> <s> <eos> <unk> <bos> // /* */ {{}} => != ::<> && || \\n "
    '"quoted" `code` --- ___ ... ?! (a) [b] <|im_start|> <|endoftext|> <end_of_turn> '
    "<0x41> ▁ ▁▁ Ġ $x @user #tag https://example.com/?q=1&b=2 C:\\path\\file.txt "
    "<tool_call> <table>"
)
WORDS = _WORDS.split(" ")
GAPS = [" "] * 12 + ["", "", "", "  ", "   ", "\n", "\n\n", "\t", "\t\t", "\r\n", " \n ", "\n    "]
GAPS += [" " * 8, " " * 17, "\n" * 5, " \t ", "\u00a0", "\u3000"]
RANGES = [
    *((0x20, 0x7F), (0xA0, 0x250), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE80)),
    *((0x1100, 0x1200), (0x2000, 0x2100), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4)),
    *((0x1F300, 0x1FAFF), (0, 0xD800), (0x10000, 0x20000)),
]
EDGES = [
    "",
    " ",
    "  ",
    "\n",
    "a",
    " a",
    "a ",
    "\n\n\n",
    "   a",
    "Hello, world!",
    "ſ" * 40,
    "a" * 300,
]


def varied_strings(count: int, seed: int = 0) -> list[str]:
    """The same ``count`` strings every time."""
    rng = random.Random(seed)
    made = list(EDGES)
    while len(made) < count:
        kind = rng.random()
        if kind < 0.6:
            parts = [rng.choice(WORDS) + rng.choice(GAPS) for _ in range(rng.randint(1, 12))]
        elif kind < 0.8:
            low, high = rng.choice(RANGES)
            parts = [chr(rng.randrange(low, high)) for _ in range(rng.randint(1, 20))]
        elif kind < 0.9:
            parts = rng.choices(" \t\n\r\u00a0\u3000ab1", k=rng.randint(1, 20))
        else:
            parts = rng.choices("0123456789.,eE+-x ", k=rng.randint(1, 24))
        made.append("".join(parts))
    return made
