"""Model FLOPs of a training step, for the MFU that a run reports (PaLM, arXiv:2204.02311, appendix B).

Counted is what the maths asks for, two FLOPs a multiply-add: the target's forward over the tokens that are run, its
head at the supervised positions, the draft's matrix products three times (forward and both gradients) on the rows that
the unroll has. The draft's attention, norms and the optimizer are left out, as is customary for small terms.

The MFU relates to the dense bf16 peak whatever the weights: a target that computes in fp8 can pass it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nemo_eagle3_sglang.supervision.unroll import Unroll

# Dense bf16 tensor-core FLOP/s, without sparsity, by whole words of the device's name, the longer names first; NVIDIA's
# data sheets. A device that is not listed gets no MFU rather than a wrong one.
PEAK_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
}

# AutoModel's formulas that take the heads to be as wide as the hidden size together.
HEADS_OF_HIDDEN_SIZE = ("llama2_flops", "mixtral_flops", "nemotron_flops")


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak in bf16, or ``None`` where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if "MIG" in name:
        # A slice of a GPU has a part of its peak.
        return None
    return next((peak for part, peak in PEAK_FLOPS.items() if re.search(rf"\b{part}\b", name)), None)


class StepFlops:
    """FLOPs of a micro-batch.

    Args:
        formula: AutoModel's FLOPs of a *training* step of the target, ``formula(config, gbs, seq_len)``: three times a
            forward.
        config: The target's text config.
        draft: AutoModel's Llama draft.
    """

    def __init__(self, formula: Callable[..., float], config: Any, draft: nn.Module) -> None:
        self._formula, self._draft = formula, draft
        self._head = 2 * config.vocab_size * config.hidden_size
        # The head is counted apart, at the supervised positions alone.
        self._config = copy.deepcopy(config)
        self._config.vocab_size = 0
        self._forwards: dict[int, float] = {}

    def checked(self) -> bool:
        """Return whether the formula is known to be right for the target (see ``tests/unit/training/test_flops.py``).

        Some are not, in AutoModel 0.6.0: gpt-oss' counts negative attention for texts below its window; DeepSeek's
        lets every token attend to ``index_topk`` others however short the text is, and counts one shared expert;
        Llama's takes the heads to be as wide as the hidden size together; Qwen's takes every layer for an MoE layer.
        """
        config, name = self._config, getattr(self._formula, "__name__", "")
        if name in HEADS_OF_HIDDEN_SIZE:
            return getattr(config, "head_dim", None) in (None, config.hidden_size // config.num_attention_heads)
        if name == "qwen3_flops":
            return not getattr(config, "mlp_only_layers", None) and getattr(config, "decoder_sparse_step", 1) == 1
        if name in ("deepseekv3_flops", "glm4_moe_flops"):
            return not getattr(config, "index_topk", None) and config.n_shared_experts == 1
        return False

    def count(self, plan: Unroll) -> float:
        """Return the FLOPs of target and draft for a micro-batch."""
        return self.target(plan) + self.draft(plan)

    def target(self, plan: Unroll) -> float:
        """Return the FLOPs of the target's forward and of its head at the supervised positions."""
        return sum(map(self._forward, plan.lengths)) + self._head * plan.supervised.shape[0]

    def draft(self, plan: Unroll) -> float:
        """Return the FLOPs of the draft's matrix products, forward and backward."""
        tokens, slots, chains = plan.tokens.shape[0], plan.slots.shape[0], plan.chains.shape[0]
        model, layer = self._draft.model, self._draft.model.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        keys = _size(attention.k_proj, attention.v_proj)
        rest = _size(attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        products = (
            _size(model.fc) * tokens
            + keys * (slots + (plan.steps - 1) * chains)
            + rest * plan.steps * chains
            + _size(self._draft.lm_head) * sum(plan.pair_sizes)
        )
        return 6.0 * products

    def _forward(self, length: int) -> float:
        if length not in self._forwards:
            self._forwards[length] = self._formula(self._config, gbs=1, seq_len=length) / 3
        return self._forwards[length]


def _size(*linears: nn.Module) -> int:
    return sum(linear.weight.numel() for linear in linears)
