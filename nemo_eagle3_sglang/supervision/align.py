"""Between padded rows and bare sequences, and the shift to next-token positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def shift_left(rows: torch.Tensor) -> torch.Tensor:
    """Return ``rows`` ``[B, S, ...]`` shifted left by one along S with a zero tail."""
    shifted = torch.zeros_like(rows)
    shifted[:, :-1] = rows[:, 1:]
    return shifted


@dataclass(frozen=True)
class Sequences:
    """The real tokens of padded rows.

    Attributes:
        tokens: ``[T]`` int64, row after row.
        lengths: Length of each non-empty row; sums to T.
        slots: ``[T]`` int64, where each token stands in the flattened ``[B*S]`` rows.
    """

    tokens: torch.Tensor
    lengths: list[int]
    slots: torch.Tensor


def unpad(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Sequences:
    """Take the tokens that ``attention_mask`` marks out of their rows.

    Padding may stand left or right; a row without any token yields no sequence. Waits for the
    device twice (the row lengths go to the host, and the number of tokens is needed); on a CPU batch not at all.

    Args:
        input_ids: ``[B, S]`` int64.
        attention_mask: ``[B, S]``, non-zero at real tokens.

    Raises:
        ValueError: The shapes differ, or a row has padding between tokens (the rows would then not be what a
            causal model saw).
    """
    if input_ids.shape != attention_mask.shape or input_ids.dim() != 2:
        raise ValueError(
            f"input_ids {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)} must both be [B, S]"
        )
    mask = attention_mask.bool()
    edges = (mask[:, 1:] != mask[:, :-1]).sum(dim=1) + mask[:, 0] + mask[:, -1] if mask.shape[1] else mask.sum(dim=1)
    lengths, edges = torch.stack((mask.sum(dim=1), edges)).tolist()
    if any(n > 2 for n in edges):
        row = next(i for i, n in enumerate(edges) if n > 2)
        raise ValueError(f"row {row} of the attention mask has padding between tokens; pad left or right only")
    slots = mask.reshape(-1).nonzero().squeeze(-1)
    return Sequences(
        tokens=input_ids.reshape(-1).index_select(0, slots),
        lengths=[int(n) for n in lengths if n],
        slots=slots,
    )


def pad(flat: torch.Tensor, slots: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Put ``flat`` ``[n, K]`` at ``slots`` ``[n]`` of zero rows and return them as ``[rows, length, K]``."""
    padded = flat.new_zeros((rows * length, flat.shape[-1]))
    padded.index_copy_(0, slots, flat)
    return padded.view(rows, length, flat.shape[-1])
