"""Rows to documents, on every shape of padding and packing."""

from __future__ import annotations

import random

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
    docs = documents(ids, mask, mask, trim=True)
    assert docs.slots.tolist() == [1, 2]
    assert docs.supervised.tolist() == [1]


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


@pytest.mark.parametrize("mask", ["..1111", ".1111.", "1111.."])
def test_wherever_the_padding_stands_the_trimmed_documents_are_the_same(mask):
    """The first real token is not supervised behind left padding either."""
    ids, attention = rows(mask)
    ids = torch.cumsum(attention, dim=1)
    docs = documents(ids, attention, torch.tensor([[int(x in (1, 3)) for x in ids[0]]]), trim=True)
    assert docs.tokens.tolist() == [1, 2, 3]
    assert docs.supervised.tolist() == [2]
    assert docs.slots.tolist() == [mask.index("1") + i for i in range(3)]


def test_padding_between_the_tokens_of_a_packed_document():
    """Between two documents it may stand; the second row has it inside of one."""
    ids, attention = rows("111.1111", "1.111111")
    assert documents(ids[:1], attention[:1], attention[:1], torch.tensor([[4, 4]]), trim=False).lengths.tolist() == [
        3,
        4,
    ]
    with pytest.raises(ValueError, match="a document of row 1 of the attention mask has padding between tokens"):
        documents(ids, attention, attention, torch.tensor([[4, 4], [4, 4]]), trim=True)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2, 4)])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("trim", [False, True])
def test_nothing_real(shape, packing, trim):
    zeros = torch.zeros(shape, dtype=torch.long)
    seq_lens = torch.full((shape[0], 1), shape[1]) if packing else None
    docs = documents(zeros, zeros, torch.ones(shape), seq_lens, trim=trim)
    assert docs.total == docs.tokens.size == docs.lengths.size == docs.slots.size == docs.supervised.size == 0


def walked(ids, attention, loss, seq_lens, trim: bool) -> tuple[list, list, list, list, int]:
    """Token by token: documents, slots and supervised tokens from the docstring."""
    tokens, lengths, slots, supervised, total, width = [], [], [], [], 0, len(ids[0])
    for row, sizes in enumerate(seq_lens):
        start = 0
        for size in sizes:
            places = [i for i in range(start, start + size) if attention[row][i]]
            start += size
            total += len(places)
            learnt = {i for i in places if loss[row][i] and (i != places[0] if trim else i)}
            if trim:
                places = [i for i in places if learnt and i <= max(learnt)]
            supervised += [len(tokens) + n for n, i in enumerate(places) if i in learnt]
            tokens += [ids[row][i] for i in places]
            slots += [row * width + i for i in places]
            lengths += [len(places)] * bool(places)
    return tokens, lengths, slots, supervised, total


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_equal_to_a_walk_over_the_tokens(seed, packing, trim):
    rng = random.Random(seed)
    width, height, seq_lens, attention = 13, 3, [], []
    for _ in range(height):
        if packing:
            cuts = sorted(rng.choices(range(width + 1), k=3))
            seq_lens.append([b - a for a, b in zip([0, *cuts], [*cuts, width], strict=True)])
            padding = rng.randint(0, seq_lens[-1][-1])
            attention.append([1] * (width - padding) + [0] * padding)
        else:
            seq_lens.append([width])
            left, right = rng.randint(0, 6), rng.randint(0, 7)
            attention.append([0] * left + [1] * (width - left - right) + [0] * right)
    ids = [[rng.randint(0, 99) for _ in range(width)] for _ in range(height)]
    loss = [[int(rng.random() < 0.3) for _ in range(width)] for _ in range(height)]
    docs = documents(
        *(torch.tensor(x) for x in (ids, attention, loss)), torch.tensor(seq_lens) if packing else None, trim=trim
    )
    got = [x.tolist() for x in (docs.tokens, docs.lengths, docs.slots, docs.supervised)]
    assert (*got, docs.total) == walked(ids, attention, loss, seq_lens, trim)
