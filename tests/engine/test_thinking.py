"""What ends a thinking that is too long, on a text that is only marks and letters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localrt.engine.stopping import Thinking, ThinkingLimit

OPEN, CLOSE, WORD = 1, 2, 3


def run(wanted: list[int], limit: ThinkingLimit | None, *, inside: bool = False) -> list[int]:
    """The tokens that come of those that a model ``wanted``, one by one."""
    thinking, said = Thinking(limit, inside=inside), []
    for want in wanted:
        forced = thinking.take()
        token = want if forced is None else forced
        said.append(token)
        inside = token == OPEN or (inside and token != CLOSE)
        thinking.follow(inside, forced=forced is not None)
    return said


def test_a_thinking_ends_after_so_many_tokens() -> None:
    limit = ThinkingLimit(2, ((9, CLOSE, 8),))
    words = [WORD] * 6
    assert run(words, limit, inside=True) == [WORD, WORD, 9, CLOSE, 8, WORD]
    assert run([OPEN, *words], limit) == [OPEN, WORD, WORD, 9, CLOSE, 8, WORD]
    assert run([OPEN, WORD, CLOSE, WORD, WORD, WORD], limit)[-3:] == [WORD] * 3
    # All thinking counts, and what begins again ends at once, by the last way.
    twice = ThinkingLimit(2, ((CLOSE,), (7, CLOSE)))
    assert run([OPEN, WORD, WORD, 0, OPEN, 0, 0, WORD], twice) == [
        *(OPEN, WORD, WORD, CLOSE),
        *(OPEN, 7, CLOSE, WORD),
    ]


def test_what_leads_to_a_bound_answer_follows_the_models_own_end() -> None:
    limit = ThinkingLimit(None, ((CLOSE, 8),), then=(8,))
    thinking = Thinking(limit, inside=True)
    thinking.follow(True, forced=False)
    assert thinking.free
    thinking.follow(False, forced=False)
    assert (thinking.take(), thinking.take(), thinking.free) == (8, None, False)


@given(st.lists(st.sampled_from([OPEN, CLOSE, WORD]), max_size=30), st.integers(1, 5))
def test_guesses_end_where_tokens_are_forced(wanted: list[int], most: int) -> None:
    thinking, inside, free = Thinking(ThinkingLimit(most, ((CLOSE,),)), inside=False), False, 99
    for want in wanted:
        forced = thinking.take()
        assert forced is None or free <= 1
        token = want if forced is None else forced
        inside = token == OPEN or (inside and token != CLOSE)
        thinking.follow(inside, forced=forced is not None)
        free = thinking.ahead(99)
        assert 1 <= free <= 99
    assert thinking.tokens <= most
