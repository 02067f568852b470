"""States as they travel: as they are, or as FP8 with a scale per state."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nemo_eagle3_sglang.contracts import NUM_AUX_LAYERS, TargetStates

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def pack(states: TargetStates, rows: str) -> dict[str, torch.Tensor]:
    """Return the tensors that travel, by name; their first dimension is T or P."""
    choices = states.choices.to(torch.int32)
    if rows == "native":
        return {"aux": states.aux, "last": states.last, "choices": choices}
    aux, aux_scale = _quantise(_apart(states.aux))
    last, last_scale = _quantise(states.last)
    return {
        "aux": aux.flatten(1),
        "last": last,
        "choices": choices,
        "aux_scale": aux_scale.squeeze(-1),
        "last_scale": last_scale.squeeze(-1),
    }


def unpack(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> TargetStates:
    """Return the states in ``dtype``; what :func:`pack` gave them as is told by the scales."""
    aux, last = tensors["aux"], tensors["last"]
    if "aux_scale" in tensors:
        aux = (_apart(aux).float() * tensors["aux_scale"].unsqueeze(-1)).flatten(1)
        last = last.float() * tensors["last_scale"].unsqueeze(-1)
    return TargetStates(aux.to(dtype), last.to(dtype), tensors["choices"].long())


def shapes(
    tokens: int, positions: int, hidden: int, dtype: torch.dtype, rows: str
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of what :func:`pack` gives."""
    kept = dtype if rows == "native" else FP8
    plain: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "aux": (kept, (tokens, NUM_AUX_LAYERS * hidden)),
        "last": (kept, (positions, hidden)),
        "choices": (torch.int32, (positions,)),
    }
    if rows == "native":
        return plain
    scales = {"aux_scale": (torch.float32, (tokens, NUM_AUX_LAYERS)), "last_scale": (torch.float32, (positions,))}
    return {**plain, **scales}


def _apart(aux: torch.Tensor) -> torch.Tensor:
    """Return ``[T, A*H]`` as ``[T, A, H]``, with no token too."""
    return aux.view(len(aux), NUM_AUX_LAYERS, aux.shape[-1] // NUM_AUX_LAYERS)


def _quantise(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 states and their scale, the largest magnitude of each over what E4M3 holds."""
    scale = states.abs().amax(dim=-1, keepdim=True).float().clamp_min(torch.finfo(torch.float32).tiny) / LARGEST
    return (states.float() / scale).to(FP8), scale
