import numpy as np
import pytest
from scipy.linalg import hadamard

from localrt.quant.methods import block_hadamard


@pytest.mark.parametrize("size", [1, 2, 16, 32, 128])
def test_matrix(size: int) -> None:
    matrix = block_hadamard(np.eye(size, dtype=np.float32), size)
    np.testing.assert_allclose(matrix, hadamard(size) / size**0.5, rtol=1e-6)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-6)


def test_block_rotation() -> None:
    values = np.random.default_rng(0).standard_normal((3, 96)).astype(np.float32)
    before = values.copy()
    rotated = block_hadamard(values, 32)
    assert np.array_equal(values, before)
    expected = values.reshape(3, 3, 32) @ hadamard(32).astype(np.float32) / np.float32(32**0.5)
    np.testing.assert_allclose(rotated, expected.reshape(3, 96), atol=1e-5)
    np.testing.assert_allclose(block_hadamard(rotated, 32), values, atol=1e-6)


def test_rotated_product() -> None:
    rng = np.random.default_rng(1)
    weights, inputs = rng.standard_normal((2, 4, 64)).astype(np.float32)
    product = block_hadamard(weights, 32) @ block_hadamard(inputs, 32).T
    np.testing.assert_allclose(product, weights @ inputs.T, atol=1e-4)


@pytest.mark.parametrize("size", [0, 3, 64, -2])
def test_sizes_that_do_not_fit_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="a power of two that divides 96"):
        block_hadamard(np.zeros((1, 96), np.float32), size)
