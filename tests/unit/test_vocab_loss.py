"""The vocabulary loss at sizes where other kernels stop, forward and gradient, against float64.

SpecForge's fused kernel stops at 131,072 columns, a row being one block there. AutoModel's
``masked_soft_cross_entropy`` (its Triton kernel on a GPU, torch elsewhere) loops over blocks of 32,768, so no size
check is needed: these tests are the ground for that. The kernel runs here in Triton's interpreter, in a process of its
own, since the interpreter is chosen when the kernel is imported; ``tests/gpu/test_vocab_loss_gpu.py`` runs it compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

soft_ce = pytest.importorskip("nemo_automodel.components.loss.soft_ce", reason="the loss is AutoModel's")

# The last block is full, has one column, is cut, and is full again.
COLUMNS = (32_000, 131_072, 131_073, 151_936, 163_840)
AWKWARD = (1, 41, 401, 1271, 32_767, 32_769)


def rows(columns: int, mask: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return float32 logits and target distributions ``[1, rows, columns]``, and the mask ``[1, rows, 1]``."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(1, len(mask), columns, generator=generator)
    probs = torch.softmax(3 * torch.randn(1, len(mask), columns, generator=generator), dim=-1)
    return logits, probs, torch.tensor(mask, dtype=torch.bool).view(1, -1, 1)


def reference(
    logits: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor, grad_output: float = 1.0
) -> tuple[float, torch.Tensor]:
    """Return loss and gradient in float64: the mean of ``-sum(p log_softmax(x))`` over the rows of the mask."""
    x = logits.double().requires_grad_()
    per_row = -(probs.double() * torch.log_softmax(x, dim=-1)).sum(-1)
    loss = (per_row * mask.squeeze(-1)).sum() / max(int(mask.sum()), 1)
    loss.backward(torch.tensor(grad_output, dtype=torch.float64))
    return loss.item(), x.grad


def run(
    loss_fn, logits: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor, grad_output: float = 1.0
) -> tuple[float, torch.Tensor]:
    x = logits.clone().requires_grad_()
    loss = loss_fn(x * 1.0, probs, mask)  # of a copy: the kernel writes the gradient over its input
    loss.backward(torch.tensor(grad_output))
    return loss.item(), x.grad


def check(loss_fn, columns: int, mask: list[int], grad_output: float = 1.0) -> dict[str, float]:
    """Compare with float64 and return the errors."""
    batch = rows(columns, mask)
    (loss, grad), (wanted, wanted_grad) = run(loss_fn, *batch, grad_output), reference(*batch, grad_output)
    errors = {
        "columns": columns,
        "loss": wanted,
        "loss_error": abs(loss - wanted),
        "grad_error": (grad - wanted_grad).abs().max().item(),
        "grad_max": wanted_grad.abs().max().item(),
    }
    assert errors["loss_error"] <= 1e-6 * max(1.0, abs(wanted)), errors
    assert errors["grad_error"] <= 1e-5 * errors["grad_max"] + 1e-9, errors
    assert not grad[~mask_of(mask)].any(), "a row without supervision has no gradient"
    return errors


def mask_of(mask: list[int]) -> torch.Tensor:
    return torch.tensor(mask, dtype=torch.bool).view(1, -1)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("grad_output", [1.0, 0.37])
def test_torch_path(columns, grad_output):
    check(soft_ce.masked_soft_cross_entropy, columns, [1, 0, 1, 1], grad_output)


def test_loss_is_the_mean_over_supervised_positions_and_padding_does_not_move_it():
    logits, probs, mask = rows(401, [1, 1, 0])
    loss, grad = run(soft_ce.masked_soft_cross_entropy, logits, probs, mask)
    padded = [torch.cat([x, x.new_ones(1, 29, x.shape[-1])], 1) for x in (logits, probs)]
    longer, longer_grad = run(
        soft_ce.masked_soft_cross_entropy, *padded, torch.cat([mask, mask.new_zeros(1, 29, 1)], 1)
    )
    assert longer == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(longer_grad[:, :3], grad)
    single = [
        run(soft_ce.masked_soft_cross_entropy, logits[:, i : i + 1], probs[:, i : i + 1], mask[:, :1])[0]
        for i in (0, 1)
    ]
    assert loss == pytest.approx(sum(single) / 2, rel=1e-6)


def test_nothing_supervised_is_zero():
    loss, grad = run(soft_ce.masked_soft_cross_entropy, *rows(401, [0, 0]))
    assert loss == 0
    assert not grad.any()


@pytest.fixture(scope="module")
def interpreted() -> list[dict[str, float]]:
    """The kernel in Triton's interpreter at all sizes, in another process: each size's errors."""
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=250, env=env, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_triton_kernel(interpreted):
    assert [errors["columns"] for errors in interpreted] == [*COLUMNS, *AWKWARD]


def test_kernel_has_no_block_ceiling():
    """A row is several blocks from 32,769 columns on; were it one, 131,072 and more would not launch."""
    kernel = pytest.importorskip("nemo_automodel.components.loss.triton.soft_cross_entropy")
    pytest.importorskip("triton")
    assert {columns: kernel._launch_config(columns)[0] for columns in COLUMNS} == dict.fromkeys(COLUMNS, 32_768)


if __name__ == "__main__":
    from nemo_automodel.components.loss.triton.soft_cross_entropy import fused_soft_cross_entropy

    print(json.dumps([check(fused_soft_cross_entropy, columns, [1, 0, 1], 0.37) for columns in (*COLUMNS, *AWKWARD)]))
