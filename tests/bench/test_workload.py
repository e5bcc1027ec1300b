import pytest

from localrt.bench.workload import Workload, make_prompts
from localrt.common.errors import OptionError


def _bytes(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("length", [1, 512, 5000])
def test_prompt_length(length: int) -> None:
    prompts = make_prompts(Workload(prompt_tokens=length, runs=4), _bytes)
    assert [len(prompt) for prompt in prompts] == [length] * 5


def test_prompts_differ_by_run() -> None:
    workload = Workload(prompt_tokens=300, runs=3)
    prompts = make_prompts(workload, _bytes)
    assert prompts == make_prompts(workload, _bytes)
    # No run may find half of its prompt in the cache of another.
    for first in prompts:
        for second in prompts:
            assert first is second or first[:16] != second[:16]


@pytest.mark.parametrize("bad", [{"prompt_tokens": 0}, {"tokens": 1}, {"runs": 0}])
def test_invalid_workload(bad: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=next(iter(bad))):
        Workload(**bad)
