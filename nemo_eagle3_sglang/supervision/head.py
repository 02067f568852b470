"""The target's distribution over the draft vocabulary, from hidden states."""

from __future__ import annotations

import torch

from nemo_eagle3_sglang.contracts import Head

# Logits of one chunk of positions, [chunk, V]: large enough for a full-speed GEMM, small beside a training step.
CHUNK_BYTES = 256 * 2**20


def draft_distribution(
    head: Head,
    hidden: torch.Tensor,
    selected_token_ids: torch.Tensor,
    selected_token_mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Project hidden states to the draft vocabulary, in chunks that never hold ``[P, V]`` at once.

    Equal to AutoModel's ``_compute_target_distribution`` on the same logits: the argmax is over all of V, the
    softmax over the draft vocabulary alone, in float32.

    Args:
        head: The target's output head.
        hidden: ``[P, H]``, what the target's logits processor is handed at the supervised positions.
        selected_token_ids: ``[D]`` int64, target id of each draft id.
        selected_token_mask: ``[V]`` bool, true at the ids in the draft vocabulary.

    Returns:
        ``target_probs`` ``[P, D]`` float32 and ``in_draft_vocab`` ``[P]`` bool, true where the target's argmax lies
        in the draft vocabulary.
    """
    positions, vocab = hidden.shape[0], selected_token_mask.shape[0]
    probs = torch.empty((positions, selected_token_ids.shape[0]), dtype=torch.float32, device=hidden.device)
    in_draft_vocab = torch.empty(positions, dtype=torch.bool, device=hidden.device)
    chunk = max(1, CHUNK_BYTES // (vocab * max(hidden.element_size(), 2)))
    for start in range(0, positions, chunk):
        part = slice(start, start + chunk)
        logits = head(hidden[part])
        if logits.shape[-1] != vocab:
            raise ValueError(
                f"the target's head gives {logits.shape[-1]} logits, the vocabulary mapping was made for {vocab}"
            )
        in_draft_vocab[part] = selected_token_mask[logits.argmax(dim=-1)]
        torch.softmax(logits.index_select(-1, selected_token_ids).float(), dim=-1, out=probs[part])
    return probs, in_draft_vocab
