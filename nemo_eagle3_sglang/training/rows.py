"""Rows taken out of a matrix at most once each."""

from __future__ import annotations

from typing import Any

import torch


def take(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return ``matrix[rows]`` for distinct rows.

    ``index_select`` adds in its backward pass, atomically, since a row may come twice; a copy is several times faster.

    Args:
        matrix: ``[n, K]``.
        rows: ``[m]`` int64, no two the same.
    """
    return _Take.apply(matrix, rows)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.count = matrix.shape[0]
        return matrix.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        whole = grad.new_zeros((ctx.count, *grad.shape[1:]))
        return whole.index_copy_(0, rows, grad), None
