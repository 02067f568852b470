"""Rows to documents, on every shape of padding and packing."""

from __future__ import annotations

import pytest
import torch

from nemo_eagle3_sglang.supervision.documents import documents


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
def test_every_real_token_is_taken_row_after_row(masks, lengths, slots):
    ids, attention = rows(*masks)
    docs = documents(ids, attention, attention, trim=False)
    assert docs.lengths.tolist() == lengths
    assert docs.slots.tolist() == slots
    assert docs.tokens.tolist() == [10 + slot for slot in slots]
    assert docs.total == len(slots)
    width = ids.shape[1]
    assert docs.supervised.tolist() == [i for i, slot in enumerate(slots) if slot % width]


@pytest.mark.parametrize(
    ("loss", "lengths", "slots", "supervised"),
    [
        ("..1.1...", [5], [0, 1, 2, 3, 4], [2, 4]),
        ("1.......", [], [], []),
        ("........", [], [], []),
        (".......1", [8], list(range(8)), [7]),
        ("11111111", [8], list(range(8)), [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_trimmed_to_the_last_supervised_token(loss, lengths, slots, supervised):
    ids, attention = rows("11111111")
    docs = documents(ids, attention, rows(loss)[1], trim=True)
    assert docs.lengths.tolist() == lengths
    assert docs.slots.tolist() == slots
    assert docs.supervised.tolist() == supervised
    assert docs.total == 8


def test_padding_carries_no_loss():
    ids, attention = rows("..111.")
    assert documents(ids, attention, torch.ones_like(attention), trim=True).slots.tolist() == [2, 3, 4]


def test_packed_rows_are_split_and_their_padding_dropped():
    ids, attention = rows("11111111", "11111...")
    loss = rows(".11..1..", "1.1.....")[1]
    seq_lens = torch.tensor([[4, 2, 2], [2, 6, 0]])
    whole = documents(ids, attention, loss, seq_lens, trim=False)
    assert whole.lengths.tolist() == [4, 2, 2, 2, 3]
    docs = documents(ids, attention, loss, seq_lens, trim=True)
    # The second row's loss falls on the first token of each of its documents: nothing foretells those.
    assert docs.slots.tolist() == [0, 1, 2, 4, 5]
    assert docs.lengths.tolist() == [3, 2]
    assert docs.supervised.tolist() == [1, 2, 4]
    assert docs.total == 13


@pytest.mark.parametrize("seq_lens", [[[4, 2]], [[8], [8]], [[9, -1]]])
def test_document_lengths_that_do_not_cover_a_row(seq_lens):
    ids, attention = rows("11111111")
    with pytest.raises(ValueError, match=r"seq_lens must sum to 8 in each of 1 rows"):
        documents(ids, attention, attention, torch.tensor(seq_lens), trim=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_of_any_dtype(dtype):
    ids, attention = rows(".11.", "1...")
    mask = attention.to(dtype)
    assert documents(ids, mask, mask, trim=False).slots.tolist() == [1, 2, 4]


@pytest.mark.parametrize(("masks", "row"), [(["111", "1.1"], 1), (["1.11.1"], 0), ([".1.1."], 0), (["1..1"], 0)])
def test_padding_between_tokens_is_refused_by_row(masks, row):
    ids, attention = rows(*masks)
    with pytest.raises(ValueError, match=f"row {row} of the attention mask has padding between tokens"):
        documents(ids, attention, attention, trim=True)


@pytest.mark.parametrize(
    ("ids", "attention", "loss"),
    [((2, 3), (2, 4), (2, 3)), ((2, 3), (2, 3), (3, 2)), ((6,), (6,), (6,)), ((1, 2, 3), (1, 2, 3), (1, 2, 3))],
)
def test_wrong_shapes_are_refused(ids, attention, loss):
    with pytest.raises(ValueError, match=r"must be as input_ids .*\[B, S\]"):
        documents(torch.zeros(ids, dtype=torch.long), torch.ones(attention), torch.ones(loss), trim=True)
