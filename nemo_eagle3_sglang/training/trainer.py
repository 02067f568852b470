"""The EAGLE-3 trainer over bare documents: AutoModel's loss and metrics without its padding, masks and copies.

Same maths as AutoModel's ``Eagle3TrainerModule`` on the draft class ``LlamaEagle3DraftModel``, step by step; what
differs is which rows exist (see ``supervision/unroll.py``), how attention is computed (``attention.py``) and that draft
logits live for a chunk of rows at a time (``losses/``). ``recipe.py`` mixes it into AutoModel's module, so that
parameters, buffers and checkpoint keys are AutoModel's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nemo_eagle3_sglang.contracts import FlatBatch
from nemo_eagle3_sglang.losses.soft_cross_entropy import linear_soft_cross_entropy
from nemo_eagle3_sglang.training.attention import Bounds, unrolled_attention
from nemo_eagle3_sglang.training.pointwise import fused, rotate, swiglu
from nemo_eagle3_sglang.training.rows import take

# Weight of step k is DECAY**k over the sum of all; AutoModel's and the paper's.
DECAY = 0.8
# Rows by which the table of rotary angles grows.
TABLE_STEP = 1024


@dataclass
class StepMetrics:
    """What AutoModel's loop reads off a micro-batch; tensors on the device, nothing waited for.

    Attributes:
        loss: Scalar, the weighted mean over the steps of the mean over supervised positions.
        accuracy: Scalar, share of supervised pairs whose greedy draft token is the target's.
        valid_tokens: Scalar, supervised pairs of all steps.
        step_prefix_hits: ``[K]``, chains whose first k+1 drafts are all right.
        step_valid: ``[K]``, chains that are supervised at all of them.
    """

    loss: torch.Tensor
    accuracy: torch.Tensor
    valid_tokens: torch.Tensor
    step_prefix_hits: torch.Tensor
    step_valid: torch.Tensor


class FlatTrainer:
    """``forward`` for a module with ``draft_model`` and ``ttt_steps``, in place of AutoModel's."""

    draft_model: Any
    ttt_steps: int
    training: bool
    _angles: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, batch: FlatBatch) -> StepMetrics:
        """Return loss and metrics of a micro-batch.

        Raises:
            ValueError: The batch was laid out for another number of steps.
        """
        plan = batch.unroll
        if plan.steps != self.ttt_steps:
            raise ValueError(f"the batch is laid out for {plan.steps} steps, the trainer unrolls {self.ttt_steps}")
        if not plan.lengths:
            return self._nothing(batch)
        states = take(torch.cat(self._unroll(batch)), plan.pairs)
        if not getattr(self.draft_model.config, "norm_output", False):
            states = self.draft_model.model.norm(states)
        valid = batch.in_draft_vocab.index_select(0, plan.pair_targets)
        counts = torch.stack([mask.sum() for mask in valid.float().split(plan.pair_sizes)])
        world = self._sum_over_ranks(counts)
        loss, choices = linear_soft_cross_entropy(
            states,
            self.draft_model.lm_head.weight,
            batch.draft_logits,
            batch.draft_lse,
            plan.pair_targets,
            self._row_weights(valid, plan.pair_sizes, counts, world),
        )
        correct = valid & (choices == batch.draft_choices.index_select(0, plan.pair_targets))
        # As the loss: a mean over all ranks' positions once AutoModel has taken the mean of the ranks.
        accuracy = correct.sum() * world / counts.sum().clamp_min(1.0)
        return self._metrics(loss, accuracy, correct, valid, plan)

    def _unroll(self, batch: FlatBatch) -> list[torch.Tensor]:
        """Return the draft's state ``[R, H]`` of each chain after each step."""
        plan, draft, layer = batch.unroll, self.draft_model, self.draft_model.model.layers[0]
        attention, dense = layer.self_attn, plan.dense
        bounds = Bounds(plan.cu_queries, plan.cu_slots, plan.query_lengths, plan.slot_lengths)
        cos, sin = self._rotary(max(plan.lengths) + plan.steps, batch.aux)
        projected = take(draft.project_hidden_states(batch.aux), plan.slots)

        combined = _combine(layer, draft.embed_input_ids(plan.next_ids), projected)
        first_key = _rotated(attention.k_proj(combined), attention.head_dim, cos, sin, plan.positions)
        first_value = attention.v_proj(combined).unflatten(-1, (-1, attention.head_dim))
        combined, hidden = take(combined, plan.chains), take(projected, plan.chains)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        states = []
        for step in range(plan.steps):
            positions = plan.chain_positions + step
            if step:
                combined = _combine(layer, draft.embed_input_ids(plan.chain_ids[step - 1]), hidden)
                keys.append(_rotated(attention.k_proj(combined), attention.head_dim, cos, sin, positions))
                values.append(attention.v_proj(combined).unflatten(-1, (-1, attention.head_dim)))
            query = _rotated(attention.q_proj(combined), attention.head_dim, cos, sin, positions)
            attended = unrolled_attention(
                query,
                first_key,
                first_value,
                keys,
                values,
                bounds,
                None if dense else plan.chain_queries,
                attention.scaling,
            )
            hidden = hidden + attention.o_proj(attended.flatten(1))
            hidden = hidden + _mlp(layer.mlp, layer.post_attention_layernorm(hidden))
            if getattr(draft.config, "norm_output", False):
                hidden = draft.model.norm(hidden)
            states.append(hidden)
        return states

    def _rotary(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines ``[>= length, d]`` as the draft's own module makes them.

        Kept between batches: the module asks the device for the highest position every time.
        """
        if self._angles is None or self._angles[0].shape[0] < length or self._angles[0].device != like.device:
            rows = -(-length // TABLE_STEP) * TABLE_STEP
            positions = torch.arange(rows, device=like.device).unsqueeze(0)
            cos, sin = self.draft_model.model.layers[0].self_attn.rotary_emb(like, positions)
            self._angles = cos[0], sin[0]
        return self._angles

    def _row_weights(self, valid: torch.Tensor, sizes: list[int], counts: torch.Tensor, world: int) -> torch.Tensor:
        """Return ``[E]`` float32: the step's weight over its supervised positions.

        0 where the target's choice lies outside the draft vocabulary. The positions are those of all data-parallel
        ranks, so that a rank with few of them does not weigh as much as one with many.

        Args:
            valid: ``[E]``, the pairs that carry loss, by step.
            sizes: Pairs of each step.
            counts: ``[K]``, those that carry loss on all ranks.
            world: Ranks. DDP takes the mean of their gradients: the share of the sum that it leaves is given back.
        """
        decay = [DECAY**k for k in range(len(sizes))]
        scale, counts = world / sum(decay), counts.clamp_min(1.0)
        return torch.cat([mask * (decay[k] * scale / counts[k]) for k, mask in enumerate(valid.float().split(sizes))])

    def _sum_over_ranks(self, counts: torch.Tensor) -> int:
        """Add up ``counts`` over the trainer's ranks in place and return how many there are.

        In training only: an evaluation may have unequal numbers of batches, and its loss is logged as a mean of ranks.
        """
        world = dist.get_world_size() if self.training and dist.is_initialized() else 1
        if world > 1:
            dist.all_reduce(counts)
        return world

    def _metrics(
        self, loss: torch.Tensor, accuracy: torch.Tensor, correct: torch.Tensor, valid: torch.Tensor, plan: Any
    ) -> StepMetrics:
        hits = correct.new_zeros(plan.steps * plan.chains.shape[0])
        hits.index_copy_(0, plan.pairs, correct)
        prefixes = hits.view(plan.steps, -1).to(torch.int32).cumprod(dim=0).sum(dim=1)
        return StepMetrics(
            loss=loss,
            accuracy=accuracy,
            valid_tokens=valid.sum(),
            step_prefix_hits=prefixes,
            step_valid=_counts(plan, prefixes),
        )

    def _nothing(self, batch: FlatBatch) -> StepMetrics:
        """A micro-batch without supervision: loss 0 and zero gradients, so that no rank waits for another's."""
        # The other ranks count theirs together.
        self._sum_over_ranks(torch.zeros(self.ttt_steps, device=batch.aux.device))
        trained = [p for p in self.draft_model.parameters() if p.requires_grad]
        zero = sum(((p * 0).sum() for p in trained), batch.aux.new_zeros(()))
        empty = torch.zeros(self.ttt_steps, dtype=torch.int64, device=batch.aux.device)
        return StepMetrics(zero.float(), empty[0].float(), empty[0], empty, empty)


def _counts(plan: Any, like: torch.Tensor) -> torch.Tensor:
    counts = torch.tensor(plan.chain_counts, dtype=torch.int64)
    return (counts.pin_memory() if like.is_cuda else counts).to(like.device, non_blocking=True)


def _combine(layer: nn.Module, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return the attention's input ``[n, 2H]``."""
    return torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), dim=-1)


def _rotated(
    projected: torch.Tensor, head_dim: int, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    heads = projected.unflatten(-1, (-1, head_dim))
    return fused(rotate)(heads, cos.index_select(0, positions), sin.index_select(0, positions))


def _mlp(mlp: nn.Module, states: torch.Tensor) -> torch.Tensor:
    gate, up = mlp.gate_proj(states), mlp.up_proj(states)
    if isinstance(mlp.act_fn, nn.SiLU) or type(mlp.act_fn).__name__ == "SiLUActivation":
        return mlp.down_proj(fused(swiglu)(gate, up))
    return mlp.down_proj(mlp.act_fn(gate) * up)
