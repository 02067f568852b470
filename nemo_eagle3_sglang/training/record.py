"""``run.jsonl`` beside ``metrics.jsonl``: what a run was started with, for ``nemo-eagle3-sglang report``."""

from __future__ import annotations

import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import nemo_eagle3_sglang
from nemo_eagle3_sglang import backends
from nemo_eagle3_sglang.config.schema import Config
from nemo_eagle3_sglang.training import meter
from nemo_eagle3_sglang.training.plan import make_plan

NAME = "run.jsonl"
DISTRIBUTIONS = ("nemo-automodel", "sglang", "torch", "transformers")


def write(config: Config, trainer: str, device: torch.device, world: int, step: int) -> None:
    """Append the line of one start to ``run.jsonl`` in ``output_dir``.

    Args:
        config: The validated YAML; defaults are written out.
        trainer: ``flat`` or ``automodel``, as chosen.
        device: Where this rank runs.
        world: Processes of the job.
        step: Optimizer step from which the run goes on, 0 at the first start.
    """
    args = config.recipe_args
    cuda = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    line = {
        "step": step,
        "time": time.time(),
        "world_size": world,
        "device": cuda.name if cuda else device.type,
        "trainer": trainer,
        "versions": versions(args.sglang_python),
        "config": config.model_dump(by_alias=True),
        "memory": memory_plan(config, trainer, world, cuda.total_memory if cuda else 0),
    }
    meter.append_line(Path(args.output_dir) / NAME, line)


def versions(sglang_python: str | None) -> dict[str, str | None]:
    """Return the versions that decide about a run; ``None`` for what is not installed.

    Args:
        sglang_python: Interpreter of another environment that the target runs in: its SGLang is not this one's.
    """
    found: dict[str, str | None] = {"nemo-eagle3-sglang": nemo_eagle3_sglang.__version__}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if sglang_python is not None:
        found["sglang"] = f"that of {sglang_python}"
    return {**found, "python": platform.python_version(), "CUDA of torch": torch.version.cuda}


def memory_plan(config: Config, trainer: str, world: int, gpu_bytes: int) -> dict[str, Any]:
    """Return what ``plan`` says of the run, in bytes a GPU, or the reason why it says nothing.

    Args:
        config: The validated YAML.
        trainer: ``flat`` or ``automodel``, as chosen.
        world: Processes of the job.
        gpu_bytes: Memory of the GPU; 0 on a CPU, for which the numbers are those of a GPU in bf16 all the same.
    """
    args = config.recipe_args
    if not backends.is_registered(args.target_model_backend):
        return {"reason": f"target_model_backend: {args.target_model_backend} is AutoModel's own, which is not counted"}
    chosen = config.model_copy(update={"recipe_args": args.model_copy(update={"trainer": trainer})})
    try:
        plan = make_plan(chosen, world, gpu_bytes)
        parts = plan.run.parts()
        peak, spare = plan.peak, plan.reserved - parts["target weights"] - parts["KV pool"]
    except (ValueError, KeyError, TypeError) as error:
        # A target that the arithmetic does not know trains all the same.
        return {"reason": f"{type(error).__name__}: {error}"}
    if args.target_model_backend != "sglang":
        peak, spare = peak - parts.pop("KV pool") - spare, 0
    if spare > 0:
        parts["KV pool beyond a forward"] = spare
    return {"parts": parts, "peak": peak, "gpu": gpu_bytes or None}
