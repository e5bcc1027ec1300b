"""Added tokens are found leftmost and longest, as a straightforward search finds them."""

from hypothesis import given
from hypothesis import strategies as st

from localrt.models.tokenizers.base import TokenMatcher

alphabet = st.text("ab<|]^\\-", max_size=12)


def naive_split(tokens: dict[str, int], text: str) -> list[str | int]:
    parts: list[str | int] = []
    plain = ""
    while text:
        best = max((name for name in tokens if name and text.startswith(name)), key=len, default="")
        if best:
            parts += [plain, tokens[best]] if plain else [tokens[best]]
            plain = ""
        else:
            plain += text[0]
        text = text[len(best) or 1 :]
    return [*parts, plain] if plain else parts


@given(st.dictionaries(st.text("ab<|]^\\-", max_size=4), st.integers(0, 99)), alphabet)
def test_split_agrees_with_a_naive_search(tokens: dict[str, int], text: str) -> None:
    assert list(TokenMatcher(tokens).split(text)) == naive_split(tokens, text)


def test_no_tokens_leave_the_text_whole() -> None:
    assert list(TokenMatcher({}).split("text")) == ["text"]
