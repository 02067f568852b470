"""Rows to bare sequences and back, on every shape of padding."""

from __future__ import annotations

import pytest
import torch

from nemo_eagle3_sglang.supervision.align import pad, shift_left, unpad


def rows(*masks: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids 10, 11, 12, … (pads have ids as well, which must not count) and the mask written as ``..11``."""
    attention = torch.tensor([[int(c == "1") for c in mask] for mask in masks]).reshape(len(masks), -1)
    return torch.arange(10, 10 + attention.numel()).view(attention.shape), attention


@pytest.mark.parametrize(
    ("masks", "lengths", "slots"),
    [
        (["111", "111"], [3, 3], [0, 1, 2, 3, 4, 5]),
        (["111", "1.."], [3, 1], [0, 1, 2, 3]),
        (["..1", ".11"], [1, 2], [2, 4, 5]),
        ([".1.", "11."], [1, 2], [1, 3, 4]),
        (["...", "11.", "..."], [2], [3, 4]),
        (["...", "..."], [], []),
        (["1"], [1], [0]),
        (["."], [], []),
        (["", ""], [], []),
    ],
    ids=lambda value: "|".join(value) if value and isinstance(value[0], str) else "",
)
def test_unpad_takes_the_marked_tokens_row_after_row(masks, lengths, slots):
    ids, attention = rows(*masks)
    sequences = unpad(ids, attention)
    assert sequences.lengths == lengths
    assert sequences.slots.tolist() == slots
    assert sequences.tokens.tolist() == [10 + slot for slot in slots]
    assert sequences.tokens.dtype == torch.int64
    assert all(isinstance(n, int) for n in sequences.lengths)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_unpad_takes_a_mask_of_any_dtype(dtype):
    ids, attention = rows(".11.", "1...")
    assert unpad(ids, attention.to(dtype)).slots.tolist() == [1, 2, 4]


@pytest.mark.parametrize(("masks", "row"), [(["111", "1.1"], 1), (["1.11.1"], 0), ([".1.1."], 0), (["1..1"], 0)])
def test_padding_between_tokens_is_refused_by_row(masks, row):
    with pytest.raises(ValueError, match=f"row {row} of the attention mask has padding between tokens"):
        unpad(*rows(*masks))


@pytest.mark.parametrize(("ids", "attention"), [((2, 3), (2, 4)), ((6,), (6,)), ((1, 2, 3), (1, 2, 3))])
def test_wrong_shapes_are_refused(ids, attention):
    with pytest.raises(ValueError, match=r"must both be \[B, S\]"):
        unpad(torch.zeros(ids, dtype=torch.long), torch.ones(attention))


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
def test_pad_puts_back_what_unpad_took(dtype):
    ids, attention = rows("..111", "1....", ".....", ".1.1."[:2] + "...")
    sequences = unpad(ids, attention)
    flat = torch.randint(0, 2, (len(sequences.tokens), 3)).to(dtype)
    padded = pad(flat, sequences.slots, *ids.shape)
    assert padded.shape == (4, 5, 3)
    assert padded.dtype == dtype
    assert torch.equal(padded[attention.bool()], flat)
    assert not padded[~attention.bool()].any()


def test_pad_of_nothing_is_zero():
    padded = pad(torch.empty(0, 3), torch.empty(0, dtype=torch.long), 2, 4)
    assert padded.shape == (2, 4, 3)
    assert not padded.any()
