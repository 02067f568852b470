"""From bare sequences to padded rows, and the shift to next-token positions."""

from __future__ import annotations

import torch


def shift_left(rows: torch.Tensor) -> torch.Tensor:
    """Return ``rows`` ``[B, S, ...]`` shifted left by one along S with a zero tail."""
    shifted = torch.zeros_like(rows)
    shifted[:, :-1] = rows[:, 1:]
    return shifted


def pad(flat: torch.Tensor, slots: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Put ``flat`` ``[n, K]`` at ``slots`` ``[n]`` of zero rows and return them as ``[rows, length, K]``."""
    padded = flat.new_zeros((rows * length, flat.shape[-1]))
    padded.index_copy_(0, slots, flat)
    return padded.view(rows, length, flat.shape[-1])
