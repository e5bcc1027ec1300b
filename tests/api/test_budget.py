import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import LocalrtError, MemoryBudgetError, OptionError
from localrt.common.formatting import format_bytes, parse_size
from localrt.offload.account import Account, check_fits


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8_000_000_000),
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("2 gib", 2 << 30),
        ("4096", 4096),
        ("100kB", 100_000),
        ("3g", 3_000_000_000),
        ("7B", 7),
        (4096, 4096),
    ],
)
def test_parse_size(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "8 apples", "-1GB", "0", 0, -5, "1e9", "nan", "1.2.3MB", True, None, 1.5]
)
def test_parse_size_errors(text: object) -> None:
    with pytest.raises(OptionError) as caught:
        parse_size(text)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@given(st.text(max_size=12))
def test_parse_any_text(text: str) -> None:
    try:
        assert parse_size(text) > 0
    except LocalrtError:
        pass


@given(st.integers(1, 10**14))
def test_size_round_trip(count: int) -> None:
    assert parse_size(format_bytes(count)) == pytest.approx(count, rel=0.06)


def test_format_bytes() -> None:
    sizes = [0, 999, 98_123_456, 1_117_000_000, 8_000_000_000, 999_600]
    assert [format_bytes(size) for size in sizes] == [
        *("0 B", "999 B", "98 MB", "1.1 GB", "8 GB", "1 MB")
    ]


def _account(weights: int, kv: int, scratch: int = 0) -> Account:
    return Account.of(
        [("ram", "weights", weights), ("ram", "keys and values", kv), ("ram", "scratch", scratch)]
    )


def test_fits() -> None:
    check_fits(_account(weights=10, kv=5, scratch=1), 16, "a model")


def test_does_not_fit() -> None:
    estimate = _account(weights=100_000_000, kv=2_000_000_000, scratch=20_000_000)
    with pytest.raises(MemoryBudgetError) as caught:
        check_fits(estimate, 1_000_000_000, "smollm2", ctx=8192)
    message = str(caught.value)
    for number in ("2.1 GB", "100 MB", "2 GB", "20 MB", "1 GB", "ctx=3584"):
        assert number in message
    assert "\n" not in message
    check_fits(_account(100_000_000, 2_000_000_000 * 3584 // 8192, 20_000_000), 1_000_000_000, "it")


def test_weights_too_large() -> None:
    with pytest.raises(MemoryBudgetError, match="smaller model"):
        check_fits(_account(weights=10**9, kv=10**6), 10**8, "it", ctx=4096)
