"""The target's distribution over the draft vocabulary, from hidden states."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nemo_eagle3_sglang.contracts import DraftTargets, Head

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
    for part, logits in _chunks(head, hidden, selected_token_mask):
        in_draft_vocab[part] = selected_token_mask[logits.argmax(dim=-1)]
        if kept is None:
            kept = torch.empty((positions, width), dtype=logits.dtype, device=hidden.device)
        chosen = torch.index_select(logits, -1, selected_token_ids, out=kept[part])
        choices[part] = chosen.argmax(dim=-1)
        lse[part] = torch.logsumexp(chosen.float(), dim=-1)
        del logits
    return DraftTargets(hidden.new_empty((0, width)) if kept is None else kept, lse, choices, in_draft_vocab)


def distribution(targets: DraftTargets) -> torch.Tensor:
    """Return the softmax over the draft vocabulary ``[P, D]`` in float32.

    Equal to AutoModel's ``_compute_target_distribution`` on the same logits: the softmax is over the draft vocabulary
    alone, in float32.
    """
    return torch.softmax(targets.logits.float(), dim=-1)


def _chunks(head: Head, hidden: torch.Tensor, mask: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield logits ``[chunk, V]`` of consecutive positions; who drops them in time has one chunk in memory."""
    vocab = mask.shape[0]
    chunk = max(1, CHUNK_BYTES // (vocab * max(hidden.element_size(), 2)))
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        yield part, _checked(head(hidden[part]), vocab)


def _checked(logits: torch.Tensor, vocab: int) -> torch.Tensor:
    if logits.shape[-1] != vocab:
        raise ValueError(
            f"the target's head gives {logits.shape[-1]} logits, the vocabulary mapping was made for {vocab}"
        )
    return logits
