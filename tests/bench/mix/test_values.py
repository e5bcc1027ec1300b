"""A mix's file: what is read, and a line for each mistake."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.bench.mix.mix import SHIPPED, Goals, percentiles, read_mix
from localrt.common.errors import LocalrtError, OptionError

GOOD = """
seconds = 60
seed = 7
[models]
small = "a.gguf"
[server]
ram = "2GB"
[[app]]
name = "chat"
class = "interactive"
kind = "chat"
model = "small"
every_s = 5
goals = { ttft_s = 1, tpot_s = 0.2 }
[[neighbour]]
name = "film"
kind = "video"
[[neighbour]]
name = "other"
kind = "memory"
bytes = "2GB"
for_s = 10
"""


def _read(folder: Path, text: str, **options: Any) -> Any:
    file = folder / "day.toml"
    file.write_text(text)
    return read_mix(str(file), **options)


def test_values(tmp_path: Path) -> None:
    mix = _read(tmp_path, GOOD)
    assert (mix.name, mix.seconds, mix.seed) == ("day", 60, 7)
    assert mix.models == {"small": "a.gguf"}
    assert mix.server == {"ram": "2GB"}
    (app,) = mix.apps
    assert (app.name, app.class_, app.every_s, app.turns) == ("chat", "interactive", 5, 3)
    assert app.goals == Goals(ttft_s=1, tpot_s=0.2)
    film, other = mix.neighbours
    assert film.work == {"frame_ms": 33.3, "work_mb": 4.0}
    assert (other.for_s, other.work) == (10, {"bytes": 2_000_000_000})


def test_models_and_seconds_of_the_command_line(tmp_path: Path) -> None:
    assert _read(tmp_path, GOOD, models={"small": "b"}).models == {"small": "b"}
    assert _read(tmp_path, GOOD, every="c", seconds=3).models == {"small": "c"}
    short = _read(tmp_path, GOOD.replace("for_s", "start_s = 30\nfor_s"), seconds=6)
    assert (short.seconds, short.apps[0].every_s) == (6, 5)
    assert [(each.start_s, each.for_s) for each in short.neighbours] == [(0, None), (3, 1)]
    with pytest.raises(OptionError, match="seconds must be above 0, is 0"):
        _read(tmp_path, GOOD, seconds=0)
    with pytest.raises(OptionError, match=r"--model large=\.\.\.: .*day.toml has no such model"):
        _read(tmp_path, GOOD, models={"large": "b"})


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped(name: str) -> None:
    mix = read_mix(name, every="m")
    assert mix.name == name
    assert set(mix.models.values()) == {"m"}
    with pytest.raises(
        LocalrtError, match=f"{name}: \\[\\[app\\]\\] 1: model .*--model [a-z]+=PATH"
    ):
        read_mix(name)


# What is replaced in the good file by what, and the line.
MISTAKES = [
    ("seconds = 60", "", "the file: seconds is missing"),
    ("seconds = 60", "seconds = 0", "the file: seconds must be a number above 0, is 0"),
    ("seconds = 60", "seconds = inf", "the file: seconds must be a number above 0, is inf"),
    ("seed = 7", "seed = 1.5", "the file: seed must be a whole number, is 1.5"),
    ("seed = 7", "seeds = 7", "the file: seeds is unknown: did you mean seed?"),
    ('small = "a.gguf"', "small = 3", "[models]: small must be a text, is 3"),
    ('ram = "2GB"', "quick = true", "[server]: quick is unknown: known: ram"),
    ('name = "chat"', "", "[[app]] 1: name is missing"),
    ('"interactive"', '"urgent"', "[[app]] 1: class must be one of interactive, background"),
    ('kind = "chat"', 'kind = "talk"', "[[app]] 1: kind must be one of chat, completion, agent"),
    ('model = "small"', 'model = "big"', "[[app]] 1: model 'big' is not in [models]"),
    ("every_s = 5", "", "[[app]] 1: arrivals are missing: give one of every_s, poisson_s, closed"),
    ("every_s = 5", "every_s = 5\nclosed = 1", "arrivals every_s and closed contradict"),
    ("every_s = 5", "every_s = true", "[[app]] 1: every_s must be a number above 0, is True"),
    ("every_s = 5", "closed = 0", "[[app]] 1: closed must be a whole number above 0, is 0"),
    ("every_s = 5", "every_s = 5\nstart_s = 60", "[[app]] 1: start_s is after the end of the mix"),
    ("every_s = 5", "every_s = 5\ntexts = 2", "[[app]] 1: texts has no meaning for chat"),
    ("every_s = 5", 'every_s = 5\nprompts = "x"', "[[app]] 1: prompts no file 'x'"),
    ("ttft_s = 1,", "ttft = 1,", "[[app]] 1 goals: ttft is unknown: did you mean ttft_s?"),
    ("ttft_s = 1,", "ttft_s = -1,", "[[app]] 1 goals: ttft_s must be a number above 0, is -1"),
    ("tpot_s = 0.2", "deadline_s = 0.5", "goals: deadline_s is 0.5, less than ttft_s, 1"),
    ('kind = "chat"', 'kind = "embeddings"', "[[app]] 1 goals: ttft_s has no meaning for emb"),
    ('kind = "video"', 'kind = "game"', "[[neighbour]] 1: kind must be one of compiler, video"),
    (
        'kind = "video"',
        'kind = "video"\ncores = 2',
        "[[neighbour]] 1: cores has no meaning",
    ),
    ('"2GB"\nfor_s', '"much"\nfor_s', "[[neighbour]] 2: bytes must be a size, is 'much'"),
    ("for_s = 10", "start_s = 60", "[[neighbour]] 2: start_s is after the end of the mix"),
    ('name = "other"', 'name = "film"', "[[neighbour]] 2: name 'film' is used twice"),
    ("[[neighbour]]", "[[neighbours]]", "the file: neighbours is unknown: did you mean neighbour?"),
    ("[[app]]", "[app]", "the file: app must be an array of tables, is {"),
    ("seed = 7", "seed =", "is not TOML"),
]


@pytest.mark.parametrize(("old", "new", "line"), MISTAKES, ids=[line for *_, line in MISTAKES])
def test_mistakes(tmp_path: Path, old: str, new: str, line: str) -> None:
    assert old in GOOD
    with pytest.raises(LocalrtError) as caught:
        _read(tmp_path, GOOD.replace(old, new))
    message = str(caught.value)
    assert line in message
    assert "day.toml" in message
    assert "\n" not in message
    assert not isinstance(caught.value, OptionError)  # exit status 1


def test_no_such_mix() -> None:
    with pytest.raises(LocalrtError, match=r"no mix 'stud': give a \.toml file, or student, dev"):
        read_mix("stud")


def test_prompts(tmp_path: Path) -> None:
    text = GOOD.replace("every_s = 5", 'every_s = 5\nprompts = "mine.txt"')
    file = tmp_path / "mine.txt"
    file.write_text("one\n\n{two}\n")
    assert _read(tmp_path, text).apps[0].prompts == ("one", "{two}")
    file.write_text('{"prompt": "a"}\n{"prompt": "b\\nc"}\n')
    assert _read(tmp_path, text).apps[0].prompts == ("a", "b\nc")
    for bad, line in (("", "has no texts"), ('{"text": "a"}', 'no {"prompt": TEXT}')):
        file.write_text(bad)
        with pytest.raises(LocalrtError) as caught:
            _read(tmp_path, text)
        assert line in str(caught.value)
    both = text.replace("every_s = 5", "every_s = 5\nprompt_words = 9")
    with pytest.raises(LocalrtError, match="prompt_words contradicts prompts"):
        _read(tmp_path, both)


@given(st.lists(st.floats(0, 1e6), max_size=50))
def test_percentiles(values: list[float]) -> None:
    found = percentiles(values)
    assert list(found) == ["p50", "p95", "p99"]
    if not values:
        assert set(found.values()) == {None}
        return
    p50, p95, p99 = (value for value in found.values() if value is not None)
    steps = [min(values), p50, p95, p99, max(values)]
    assert steps == pytest.approx(sorted(steps))
    assert p50 == pytest.approx(float(np.median(values)))


TIMES = {"ttft_s": 1.0, "tpot_s": 0.1, "deadline_s": 5.0, "tokens_s": 10.0}


@pytest.mark.parametrize("name", TIMES)
def test_each_goal_is_kept_up_to_its_number(name: str) -> None:
    """An answer of 50 tokens with exactly these times, and with one goal a little tighter."""
    took: dict[str, Any] = {"ttft_s": 1.0, "tpot_s": 0.1, "total_s": 5.0, "tokens": 50}
    assert Goals().met(**took)
    assert Goals(**TIMES).met(**took)
    tighter = TIMES[name] * (1.01 if name == "tokens_s" else 0.99)
    assert not Goals(**{**TIMES, name: tighter}).met(**took)


def test_an_answer_without_tokens_has_no_times() -> None:
    assert Goals(ttft_s=1, tpot_s=1).met(ttft_s=None, tpot_s=None, total_s=1e9, tokens=0)
    assert (Goals().stall_s, Goals(tpot_s=0.2).stall_s) == (1.0, 0.4)


@pytest.mark.parametrize(
    ("after", "first", "missed"),
    [(0.4, None, False), (0.6, None, True), (1.9, 0.4, False), (1.9, 0.6, True), (2.1, 0.4, True)],
)
def test_given_up_before_a_goal_was_missed(after: float, first: float | None, missed: bool) -> None:
    assert Goals(ttft_s=0.5, deadline_s=2).missed_by(after, ttft_s=first) is missed
    assert not Goals().missed_by(after, ttft_s=first)


def test_the_shipped_mixes_are_toml_of_our_keys_only() -> None:
    folder = Path(__file__).parents[3] / "localrt/bench/mix/data"
    assert sorted(file.stem for file in folder.iterdir()) == sorted(SHIPPED)
    for file in folder.iterdir():
        assert "models" not in tomllib.loads(file.read_text("utf-8"))
