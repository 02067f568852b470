"""Some rows of a target's output head, for whoever has its hidden states but not its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Rows of the identity that are projected at once, times V: what bounds the memory of reading a head.
READ_ELEMENTS = 2**27


@dataclass(frozen=True)
class HeadRows:
    """A :class:`~nemo_eagle3_sglang.contracts.Head` over n chosen tokens.

    Attributes:
        weight: ``[n, H]``.
        bias: ``[n]``; ``None`` where the head has none.
        scale: What logits are multiplied by; ``None`` for nothing.
        softcap: ``tanh(logits / softcap) * softcap``, in float32; ``None`` for none.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float | None = None
    softcap: float | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits ``[p, n]`` of ``hidden`` ``[p, H]``, in its dtype; float32 where they are soft-capped."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        if self.scale is not None:
            logits = logits.mul_(self.scale)
        if self.softcap:
            logits = torch.tanh(logits.float() / self.softcap) * self.softcap
        return logits


def read_rows(
    project: Callable[[torch.Tensor], torch.Tensor],
    columns: torch.Tensor,
    hidden_size: int,
    dtype: torch.dtype,
    scale: float | None = None,
    softcap: float | None = None,
) -> HeadRows:
    """Read rows of any linear head by projecting the identity: sharded, quantised or packed, none need be known.

    One product and H - 1 zeros are summed, so that the rows of an unquantised head come exactly as they are.

    Args:
        project: The head before scale and soft cap, ``[p, H] -> [p, columns]``.
        columns: ``[n]`` int64 on the head's device, which of its columns.
        hidden_size: H.
        dtype: Of the hidden states that the head is handed.
        scale: See :class:`HeadRows`.
        softcap: See :class:`HeadRows`.
    """
    device = columns.device
    probe = project(torch.zeros((1, hidden_size), dtype=dtype, device=device))
    bias, width = probe[0, columns].clone(), probe.shape[-1]
    weight = torch.empty((len(columns), hidden_size), dtype=probe.dtype, device=device)
    step = max(1, READ_ELEMENTS // max(width, 1))
    for start in range(0, hidden_size, step):
        stop = min(start + step, hidden_size)
        identity = torch.zeros((stop - start, hidden_size), dtype=dtype, device=device)
        identity[torch.arange(stop - start), torch.arange(start, stop)] = 1
        weight[:, start:stop] = (project(identity).index_select(-1, columns) - bias).T
    return HeadRows(weight, bias if bool(bias.any()) else None, scale, softcap)
