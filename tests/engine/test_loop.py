"""The generation loop on a scripted session: prefixes, stops, limits, cancellation, metrics."""

from __future__ import annotations

import threading
from typing import Any

from localrt.common.progress import Progress
from localrt.engine.batch.sequence import generate
from localrt.engine.request import Request
from localrt.engine.sampling import Sampling
from localrt.engine.types import Chunk
from tests.engine.fake_session import ByteTokenizer, ScriptedSession

GREEDY = Sampling(temperature=0)
PROMPT = [1, 2, 3]
TEXT = "hello world"


def spell(text: str = TEXT) -> ScriptedSession:
    """A session that answers PROMPT with ``text`` and then end-of-sequence (299)."""
    return ScriptedSession(lambda n: ord(text[n - 3]) if n - 3 < len(text) else 299)


def run(session: Any, **settings: Any) -> list[Chunk]:
    request = Request(
        **{"prompt": PROMPT, "sampling": GREEDY, "eos_ids": frozenset({299}), **settings}
    )
    return list(generate(session, ByteTokenizer(), request))  # type: ignore[arg-type]


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_eos() -> None:
    chunks = run(spell())
    assert text_of(chunks) == TEXT
    assert [c.finish_reason for c in chunks[:-1]] == [None] * len(TEXT)
    assert chunks[-1].finish_reason == "stop"
    assert [t for c in chunks for t in c.token_ids] == [ord(c) for c in TEXT]


def test_length() -> None:
    session = spell()
    chunks = run(session, max_tokens=4)
    assert (text_of(chunks), chunks[-1].finish_reason) == ("hell", "length")
    # The last token is not computed: nobody asked for what follows it.
    assert len(session.tokens) == len(PROMPT) + 3
    full = run(ScriptedSession(lambda n: 65, capacity=8))
    assert (text_of(full), full[-1].finish_reason) == ("AAAAA", "length")


def test_stop() -> None:
    chunks = run(spell(), stop=("o w",))
    assert (text_of(chunks), chunks[-1].finish_reason) == ("hell", "stop")


def test_kept_prefix() -> None:
    session = spell()
    run(session)
    session.computed.clear()
    longer = [*PROMPT, *map(ord, TEXT), 299, 7]
    chunks = run(session, prompt=longer, max_tokens=1)
    assert session.computed == [[299, 7]]
    assert chunks[-1].metrics.cached_tokens == len(longer) - 2
    assert chunks[-1].metrics.prompt_tokens == len(longer)


def test_cancel() -> None:
    cancel = threading.Event()
    request = Request(prompt=PROMPT, sampling=GREEDY, cancel=cancel)
    stream = generate(spell(), ByteTokenizer(), request)  # type: ignore[arg-type]
    shown = next(stream).text + next(stream).text
    cancel.set()
    last = list(stream)
    assert shown == "he"
    assert [c.finish_reason for c in last] == ["cancelled"]


def test_cancelled_at_once() -> None:
    cancel = threading.Event()
    cancel.set()
    chunks = run(spell(), cancel=cancel)
    assert [c.finish_reason for c in chunks] == ["cancelled"]
    assert chunks[0].metrics.completion_tokens == 0


def test_metrics() -> None:
    metrics = run(spell(), exactness="bit-exact")[-1].metrics
    assert metrics.prompt_tokens == 3
    assert metrics.completion_tokens == len(TEXT)
    assert metrics.exactness == "bit-exact"
    for value in (metrics.ttft_s, metrics.tpot_s, metrics.prefill_tok_s, metrics.decode_tok_s):
        assert value is not None
        assert value > 0
    assert metrics.peak_ram_bytes
    assert set(metrics.to_dict()) >= {"ttft_s", "accepted_per_pass", "simulated"}


def test_logprobs() -> None:
    chunks = run(spell("ab"), logprobs=2)
    first = chunks[0].logprobs[0]
    assert (first.token_id, first.text) == (ord("a"), "a")
    assert first.logprob < 0
    assert first.top[0][0] == ord("a")
    assert len(first.top) == 2
    assert run(spell("ab"))[0].logprobs == ()


def test_progress() -> None:
    steps: list[Progress] = []
    session = spell()
    run(session, on_progress=steps.append)
    assert [(p.stage, p.done, p.total, p.unit) for p in steps] == [("prefill", 3, 3, "tokens")]
    steps.clear()
    session.computed.clear()
    # The next turn's prompt repeats six tokens: a pass ends there, and three are in the cache.
    longer = [*PROMPT, 9, 9, 9, 9]
    run(session, prompt=longer, repeated=(6,), max_tokens=1, on_progress=steps.append)
    assert session.computed == [[9, 9, 9], [9]]
    assert [(p.done, p.total) for p in steps] == [(3, 4), (4, 4)]
