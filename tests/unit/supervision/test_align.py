"""Bare sequences to rows, and the shift."""

from __future__ import annotations

import pytest
import torch

from nemo_eagle3_sglang.supervision.align import pad, shift_left


@pytest.mark.parametrize("shape", [(2, 5), (1, 1), (3, 4, 2), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_shift_left_drops_the_first_and_ends_in_zero(shape, dtype):
    values = torch.randint(1, 2 if dtype == torch.bool else 9, shape).to(dtype)
    before = values.clone()
    shifted = shift_left(values)
    assert shifted.dtype == dtype
    assert torch.equal(shifted[:, :-1], values[:, 1:])
    assert not shifted[:, -1:].any()
    assert torch.equal(values, before), "the rows given stay as they are"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_pad_puts_values_at_their_slots(dtype):
    slots = torch.tensor([2, 3, 4, 5, 16])
    flat = torch.randint(0, 2, (5, 3)).to(dtype)
    padded = pad(flat, slots, 4, 5)
    assert padded.shape == (4, 5, 3)
    assert padded.dtype == dtype
    assert torch.equal(padded.view(20, 3)[slots], flat)
    assert padded.view(20, 3).index_fill(0, slots, 0).sum() == 0


def test_pad_of_nothing_is_zero():
    padded = pad(torch.empty(0, 3), torch.empty(0, dtype=torch.long), 2, 4)
    assert padded.shape == (2, 4, 3)
    assert not padded.any()
