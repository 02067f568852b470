"""Linear layer and soft-target cross entropy in one: draft logits live for one chunk of rows only.

For a row with draft logits ``z = h W^T`` and the target's logits ``t`` over the same D tokens::

    p = softmax(t)
    loss = -sum_d p_d log_softmax(z)_d = lse(z) sum(p) - p.z
    dloss/dz = sum(p) softmax(z) - p

which is AutoModel's ``masked_soft_cross_entropy`` for one position. The target enters as its logits and their
log-sum-exp, so that bf16 logits need no float32 copy of the distribution and no precision is lost; rows of several
training-time-test steps name the same target by index. As in Liger's fused linear losses (arXiv:2410.10989) the
gradients are made in the forward pass, while the chunk's logits are there.
"""

from __future__ import annotations

from typing import Any

import torch

# Draft logits of one chunk of rows, [chunk, D]: enough rows for a full-speed GEMM, small beside a training step.
CHUNK_BYTES = 256 * 2**20
# Columns of one Triton block; rows of any length are looped over.
BLOCK = 4096


def linear_soft_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_logits: torch.Tensor,
    target_lse: torch.Tensor,
    target_rows: torch.Tensor,
    row_weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted sum of soft-target cross entropies, and the draft's greedy choices.

    Args:
        hidden: ``[E, H]``, input of the draft's output layer.
        weight: ``[D, H]``, the draft's output layer.
        target_logits: ``[P, D]``, the target's logits over the draft vocabulary.
        target_lse: ``[P]`` float32, their log-sum-exp over the D columns.
        target_rows: ``[E]`` int64, the row of ``target_logits`` that each row of ``hidden`` is taught.
        row_weights: ``[E]`` float32, the factor of each row's loss; 0 for a row that carries none.

    Returns:
        The loss, a float32 scalar that is differentiable in ``hidden`` and ``weight``, and ``[E]`` int64, the argmax
        of each row's draft logits.
    """
    # Inside the function grad mode is off and `needs_input_grad` knows nothing of it.
    return _LinearSoftCrossEntropy.apply(
        torch.is_grad_enabled(), hidden, weight, target_logits, target_lse, target_rows, row_weights
    )


class _LinearSoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        training: bool,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target_logits: torch.Tensor,
        target_lse: torch.Tensor,
        target_rows: torch.Tensor,
        row_weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = [training and needed for needed in ctx.needs_input_grad[1:3]]
        rows = hidden.shape[0]
        losses = row_weights.new_empty(rows)
        choices = target_rows.new_empty(rows)
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        grad_weight = torch.zeros_like(weight) if wanted[1] else None
        chunk = max(1, CHUNK_BYTES // (weight.shape[0] * hidden.element_size()))
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            logits = hidden[part] @ weight.T
            soft_cross_entropy_(
                logits,
                target_logits,
                target_lse,
                target_rows[part],
                row_weights[part],
                losses[part],
                choices[part],
                write_grad=any(wanted),
            )
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(logits.T, hidden[part])
            # Before the next chunk's are made, so that there is one at a time.
            del logits
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(choices)
        return losses.sum(), choices

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        grads = [None if g is None else g * grad_loss.to(g.dtype) for g in ctx.saved_tensors]
        return (None, *grads, None, None, None, None)


def soft_cross_entropy_(
    logits: torch.Tensor,
    target_logits: torch.Tensor,
    target_lse: torch.Tensor,
    target_rows: torch.Tensor,
    row_weights: torch.Tensor,
    losses: torch.Tensor,
    choices: torch.Tensor,
    write_grad: bool,
) -> None:
    """Fill ``losses`` and ``choices``, and overwrite ``logits`` by their gradient.

    The Triton kernel is taken on a GPU, the reference elsewhere: by device, at any size.

    Args:
        logits: ``[n, D]`` draft logits; with ``write_grad`` they hold the gradient afterwards.
        target_logits: ``[P, D]``.
        target_lse: ``[P]`` float32.
        target_rows: ``[n]`` int64.
        row_weights: ``[n]`` float32.
        losses: ``[n]`` float32, written: weighted losses.
        choices: ``[n]`` int64, written: argmax of the draft logits.
        write_grad: Whether the gradient is wanted.
    """
    arguments = (logits, target_logits, target_lse, target_rows, row_weights, losses, choices)
    if logits.is_cuda:
        from nemo_eagle3_sglang.losses.soft_cross_entropy_triton import launch

        launch(*arguments, write_grad=write_grad, block=BLOCK)
    else:
        reference(*arguments, write_grad=write_grad)


def reference(
    logits: torch.Tensor,
    target_logits: torch.Tensor,
    target_lse: torch.Tensor,
    target_rows: torch.Tensor,
    row_weights: torch.Tensor,
    losses: torch.Tensor,
    choices: torch.Tensor,
    write_grad: bool,
) -> None:
    """See :func:`soft_cross_entropy_`; plain torch, in float32 or, for float64 logits, float64."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    z = logits.to(dtype)
    p = torch.exp(
        target_logits.index_select(0, target_rows).to(dtype) - target_lse.index_select(0, target_rows)[:, None]
    )
    mass = p.sum(-1)
    choices.copy_(logits.argmax(dim=-1))
    losses.copy_(row_weights * (torch.logsumexp(z, dim=-1) * mass - (p * z).sum(-1)))
    if write_grad:
        logits.copy_(row_weights[:, None] * (torch.softmax(z, dim=-1) * mass[:, None] - p))
