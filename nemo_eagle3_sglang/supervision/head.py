"""The target's distribution over the draft vocabulary, from hidden states."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nemo_eagle3_sglang.contracts import DraftTargets, Head
from nemo_eagle3_sglang.head_rows import HeadRows

# Logits of one chunk of positions, [chunk, V]: large enough for a full-speed GEMM, small beside a training step.
CHUNK_BYTES = 128 * 2**20


def draft_targets(
    head: Head, hidden: torch.Tensor, selected_token_ids: torch.Tensor, selected_token_mask: torch.Tensor
) -> DraftTargets:
    """Project hidden states to the draft vocabulary, in chunks that never hold ``[P, V]`` at once.

    Args:
        head: The target's output head.
        hidden: ``[P, H]``, what the target's logits processor is handed at the supervised positions.
        selected_token_ids: ``[D]`` int64, target id of each draft id.
        selected_token_mask: ``[V]`` bool, true at the ids in the draft vocabulary.
    """
    positions, width = hidden.shape[0], selected_token_ids.shape[0]
    lse = torch.empty(positions, dtype=torch.float32, device=hidden.device)
    choices = torch.empty(positions, dtype=torch.int64, device=hidden.device)
    in_draft_vocab = torch.empty(positions, dtype=torch.bool, device=hidden.device)
    kept: torch.Tensor | None = None
    for part, logits in chunks(head, hidden, selected_token_mask.shape[0]):
        in_draft_vocab[part] = selected_token_mask[logits.argmax(dim=-1)]
        if kept is None:
            kept = torch.empty((positions, width), dtype=logits.dtype, device=hidden.device)
        chosen = torch.index_select(logits, -1, selected_token_ids, out=kept[part])
        choices[part] = chosen.argmax(dim=-1)
        lse[part] = torch.logsumexp(chosen.float(), dim=-1)
        del logits
    return DraftTargets(hidden.new_empty((0, width)) if kept is None else kept, lse, choices, in_draft_vocab)


def choices(head: Head, hidden: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the argmax over the head's ``columns`` at each position of ``hidden`` ``[P, H]``: ``[P]`` int64."""
    best = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    for part, logits in chunks(head, hidden, columns):
        best[part] = logits.argmax(dim=-1)
        del logits
    return best


def targets_of(rows: HeadRows, hidden: torch.Tensor, in_draft_vocab: torch.Tensor) -> DraftTargets:
    """Return the targets at positions whose argmax over all of V is already known.

    Args:
        rows: The head at the D tokens of the draft vocabulary, in the order of the draft ids.
        hidden: ``[P, H]``, what the target's logits processor is handed.
        in_draft_vocab: ``[P]`` bool.
    """
    logits = [part_logits for _, part_logits in chunks(rows, hidden, rows.weight.shape[0])]
    empty = hidden.new_empty((0, rows.weight.shape[0]))
    return summarise(torch.cat(logits) if logits else empty, in_draft_vocab)


def distribution(targets: DraftTargets) -> torch.Tensor:
    """Return the softmax over the draft vocabulary ``[P, D]`` in float32.

    Equal to AutoModel's ``_compute_target_distribution`` on the same logits: the softmax is over the draft vocabulary
    alone, in float32.
    """
    return torch.softmax(targets.logits.float(), dim=-1)


def summarise(logits: torch.Tensor, in_draft_vocab: torch.Tensor) -> DraftTargets:
    """Return the targets of draft-vocabulary logits ``[P, D]``, their float32 copies a chunk of positions at a time."""
    positions, width = logits.shape
    lse = torch.empty(positions, dtype=torch.float32, device=logits.device)
    choices = torch.empty(positions, dtype=torch.int64, device=logits.device)
    step = max(1, CHUNK_BYTES // (4 * max(width, 1)))
    for start in range(0, positions, step):
        part = slice(start, start + step)
        choices[part] = logits[part].argmax(dim=-1)
        lse[part] = torch.logsumexp(logits[part].float(), dim=-1)
    return DraftTargets(logits, lse, choices, in_draft_vocab)


def chunks(head: Head, hidden: torch.Tensor, columns: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield logits ``[chunk, columns]`` of consecutive positions; who drops them in time has one chunk in memory.

    Raises:
        ValueError: The head gives another number of columns.
    """
    chunk = max(1, CHUNK_BYTES // (max(columns, 1) * max(hidden.element_size(), 2)))
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        yield part, _checked(head(hidden[part]), columns)


def _checked(logits: torch.Tensor, columns: int) -> torch.Tensor:
    if logits.shape[-1] != columns:
        raise ValueError(
            f"the target's head gives {logits.shape[-1]} logits, the vocabulary mapping was made for {columns}"
        )
    return logits
