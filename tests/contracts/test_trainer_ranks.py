"""The flat trainer under DDP: two gloo ranks with unequal supervision give the one-process loss and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytestmark = pytest.mark.slow
pytest.importorskip("nemo_automodel", reason="the draft is AutoModel's")
from trainer_cases import backend, chats, draft, modules, packed, run  # noqa: E402

STEPS = 4


def shares() -> list[list[dict[str, list[int]]]]:
    """The chats of each rank: much supervision, little; and in the second step none at all on rank 1."""
    rows = chats(7)
    silent = {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}
    return [[rows[0], rows[2], *rows[4:]], [rows[3]], [rows[5]], [silent]]


def rank(number: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    target = backend(torch.float64)
    _, ours = modules(draft(torch.float64), target, STEPS)
    wrapped = torch.nn.parallel.DistributedDataParallel(ours)
    found = []
    for step in range(2):
        batch = target.flat_batch(packed(shares()[2 * step + number], 64), STEPS)
        metrics, grads = run(wrapped, {"batch": batch})
        loss = metrics.loss.detach().double()
        dist.all_reduce(loss)
        found.append((loss.item() / 2, {name.removeprefix("module."): grad for name, grad in grads.items()}))
    if number == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


def test_two_ranks_are_one_process(tmp_path: Path):
    mp.spawn(rank, (str(tmp_path),), nprocs=2)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    target = backend(torch.float64)
    _, ours = modules(draft(torch.float64), target, STEPS)
    for step, (loss, grads) in enumerate(found):
        together = shares()[2 * step] + shares()[2 * step + 1]
        metrics, wanted = run(ours, {"batch": target.flat_batch(packed(together, 128), STEPS)})
        assert loss == pytest.approx(metrics.loss.item(), rel=1e-6)
        assert grads.keys() == wanted.keys()
        for name, grad in wanted.items():
            assert (grads[name] - grad).abs().max() <= 1e-6 * max(grad.abs().max().item(), 1e-3), name
