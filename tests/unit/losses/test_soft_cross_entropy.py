"""The fused linear and soft cross entropy, both of its paths, against float64.

The Triton kernel runs in Triton's interpreter, in a process of its own: the interpreter is chosen when it is imported.
``tests/gpu/test_trainer_gpu.py`` runs it compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nemo_eagle3_sglang.losses import soft_cross_entropy as module
from nemo_eagle3_sglang.losses.soft_cross_entropy import linear_soft_cross_entropy, soft_cross_entropy_

COLUMNS = (32_000, 131_072, 131_073, 151_936, 163_840)


def problem(columns: int, rows: int = 5, hidden: int = 8, seed: int = 0) -> dict[str, torch.Tensor]:
    """Five rows that share three targets; one carries no loss."""
    generator = torch.Generator().manual_seed(seed)
    target = 3 * torch.randn(3, columns, generator=generator)
    return {
        "hidden": torch.randn(rows, hidden, generator=generator),
        "weight": torch.randn(columns, hidden, generator=generator),
        "target_logits": target,
        "target_lse": torch.logsumexp(target.double(), -1).float(),
        "target_rows": torch.tensor([0, 2, 1, 2, 0])[:rows],
        "row_weights": torch.tensor([0.5, 0.125, 0.0, 2.0, 0.25])[:rows],
    }


def reference(problem: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Loss, gradients and choices in float64, from the definition."""
    hidden = problem["hidden"].detach().double().requires_grad_()
    weight = problem["weight"].detach().double().requires_grad_()
    p = torch.softmax(problem["target_logits"].double(), -1)[problem["target_rows"]]
    logits = hidden @ weight.T
    loss = (problem["row_weights"].double() * -(p * torch.log_softmax(logits, -1)).sum(-1)).sum()
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad, logits.argmax(-1)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    error = (got.double() - want).abs().max().item()
    assert error <= tolerance * max(want.abs().max().item(), 1e-6), error


@pytest.mark.parametrize("columns", COLUMNS)
def test_any_vocabulary(columns):
    case = problem(columns)
    loss, grad_hidden, grad_weight, choices = reference(case)
    case["hidden"].requires_grad_()
    case["weight"].requires_grad_()
    got, got_choices = linear_soft_cross_entropy(**case)
    got.backward()
    close(got.detach(), loss, 1e-6)
    # Torch's float32 softmax over this many columns is good for 2e-5 of the largest gradient on a CPU.
    close(case["hidden"].grad, grad_hidden, 5e-5)
    close(case["weight"].grad, grad_weight, 5e-5)
    assert torch.equal(got_choices, choices)
    assert not case["hidden"].grad[2].any(), "a row of weight 0 has no gradient"


@pytest.mark.parametrize("rows_per_chunk", [1, 2, 3, 100])
def test_chunks_change_nothing(monkeypatch, rows_per_chunk):
    case = problem(1000)
    loss, grad_hidden, grad_weight, choices = reference(case)
    monkeypatch.setattr(module, "CHUNK_BYTES", rows_per_chunk * 1000 * 4)
    case["hidden"].requires_grad_()
    case["weight"].requires_grad_()
    got, got_choices = linear_soft_cross_entropy(**case)
    (got * 3).backward()
    close(got.detach(), loss, 1e-6)
    close(case["hidden"].grad, 3 * grad_hidden)
    close(case["weight"].grad, 3 * grad_weight)
    assert torch.equal(got_choices, choices)


def test_no_rows():
    case = problem(100, rows=0)
    case["hidden"].requires_grad_()
    case["weight"].requires_grad_()
    loss, choices = linear_soft_cross_entropy(**case)
    loss.backward()
    assert loss.item() == 0
    assert choices.shape == (0,)
    assert not case["weight"].grad.any()


def test_without_gradient_the_logits_are_not_turned_into_one(monkeypatch):
    asked = []
    real = module.soft_cross_entropy_
    monkeypatch.setattr(
        module,
        "soft_cross_entropy_",
        lambda *a, write_grad: (asked.append(write_grad), real(*a, write_grad=write_grad)),
    )
    case = problem(100)
    case["weight"].requires_grad_()
    with torch.no_grad():
        loss, _ = linear_soft_cross_entropy(**case)
    close(loss, reference(case)[0], 1e-6)
    assert asked == [False]


def test_ties_go_to_the_first():
    logits = torch.tensor([[1.0, 7.0, 7.0, 2.0]])
    losses, choices = torch.empty(1), torch.empty(1, dtype=torch.int64)
    target = torch.zeros(1, 4)
    soft_cross_entropy_(
        logits,
        target,
        torch.logsumexp(target, -1),
        torch.zeros(1, dtype=torch.int64),
        torch.ones(1),
        losses,
        choices,
        write_grad=False,
    )
    assert choices.item() == 1
    assert torch.equal(logits, torch.tensor([[1.0, 7.0, 7.0, 2.0]]))


def interpreted(columns: list[int], block: int) -> list[dict[str, float]]:
    """Run the kernel on rows of ``columns`` in the interpreter; called in its own process."""
    from nemo_eagle3_sglang.losses.soft_cross_entropy_triton import launch

    found = []
    for width in columns:
        case = problem(width)
        loss, grad_hidden, grad_weight, choices = reference(case)
        logits = case["hidden"] @ case["weight"].T
        losses, got = torch.empty(5), torch.empty(5, dtype=torch.int64)
        rest = [case[name] for name in ("target_logits", "target_lse", "target_rows", "row_weights")]
        before = logits.clone()
        launch(logits, *rest, losses, got, write_grad=False, block=block)
        untouched, first = torch.equal(logits, before), losses.clone()
        launch(logits, *rest, losses, got, write_grad=True, block=block)
        grad = (logits.double() @ case["weight"].double() - grad_hidden).abs().max()
        weight = (logits.double().T @ case["hidden"].double() - grad_weight).abs().max()
        found.append(
            {
                "columns": width,
                "loss": ((losses.double().sum() - loss).abs() / loss).item(),
                "grad_hidden": (grad / grad_hidden.abs().max()).item(),
                "grad_weight": (weight / grad_weight.abs().max()).item(),
                "choices": torch.equal(got, choices),
                "untouched": untouched and torch.equal(first, losses),
            }
        )
    return found


def run_interpreted(columns: list[int], block: int) -> list[dict[str, float]]:
    code = (
        f"import sys, json; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_soft_cross_entropy as t; "
        f"print(json.dumps(t.interpreted({columns}, {block})))"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("columns", "block"), [(list(COLUMNS), 4096), ([1, 3, 15, 16, 17, 33], 16)])
def test_the_kernel_in_the_interpreter(columns, block):
    pytest.importorskip("triton", reason="the kernel is Triton's")
    for errors in run_interpreted(columns, block):
        # One column leaves nothing to learn: the loss is 0, and so is its gradient.
        if errors["columns"] > 1:
            assert errors["loss"] <= 1e-6, errors
            assert errors["grad_hidden"] <= 1e-5, errors
            assert errors["grad_weight"] <= 1e-5, errors
        assert errors["choices"], errors
        assert errors["untouched"], errors
