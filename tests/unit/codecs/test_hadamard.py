from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from kvarto.codecs import hadamard


@pytest.mark.parametrize("order", [8, 12, 20, 28, 64, 80, 96, 112, 128, 192, 256])
def test_is_a_hadamard_matrix(order: int) -> None:
    matrix = hadamard.matrix(order)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(order), atol=1e-5, rtol=0)
    torch.testing.assert_close(matrix.abs(), torch.full((order, order), order**-0.5), atol=1e-6, rtol=0)


@pytest.mark.parametrize("order", [64, 80, 96])
def test_inverse_and_matrix_agree(order: int) -> None:
    x = torch.randn(3, 5, order)
    torch.testing.assert_close(hadamard.transform(hadamard.transform(x), inverse=True), x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x @ hadamard.matrix(order), hadamard.transform(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("order", "base"), [(64, 1), (80, 20), (96, 12), (112, 28), (72, None)])
def test_known_orders(order: int, base: int | None) -> None:
    assert hadamard.order_base(order) == base
