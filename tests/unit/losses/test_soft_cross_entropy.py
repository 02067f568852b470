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
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
def test_any_vocabulary(monkeypatch, columns):
    """In chunks of two rows, the last a rest."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 2 * columns * 4)
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


def interpreted_corners() -> dict[str, object]:
    """Rows that need more than the right sums, in blocks of 16 columns; called in the interpreter's process."""
    from nemo_eagle3_sglang.losses.soft_cross_entropy_triton import launch

    ties = torch.zeros(3, 40)
    for row, places in enumerate(((5, 6), (7, 17, 33), (20, 39))):
        ties[row, list(places)] = 2.0
    # The maximum grows in every block, and falls; exponentials of 900 and -900 overflow and vanish.
    steep = torch.stack([torch.linspace(-900, 900, 40), torch.linspace(900, -900, 40), torch.full((40,), -7.0)])
    found: dict[str, object] = {}
    for name, logits, dtype in (("ties", ties, "float32"), ("steep", steep, "float32"), ("bf16", ties, "bfloat16")):
        z = (logits * (1.0 if name != "bf16" else 1.37)).to(getattr(torch, dtype))
        target = torch.randn(2, 40, generator=torch.Generator().manual_seed(0)).to(z.dtype)
        lse = torch.logsumexp(target.double(), -1).float()
        rows, weights = torch.tensor([1, 0, 1]), torch.tensor([1.0, 0.0, 0.5])
        losses, choices = torch.empty(3), torch.empty(3, dtype=torch.int64)
        p = torch.softmax(target.double(), -1)[rows]
        want = weights.double() * -(p * torch.log_softmax(z.double(), -1)).sum(-1)
        want_grad = weights.double()[:, None] * (torch.softmax(z.double(), -1) - p)
        # Rows of a wider matrix: the kernel must step by the stride.
        wide = torch.full((3, 48), 99.0, dtype=z.dtype)
        wide[:, :40] = z
        launch(wide[:, :40], target, lse, rows, weights, losses, choices, write_grad=True, block=16)
        found[name] = {
            "choices": choices.tolist(),
            "loss": ((losses - want).abs() / want.abs().clamp_min(1e-3)).max().item(),
            "grad": (wide[:, :40] - want_grad).abs().max().item(),
            "outside": bool((wide[:, 40:] == 99).all()),
            "no weight, no gradient": not wide[1, :40].any().item(),
        }
    return found


@pytest.fixture(scope="module")
def kernel() -> dict[str, object]:
    """What the kernel gives in the interpreter, in one other process for all sizes."""
    pytest.importorskip("triton", reason="the kernel is Triton's")
    code = (
        f"import sys, json; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_soft_cross_entropy as t; "
        f"sizes = t.interpreted({list(COLUMNS)}, 4096) + t.interpreted([1, 3, 15, 16, 17, 33], 16); "
        "print(json.dumps({'sizes': sizes, 'corners': t.interpreted_corners()}))"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_kernel_in_the_interpreter_at_any_vocabulary(kernel):
    assert [errors["columns"] for errors in kernel["sizes"]] == [*COLUMNS, 1, 3, 15, 16, 17, 33]
    for errors in kernel["sizes"]:
        # One column leaves nothing to learn: the loss is 0, and so is its gradient.
        if errors["columns"] > 1:
            assert errors["loss"] <= 1e-6, errors
            assert errors["grad_hidden"] <= 1e-5, errors
            assert errors["grad_weight"] <= 1e-5, errors
        assert errors["choices"], errors
        assert errors["untouched"], errors


def test_the_kernel_in_the_interpreter_in_the_corners(kernel):
    """Ties go to the first column, within a block and over blocks; steep rows; bf16; rows of a wider matrix."""
    corners = kernel["corners"]
    assert corners["ties"]["choices"] == corners["bf16"]["choices"] == [5, 7, 20]
    assert corners["steep"]["choices"] == [39, 0, 0]
    for name, found in corners.items():
        assert found["loss"] <= 1e-5, (name, found)
        assert found["grad"] <= (2**-8 if name == "bf16" else 1e-6), (name, found)
        assert found["outside"], name
        assert found["no weight, no gradient"], name


class Made(TorchDispatchMode):
    """Notes the shape of every new tensor; views make none."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.shapes.add(tuple(out.shape))
        return out


@pytest.mark.parametrize("wanted", [(), ("hidden",), ("weight",), ("hidden", "weight")])
@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_gradient_is_made_only_where_one_is_wanted(wanted, grad_mode):
    case = problem(100)
    _, *gradients, _ = reference(case)
    for name in wanted:
        case[name].requires_grad_()
    made = Made()
    with made, torch.set_grad_enabled(grad_mode):
        loss, _ = linear_soft_cross_entropy(**case)
    for name in ("hidden", "weight"):
        assert (tuple(case[name].shape) in made.shapes) == (grad_mode and name in wanted), (name, made.shapes)
    assert loss.requires_grad == (grad_mode and bool(wanted))
    if loss.requires_grad:
        loss.backward()
        for name, gradient in zip(("hidden", "weight"), gradients, strict=True):
            if name in wanted:
                close(case[name].grad, gradient)


def test_bf16_gradients_are_rounded_once():
    case = {k: v.bfloat16() if k in ("hidden", "weight", "target_logits") else v for k, v in problem(500).items()}
    case["target_lse"] = torch.logsumexp(case["target_logits"].double(), -1).float()
    loss, grad_hidden, grad_weight, _ = reference(case)
    case["hidden"].requires_grad_()
    case["weight"].requires_grad_()
    got, _ = linear_soft_cross_entropy(**case)
    got.backward()
    # bf16 keeps 8 bits: the logits of the product are rounded, and so are their gradients.
    close(got.detach(), loss, 2**-8)
    close(case["hidden"].grad, grad_hidden, 2**-6)
    close(case["weight"].grad, grad_weight, 2**-6)


def test_the_kernel_is_chosen_by_device_and_its_failure_is_seen(monkeypatch):
    """A path that is taken when another raises would hide that the kernel never runs."""
    triton_path = pytest.importorskip("nemo_eagle3_sglang.losses.soft_cross_entropy_triton", reason="needs Triton")
    asked = []

    def launch(*arguments, **options):
        asked.append(options)
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(triton_path, "launch", launch)
    monkeypatch.setattr(module, "reference", lambda *a, **k: pytest.fail("the reference ran for a GPU's logits"))
    with pytest.raises(RuntimeError, match="no kernel image"):
        soft_cross_entropy_(SimpleNamespace(is_cuda=True), *[None] * 6, write_grad=True)
    assert asked == [{"write_grad": True, "block": module.BLOCK}]
    monkeypatch.undo()
    monkeypatch.setattr(triton_path, "launch", launch)
    linear_soft_cross_entropy(**problem(10))
    assert len(asked) == 1, "the kernel was launched for a CPU's logits"


def test_the_kernel_refuses_columns_that_are_strided():
    launch = pytest.importorskip("nemo_eagle3_sglang.losses.soft_cross_entropy_triton", reason="needs Triton").launch
    for logits, target in ((torch.ones(4, 2).T, torch.ones(2, 4)), (torch.ones(2, 4), torch.ones(4, 2).T)):
        with pytest.raises(ValueError, match="must be contiguous"):
            launch(logits, target, *[torch.ones(2)] * 5, write_grad=False, block=16)
