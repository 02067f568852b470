"""AdamW made fused: the same update, before and after state exists."""

from __future__ import annotations

import copy

import pytest
import torch

from nemo_eagle3_sglang.training.optimizer import fuse


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(int(sum(p.numel() for p in model.parameters())))
    for _ in range(steps):
        model(torch.randn(5, 7, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("before", [0, 3])
def test_same_update(before):
    torch.manual_seed(0)
    plain = torch.nn.Linear(7, 3)
    fused = copy.deepcopy(plain)
    options = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizers = [torch.optim.AdamW(model.parameters(), **options) for model in (plain, fused)]
    for model, optimizer in zip((plain, fused), optimizers, strict=True):
        train(model, optimizer, before)
    fuse(optimizers[1])
    assert all(group["fused"] for group in optimizers[1].param_groups)
    for model, optimizer in zip((plain, fused), optimizers, strict=True):
        train(model, optimizer, 4)
    for a, b in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    steps = [state["step"] for state in optimizers[1].state.values()]
    assert all(float(step) == before + 4 for step in steps)


def test_a_restored_state_goes_on():
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 3)
    first = torch.optim.AdamW(model.parameters(), lr=0.01)
    fuse(first)
    train(model, first, 3)
    saved, weights = copy.deepcopy(first.state_dict()), copy.deepcopy(model.state_dict())
    train(model, first, 2)
    expected = copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    second = torch.optim.AdamW(model.parameters(), lr=0.01)
    second.load_state_dict(saved)
    fuse(second)
    train(model, second, 2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])
