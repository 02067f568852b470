"""Triton kernel of :func:`~nemo_eagle3_sglang.losses.soft_cross_entropy.soft_cross_entropy_`.

One program a row, two passes over blocks of columns: the first takes maximum, sum of exponentials (rescaled as the
maximum grows), the products with the target and the argmax; the second overwrites the logits by their gradient. Columns
are looped over, so that no vocabulary is too large.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(
    logits,
    target_logits,
    target_lse,
    target_rows,
    row_weights,
    losses,
    choices,
    logits_stride,
    target_stride,
    columns,
    WRITE_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(row_weights + row)
    target = tl.load(target_rows + row)
    lse_target = tl.load(target_lse + target)
    z_row = logits + row * logits_stride
    t_row = target_logits + target * target_stride

    peak = float("-inf")
    total = 0.0
    product = 0.0
    mass = 0.0
    choice = 0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        z = tl.load(z_row + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.exp(tl.load(t_row + offsets, mask=inside, other=float("-inf")).to(tl.float32) - lse_target)
        block_peak = tl.max(z, axis=0)
        choice = tl.where(block_peak > peak, start + tl.argmax(z, axis=0), choice)
        new_peak = tl.maximum(peak, block_peak)
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(z - new_peak), axis=0)
        product += tl.sum(tl.where(inside, p * z, 0.0), axis=0)
        mass += tl.sum(p, axis=0)
        peak = new_peak
    lse = peak + tl.log(total)
    tl.store(losses + row, weight * (lse * mass - product))
    tl.store(choices + row, choice.to(tl.int64))

    if WRITE_GRAD:
        for start in range(0, columns, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            inside = offsets < columns
            z = tl.load(z_row + offsets, mask=inside, other=float("-inf")).to(tl.float32)
            p = tl.exp(tl.load(t_row + offsets, mask=inside, other=float("-inf")).to(tl.float32) - lse_target)
            gradient = weight * (mass * tl.exp(z - lse) - p)
            tl.store(z_row + offsets, gradient.to(logits.dtype.element_ty), mask=inside)


def launch(
    logits: torch.Tensor,
    target_logits: torch.Tensor,
    target_lse: torch.Tensor,
    target_rows: torch.Tensor,
    row_weights: torch.Tensor,
    losses: torch.Tensor,
    choices: torch.Tensor,
    *,
    write_grad: bool,
    block: int,
) -> None:
    """Run the kernel; arguments as in ``soft_cross_entropy_``, columns contiguous."""
    if logits.stride(-1) != 1 or target_logits.stride(-1) != 1:
        raise ValueError("the columns of logits and target_logits must be contiguous")
    if not logits.shape[0]:
        return
    _kernel[(logits.shape[0],)](
        logits,
        target_logits,
        target_lse,
        target_rows,
        row_weights,
        losses,
        choices,
        logits.stride(0),
        target_logits.stride(0),
        logits.shape[1],
        WRITE_GRAD=write_grad,
        BLOCK=block,
        num_warps=8,
    )
