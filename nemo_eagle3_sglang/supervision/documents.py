"""The documents of a micro-batch on the host: which tokens are run, which carry loss.

All of it is integer arithmetic on masks that the data loader made, so it is done on the host before anything is sent to
the device: no part of a training step then has to wait for the GPU to learn a shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Documents:
    """The chats of a micro-batch, one after another.

    Attributes:
        tokens: ``[T]`` int64, the documents one after another.
        lengths: Tokens of each document, each at least 1; sums to T.
        slots: ``[T]`` int64, where each token stands in the flattened ``[B*S]`` rows.
        supervised: ``[P]`` int64, the tokens (indices into T, ascending) whose target distribution is learnt.
        total: Real tokens of the micro-batch, those that were trimmed included.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    slots: np.ndarray
    supervised: np.ndarray
    total: int


def documents(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    loss_mask: torch.Tensor,
    seq_lens: torch.Tensor | None = None,
    *,
    trim: bool,
) -> Documents:
    """Take the documents out of their rows.

    With ``trim``, what nobody needs is left out: a document ends with its last supervised token (under causal attention
    nothing after it can change a state that is learnt from) and one without any is dropped. The first token of a
    document is never supervised then: nothing precedes it that could foretell it. Without ``trim`` every real token is
    kept, and supervised is what AutoModel's padded rows supervise, the shift across a document's start included
    (its trainer masks that by ``doc_remaining``).

    Args:
        input_ids: ``[B, S]`` int64.
        attention_mask: ``[B, S]``, non-zero at real tokens. Padding may stand left or right.
        loss_mask: ``[B, S]``, non-zero at the tokens to be learnt (unshifted).
        seq_lens: ``[B, max_docs]``, AutoModel's packing: slots of each document of a row, zero-padded, the row's
            padding counted to the last document. Left out: each row is one document.
        trim: See above.

    Raises:
        ValueError: Shapes differ, a document has padding between its tokens (it would then not be what a causal model
            saw), or ``seq_lens`` does not cover the rows.
    """
    shape = tuple(input_ids.shape)
    for name, rows in (("attention_mask", attention_mask), ("loss_mask", loss_mask)):
        if len(shape) != 2 or tuple(rows.shape) != shape:
            raise ValueError(f"{name} {tuple(rows.shape)} must be as input_ids {shape}, [B, S]")
    real = attention_mask.cpu().numpy().astype(bool).reshape(-1)
    learnt = loss_mask.cpu().numpy().astype(bool).reshape(-1) & real
    document = _document_of_slot(shape, seq_lens)
    slots = np.flatnonzero(real)
    document = document[slots]
    starts = np.flatnonzero(np.diff(document, prepend=-1))
    _check_contiguous(slots, starts, shape, packed=seq_lens is not None)
    tokens, lengths = input_ids.cpu().numpy().reshape(-1)[slots], np.diff(starts, append=len(slots))
    supervised = learnt[slots]
    if not trim:
        supervised &= slots % shape[1] != 0
        return Documents(tokens, lengths, slots, np.flatnonzero(supervised), len(slots))
    supervised[starts] = False
    last = _last_supervised(supervised, starts)
    kept = np.arange(len(slots)) <= np.repeat(last, lengths)
    return Documents(
        tokens=tokens[kept],
        lengths=(last - starts + 1)[last >= 0],
        slots=slots[kept],
        supervised=np.flatnonzero(supervised[kept]),
        total=len(slots),
    )


def _document_of_slot(shape: tuple[int, int], seq_lens: torch.Tensor | None) -> np.ndarray:
    """Return ``[B*S]`` the running number of the document that each slot belongs to."""
    rows, length = shape
    if seq_lens is None:
        return np.repeat(np.arange(rows), length)
    sizes = seq_lens.cpu().numpy()
    covered = sizes.sum(axis=1)
    if len(sizes) != rows or (sizes < 0).any() or (covered != length).any():
        raise ValueError(f"seq_lens must sum to {length} in each of {rows} rows; they sum to {covered.tolist()}")
    return np.repeat(np.arange(sizes.size), sizes.reshape(-1))


def _check_contiguous(slots: np.ndarray, starts: np.ndarray, shape: tuple[int, int], packed: bool) -> None:
    """Refuse padding between the tokens of a document."""
    gap = np.diff(slots, prepend=-1) != 1
    gap[starts] = False
    if gap.any():
        row = int(slots[np.flatnonzero(gap)[0]]) // shape[1]
        where = "a document of row" if packed else "row"
        raise ValueError(f"{where} {row} of the attention mask has padding between tokens; pad left or right only")


def _last_supervised(supervised: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the index of the last supervised token of each document; -1 where there is none."""
    if not len(starts):
        return np.empty(0, dtype=np.int64)
    index = np.where(supervised, np.arange(len(supervised)), -1)
    return np.maximum.reduceat(index, starts)
