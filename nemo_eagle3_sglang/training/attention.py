"""Attention of the draft over bare documents, with the diagonal that training-time test adds.

At step k the query of a chain attends, in one softmax, to the step-0 keys of its document up to its own slot, and to
its own chain's keys of steps 1..k::

    out = sum_{s <= t} softmax(...)_s V0_s + sum_{1 <= i <= k} softmax(...)_i V_i[t]

The causal part runs as FlashAttention over variable lengths (no mask, no cross-document leak), the k extra columns are
merged in by log-sum-exp, as in ring attention (arXiv:2310.01889). In the backward pass FlashAttention is handed the
*merged* output and log-sum-exp: ``dS = P (dP - rowsum(dO O))`` then holds for its columns of the one softmax, and the
extra columns follow by the same formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

# What FlashAttention-2's kernels take.
FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM = 256
# Later steps merged by one kernel.
MERGED_COLUMNS = 4


class Bounds(NamedTuple):
    """Documents of the attention: ``[G+1]`` int32 on the device, and their lengths on the host.

    Attributes:
        cu_queries: Bounds of each document's M query slots.
        cu_slots: Bounds of each document's N key slots; the last query of a document stands at its last key.
        query_lengths: Query slots of each document.
        slot_lengths: Key slots of each document.
    """

    cu_queries: torch.Tensor
    cu_slots: torch.Tensor
    query_lengths: Sequence[int]
    slot_lengths: Sequence[int]


def unrolled_attention(
    query: torch.Tensor,
    first_key: torch.Tensor,
    first_value: torch.Tensor,
    later_keys: Sequence[torch.Tensor],
    later_values: Sequence[torch.Tensor],
    bounds: Bounds,
    queries: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attend to the document's first-step keys and to the chain's own later ones.

    Args:
        query: ``[R, h, d]``, one of each chain; h is a multiple of g.
        first_key: ``[N, g, d]``, step 0's, of every slot.
        first_value: ``[N, g, d]``.
        later_keys: ``[R, g, d]`` of each step 1..k.
        later_values: ``[R, g, d]`` of each step 1..k.
        bounds: Where the documents are.
        queries: ``[R]`` int64, where each chain stands among the M query slots; ``None`` where they are the same.
        scale: Factor of the scores.

    Returns:
        ``[R, h, d]``.
    """
    count = len(later_keys)
    return _UnrolledAttention.apply(
        bounds, queries, scale, count, query, first_key, first_value, *later_keys, *later_values
    )


class _UnrolledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        bounds: Bounds,
        queries: torch.Tensor | None,
        scale: float,
        count: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *later: torch.Tensor,
    ) -> torch.Tensor:
        out, lse = causal_forward(_spread(query, queries, bounds), key, value, bounds, scale)
        if queries is not None:
            out = out.index_select(0, queries)
        if count:
            chain_lse = lse if queries is None else lse.index_select(1, queries)
            merged = chain_lse
            for part in _groups(count):
                keys, values = later[:count][part], later[count:][part]
                out, merged = _run(merge_forward)(query, keys, values, out, merged, scale)
            # A query slot that is no chain keeps its own log-sum-exp: its weights stay finite, its gradient is 0.
            lse = merged if queries is None else lse.index_copy(1, queries, merged)
        ctx.bounds, ctx.scale, ctx.count, ctx.spread = bounds, scale, count, queries is not None
        ctx.save_for_backward(query, key, value, out, lse, *later, *([queries] if queries is not None else []))
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse, *later = ctx.saved_tensors
        queries = later.pop() if ctx.spread else None
        keys, values = later[: ctx.count], later[ctx.count :]
        grad_out = grad_out.contiguous()
        grad_query, grad_key, grad_value = causal_backward(
            _spread(grad_out, queries, ctx.bounds),
            _spread(query, queries, ctx.bounds),
            key,
            value,
            _spread(out, queries, ctx.bounds),
            lse,
            ctx.bounds,
            ctx.scale,
        )
        if queries is not None:
            grad_query, lse = grad_query.index_select(0, queries), lse.index_select(1, queries)
        grad_keys: list[torch.Tensor] = []
        grad_values: list[torch.Tensor] = []
        for part in _groups(ctx.count):
            grad_query, more_keys, more_values = _run(merge_backward)(
                grad_out, query, keys[part], values[part], out, lse, grad_query, ctx.scale
            )
            grad_keys += more_keys
            grad_values += more_values
        return (None, None, None, None, grad_query, grad_key, grad_value, *grad_keys, *grad_values)


def merge_forward(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add one column for each of ``keys`` to a softmax of which ``out`` ``[R, h, d]`` and ``lse`` ``[h, R]`` are known.

    Returns:
        The merged output ``[R, h, d]`` and log-sum-exp ``[h, R]``.
    """
    rows, heads, dim = query.shape
    groups = keys[0].shape[1]
    wide = query.view(rows, groups, heads // groups, dim).to(lse.dtype)
    scores = [(wide * k.unsqueeze(2).to(lse.dtype)).sum(-1) * scale for k in keys]
    first = lse.T.view(rows, groups, heads // groups)
    merged = first
    for score in scores:
        merged = torch.logaddexp(merged, score)
    total = out.view_as(wide).to(lse.dtype) * torch.exp(first - merged).unsqueeze(-1)
    for score, v in zip(scores, values, strict=True):
        total = total + torch.exp(score - merged).unsqueeze(-1) * v.unsqueeze(2).to(lse.dtype)
    return total.view_as(query).to(query.dtype), merged.reshape(rows, heads).T.contiguous()


def merge_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_query: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradient of the query, that of the earlier columns included, and of the keys and of the values."""
    rows, heads, dim = query.shape
    groups = keys[0].shape[1]
    shape = (rows, groups, heads // groups, dim)
    wide, grad, merged = (x.view(shape).to(lse.dtype) for x in (query, grad_out, out))
    delta = (grad * merged).sum(-1)
    lse = lse.T.reshape(shape[:-1])
    total = grad_query.view(shape).to(lse.dtype)
    grad_keys, grad_values = [], []
    for key, value in zip(keys, values, strict=True):
        k, v = key.unsqueeze(2).to(lse.dtype), value.unsqueeze(2).to(lse.dtype)
        weight = torch.exp((wide * k).sum(-1) * scale - lse)
        score = (weight * ((grad * v).sum(-1) - delta) * scale).unsqueeze(-1)
        total = total + score * k
        grad_keys.append((score * wide).sum(2).to(key.dtype))
        grad_values.append((weight.unsqueeze(-1) * grad).sum(2).to(value.dtype))
    return total.view_as(query).to(query.dtype), grad_keys, grad_values


def causal_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Bounds, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally within each document; return the output ``[M, h, d]`` and the log-sum-exp ``[h, M]``."""
    if not uses_flash(query):
        return _causal_forward_dense(query, key, value, bounds, scale)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        bounds.cu_queries,
        bounds.cu_slots,
        max(bounds.query_lengths),
        max(bounds.slot_lengths),
        0.0,
        True,
        return_debug_mask=False,
        scale=scale,
    )
    return out, lse


def causal_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bounds: Bounds,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value, given output and log-sum-exp of the whole softmax."""
    if not uses_flash(query):
        return _causal_backward_dense(grad_out, query, key, value, out, lse, bounds, scale)
    # Two words that the kernel reads for its dropout, of which there is none.
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    grads = torch.ops.aten._flash_attention_backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse,
        bounds.cu_queries,
        bounds.cu_slots,
        max(bounds.query_lengths),
        max(bounds.slot_lengths),
        0.0,
        True,
        no_dropout,
        no_dropout.new_empty(0),
        scale=scale,
    )
    return grads[0], grads[1], grads[2]


def uses_flash(query: torch.Tensor) -> bool:
    """Return whether FlashAttention takes this query ``[M, h, d]``: by device, dtype and head size."""
    dim = query.shape[-1]
    return query.is_cuda and query.dtype in FLASH_DTYPES and dim <= FLASH_HEAD_DIM and dim % 8 == 0


def _causal_forward_dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Bounds, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    outs, lses = [], []
    for q, k, v in _by_document(bounds, (query,), (key, value)):
        scores = _scores(q, k, scale)
        lse = torch.logsumexp(scores, dim=-1)
        outs.append(torch.einsum("ghqk,kgd->qghd", torch.exp(scores - lse.unsqueeze(-1)), v).flatten(1, 2))
        lses.append(lse.flatten(0, 1))
    return torch.cat(outs), torch.cat(lses, dim=1)


def _causal_backward_dense(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bounds: Bounds,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grads: tuple[list[torch.Tensor], ...] = ([], [], [])
    groups = key.shape[1]
    for grad, q, o, row_lse, k, v in _by_document(bounds, (grad_out, query, out, lse.T), (key, value)):
        wide_grad, wide_q = (x.unflatten(1, (groups, -1)) for x in (grad, q))
        weights = torch.exp(_scores(q, k, scale) - row_lse.T.unflatten(0, (groups, -1)).unsqueeze(-1))
        delta = (grad * o).sum(-1).T.unflatten(0, (groups, -1)).unsqueeze(-1)
        score = weights * (torch.einsum("qghd,kgd->ghqk", wide_grad, v) - delta) * scale
        grads[0].append(torch.einsum("ghqk,kgd->qghd", score, k).flatten(1, 2))
        grads[1].append(torch.einsum("ghqk,qghd->kgd", score, wide_q))
        grads[2].append(torch.einsum("ghqk,qghd->kgd", weights, wide_grad))
    return torch.cat(grads[0]), torch.cat(grads[1]), torch.cat(grads[2])


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``[g, h/g, q, k]``, the last query at the last key, minus infinity above the diagonal."""
    scores = torch.einsum("qghd,kgd->ghqk", query.unflatten(1, (key.shape[1], -1)), key) * scale
    queries, keys = scores.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
    return scores.masked_fill(later, float("-inf"))


def _by_document(bounds: Bounds, of_queries: Sequence[torch.Tensor], of_slots: Sequence[torch.Tensor]) -> Any:
    return zip(
        *(x.split(list(bounds.query_lengths)) for x in of_queries),
        *(x.split(list(bounds.slot_lengths)) for x in of_slots),
        strict=True,
    )


def _spread(chains: torch.Tensor, queries: torch.Tensor | None, bounds: Bounds) -> torch.Tensor:
    """Put ``[R, h, d]`` at its places among the M query slots, zero elsewhere."""
    if queries is None:
        return chains
    spread = chains.new_zeros((sum(bounds.query_lengths), *chains.shape[1:]))
    return spread.index_copy_(0, queries, chains)


def _groups(count: int) -> list[slice]:
    """Return the later columns in groups: each number of columns is compiled once, and torch allows few of those."""
    return [slice(start, min(start + MERGED_COLUMNS, count)) for start in range(0, count, MERGED_COLUMNS)]


def _run(function: Any) -> Any:
    from nemo_eagle3_sglang.training.pointwise import fused

    return fused(function)
