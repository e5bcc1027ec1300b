"""A model with recurrent layers in use: going back, guesses, several at once, parked caches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import localrt
from localrt.api import Model
from tests.conftest import needs_kernels, write_byte_tokenizer
from tests.models.tiny import random_model, save_tiny, tokens
from tests.models.tiny_configs import CONFIGS

pytestmark = needs_kernels

OPTIONS = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
PROMPT = tokens(1300, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recurrent")
    save_tiny("qwen3.5", path)
    return path


@pytest.fixture
def model(folder: Path) -> Iterator[Model]:
    with localrt.load(folder, ctx=2000, draft="off") as loaded:
        yield loaded


@pytest.mark.parametrize("at", [1290, 600])
def test_edited_prompt(folder: Path, model: Model, at: int) -> None:
    """One is kept behind every 512 tokens of a prompt."""
    edited = PROMPT[:at] + tokens(30, seed=9)
    first = model.generate(token_ids=PROMPT, **OPTIONS)
    again = model.generate(token_ids=PROMPT, **OPTIONS)
    assert again.token_ids == first.token_ids
    assert again.metrics.cached_tokens == len(PROMPT) - 1
    changed = model.generate(token_ids=edited, **OPTIONS)
    assert at - 512 <= changed.metrics.cached_tokens <= at
    with localrt.load(folder, ctx=2000, draft="off") as other:
        assert other.generate(token_ids=edited, **OPTIONS).token_ids == changed.token_ids


SAMPLED = {"temperature": 1.1, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2}


@pytest.mark.parametrize(
    ("target", "draft", "sampling"),
    [
        ("qwen3.5", "kimi-linear", SAMPLED),
        pytest.param("falcon-h1", "nemotron-h", SAMPLED, marks=pytest.mark.slow),
    ],
)
def test_draft_models_change_nothing(
    target: str, draft: str, sampling: dict[str, float], tmp_path: Path
) -> None:
    """Through turns, one of which is edited."""
    for name, seed in ((target, 0), (draft, 1)):
        save_tiny(name, tmp_path / f"{name}-{seed}", seed)
    folder, options = tmp_path / f"{target}-0", {**OPTIONS, **sampling, "max_tokens": 20}
    guessing = localrt.load(folder, ctx=500, draft=str(tmp_path / f"{draft}-1"))
    with guessing, localrt.load(folder, ctx=500, draft="off") as plain:
        prompt = tokens(30)
        for turn in range(3):
            answer = plain.generate(token_ids=prompt, **options)
            guessed = guessing.generate(token_ids=prompt, **options)
            assert guessed.token_ids == answer.token_ids
            said = [*prompt, *answer.token_ids] if turn != 1 else prompt[:20]
            prompt = said + tokens(7, seed=turn)


# As Qwen3.5's: an answer is opened with a thought, which later turns do not show.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}"
    "{% if enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("name", "thinking"),
    [("qwen3.5", True), pytest.param("falcon-h1", False, marks=pytest.mark.slow)],
)
def test_turns_read_what_is_new(tmp_path: Path, name: str, thinking: bool) -> None:
    """A recurrent model goes back to where the answer began, as one that can go back anywhere."""

    def read(name: str) -> list[int]:
        config = CONFIGS[name]()
        folder = tmp_path / name
        folder.mkdir()
        config.vocab_size = write_byte_tokenizer(folder, TEMPLATE)
        random_model(config).save_pretrained(folder)
        options = {**OPTIONS, "thinking": thinking, "max_tokens": 40}
        counts, turns = [], list[dict[str, str]]()
        with localrt.load(folder, ctx=4000, draft="off") as model:
            for turn in range(8):
                turns.append({"role": "user", "content": f"Question {turn}: " + "what? " * 20})
                answer = model.generate(turns, **options)
                counts.append(answer.metrics.prompt_tokens - answer.metrics.cached_tokens)
                turns.append({"role": "assistant", "content": f"Answer {turn}. " * 5})
        return counts

    found, plain = read(name), read("llama")
    assert found[0] == plain[0]
    assert sum(found) <= 1.15 * sum(plain), (found, plain)


def test_instructions_are_read_once(tmp_path: Path) -> None:
    """Another conversation with the same instructions reads its question alone."""
    config = CONFIGS["qwen3.5"]()
    config.vocab_size = write_byte_tokenizer(tmp_path, TEMPLATE)
    random_model(config).save_pretrained(tmp_path)
    with localrt.load(tmp_path, ctx=2000, draft="off") as model:
        read = []
        for question in ("Why is that so, and since when?", "How else could it be?"):
            turns = [{"role": "system", "content": "b" * 700}]
            metrics = model.generate([*turns, {"role": "user", "content": question}]).metrics
            read.append(metrics.prompt_tokens - metrics.cached_tokens)
    assert read[0] > 700
    assert read[1] < 120
