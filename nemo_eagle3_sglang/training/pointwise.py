"""Elementwise parts of the draft's layer, each fused into one kernel by ``torch.compile`` on a GPU.

Matrix products and attention stay as they are; only what is bound by memory is compiled, over dynamic numbers of rows,
so that a new batch shape compiles nothing. A compiled function also keeps only its inputs for the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` so that it is compiled when its first tensor is on a GPU."""
    return _dispatcher(function)


@functools.cache
def _dispatcher(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def run(first: torch.Tensor, *rest: Any) -> Any:
        return (compiled if first.is_cuda else function)(first, *rest)

    return run


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``[n, h, d]`` by ``cos`` and ``sin`` ``[n, d]`` (rotary position embedding, halves convention)."""
    half = states.shape[-1] // 2
    turned = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
    return (states * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).to(states.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``."""
    return torch.nn.functional.silu(gate) * up
