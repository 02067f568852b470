"""The optimizer that AutoModel has built, made to run as one kernel."""

from __future__ import annotations

import torch

# Those of torch's fused optimizers that training runs on.
FUSED_DEVICES = ("cuda", "cpu")


def fuse(optimizer: torch.optim.AdamW) -> None:
    """Switch AdamW to its fused implementation where torch has one for all parameters; the update is the same.

    AutoModel leaves the choice to torch, which takes the ``foreach`` one: several passes over the parameters, and
    temporary copies of all of them. State that a checkpoint has restored is kept.

    Args:
        optimizer: Built, and restored if the run goes on from a checkpoint.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in parameters):
        return
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    for parameter, state in optimizer.state.items():
        # The fused kernel reads the step count on the device.
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(parameter.device)
