"""How the cases of ``zoo.py`` are run, and what is noted beside their results. Imports no SGLang."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata

import torch

ON_CPU = os.environ.get("ZOO_DEVICE") == "cpu"
# The workers share one GPU, but a case mostly builds modules and compiles kernels, on one core each.
WORKERS = int(os.environ.get("ZOO_WORKERS", "1" if ON_CPU else "4"))
# A case takes some seconds; the first to need a kernel that SGLang compiles with nvcc waits for it.
SECONDS = float(os.environ.get("ZOO_SECONDS", "180"))


def circumstances() -> dict[str, str]:
    """Return the device, versions and date of a run."""
    names = ("sglang", "torch", "transformers", "triton")
    return {
        "device": f"{platform.machine()} CPU" if ON_CPU else torch.cuda.get_device_name(),
        "dtype": "float32" if ON_CPU else "bfloat16",
        "date": str(datetime.datetime.now(tz=datetime.UTC).date()),
        "versions": f"Python {platform.python_version()}, " + ", ".join(f"{n} {metadata.version(n)}" for n in names),
        "sglang_args": os.environ.get("SGLANG_ARGS", ""),
    }
