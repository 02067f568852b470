"""What the target's process is started with, as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from nemo_eagle3_sglang.contracts import BackendRequest


@dataclass(frozen=True)
class Group:
    """The processes that share one target.

    Attributes:
        rank: This one.
        size: All of them; 1 for a target on one GPU.
        host: Where their store listens.
        port: Its port; 0 where there is none since there is one process.
        timeout_s: How long to wait for the slowest.
    """

    rank: int = 0
    size: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    timeout_s: float = 1800.0


def to_json(backend: str, request: BackendRequest, group: Group) -> dict[str, Any]:
    """Return the first frame's header."""
    fields = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}
    fields.update(device=str(request.device), dtype=_name(request.dtype), options=dict(request.options))
    return {"backend": backend, "request": fields, "group": dataclasses.asdict(group)}


def from_json(header: dict[str, Any]) -> tuple[str, BackendRequest, Group]:
    """Return what :func:`to_json` was given."""
    fields = dict(header["request"])
    fields.update(device=torch.device(fields["device"]), dtype=getattr(torch, fields["dtype"]))
    return header["backend"], BackendRequest(**fields), Group(**header["group"])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
