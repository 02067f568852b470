"""The vocabulary loss as the trainer calls it on a GPU: values, time and peak memory at every size, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

soft_ce = pytest.importorskip("nemo_automodel.components.loss.soft_ce", reason="the loss is AutoModel's")

COLUMNS = (32_000, 131_072, 131_073, 151_936, 163_840)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ROWS, REPEATS = 2048, 10
# Rounding of the gradient to the logits' dtype, relative to the largest: half a unit in the last of 8 or 24 bits.
GRAD_TOLERANCE = {"bfloat16": 2**-7, "float32": 1e-5}


def make(columns: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits and targets ``[1, rows, columns]`` and a mask with three quarters of the rows."""
    generator = torch.Generator("cuda").manual_seed(columns)
    logits = (3 * torch.randn(1, rows, columns, device="cuda", generator=generator)).to(dtype)
    probs = torch.softmax(3 * torch.randn(1, rows, columns, device="cuda", generator=generator), dim=-1)
    mask = (torch.arange(rows, device="cuda") % 4 != 3).view(1, -1, 1)
    return logits, probs, mask


def by_torch(logits: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the loss by torch's operators in float32, what the trainer would do without the kernel."""
    per_row = -(probs * torch.log_softmax(logits.float(), dim=-1)).sum(-1)
    return (per_row * mask.squeeze(-1)).sum() / mask.sum()


def measure(loss_fn: Callable[..., torch.Tensor], batch: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Return milliseconds of forward and backward, and the peak of memory over what is there before."""
    logits, probs, mask = batch
    x = logits.requires_grad_()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for repeat in range(REPEATS + 3):
        if repeat == 3:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            events[0].record()
        # The copy is what the head's matmul would have made; the kernel writes its gradient over it.
        loss_fn(x * 1.0, probs, mask).backward()
        x.grad = None
    events[1].record()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return {"ms": events[0].elapsed_time(events[1]) / REPEATS, "peak_gib": peak / 2**30}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_against_float64(columns, dtype):
    logits, probs, mask = make(columns, 32, DTYPES[dtype])
    x = logits.clone().requires_grad_()
    loss = soft_ce.masked_soft_cross_entropy(x * 1.0, probs, mask)
    (0.37 * loss).backward()
    exact = logits.double().requires_grad_()
    wanted = by_double(exact, probs, mask)
    (0.37 * wanted).backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    error = (x.grad.double() - exact.grad).abs().max().item()
    assert error <= GRAD_TOLERANCE[dtype] * exact.grad.abs().max().item()
    assert not x.grad[~mask.expand_as(x)].any()


def by_double(logits: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    per_row = -(probs.double() * torch.log_softmax(logits, dim=-1)).sum(-1)
    return (per_row * mask.squeeze(-1)).sum() / mask.sum()


def test_time_and_memory(report: Callable[[str, Any], None]):
    """The kernel keeps no ``[rows, columns]`` of its own: its peak is the copy of the logits and its gradient."""
    results = []
    for columns in COLUMNS:
        for name, dtype in DTYPES.items():
            line = {
                "columns": columns,
                "rows": ROWS,
                "dtype": name,
                "logits_gib": ROWS * columns * dtype.itemsize / 2**30,
            }
            for way, loss_fn in (("kernel", soft_ce.masked_soft_cross_entropy), ("torch", by_torch)):
                line[way] = measure(loss_fn, make(columns, ROWS, dtype))
                torch.cuda.empty_cache()
            results.append(line)
            print(json.dumps(line))
    report("vocab_loss", {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results})
    for line in results:
        assert line["kernel"]["peak_gib"] <= 2.1 * line["logits_gib"] + 0.05, line
        assert line["kernel"]["peak_gib"] < line["torch"]["peak_gib"], line
