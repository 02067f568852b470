"""The elementwise parts and the row copy, in plain torch."""

from __future__ import annotations

import pytest
import torch

from nemo_eagle3_sglang.training.pointwise import fused, rotate, swiglu
from nemo_eagle3_sglang.training.rows import take


def angles(rows: int, dim: int) -> torch.Tensor:
    return torch.rand(rows, dim // 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 6


def test_rotate_turns_pairs_of_halves():
    """Element i and i + d/2 are a point of the plane, turned by the row's i-th angle."""
    states = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    theta = angles(5, 8)
    turned = torch.complex(states[..., :4], states[..., 4:]) * torch.polar(torch.ones_like(theta), theta).unsqueeze(1)
    cos, sin = (f(torch.cat((theta, theta), -1)) for f in (torch.cos, torch.sin))
    torch.testing.assert_close(rotate(states, cos, sin), torch.cat((turned.real, turned.imag), -1))


def test_rotate_keeps_the_dtype_of_the_states():
    cos = sin = torch.ones(2, 4)
    assert rotate(torch.ones(2, 1, 4, dtype=torch.bfloat16), cos, sin).dtype == torch.bfloat16


def test_swiglu():
    gate, up = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(swiglu(gate, up), gate / (1 + torch.exp(-gate)) * up)


def test_nothing_is_compiled_on_a_cpu(monkeypatch):
    """The function itself runs, and one dispatcher is made for it however often it is asked for."""
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda *_: pytest.fail("the compiled function ran"))

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert fused(double)(torch.ones(2)).tolist() == [2, 2]
    assert fused(double) is fused(double)


@pytest.mark.parametrize("rows", [[], [2], [3, 0, 1]])
def test_take_is_indexing_with_its_gradient(rows):
    matrix = torch.randn(4, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
    index = torch.tensor(rows, dtype=torch.long)
    assert torch.equal(take(matrix, index), matrix[index])
    weight = torch.arange(3 * len(rows), dtype=torch.float64).view(-1, 3) + 1
    got, want = (
        torch.autograd.grad((taken * weight).sum(), matrix)[0] for taken in (take(matrix, index), matrix[index])
    )
    assert torch.equal(got, want)
