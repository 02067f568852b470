"""Tests that need a CUDA device; run them with tests/gpu/run.sh, alone on the GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tried_on_a_cpu = "cpu" in (os.environ.get("TRAINER_DEVICE"), os.environ.get("ZOO_DEVICE"))
    if not torch.cuda.is_available() and not tried_on_a_cpu:
        raise pytest.UsageError("tests/gpu needs a CUDA device; the default test run is on the CPU")


@pytest.fixture(scope="session")
def out() -> Path:
    """Where the reports go: $OUT, or outputs/gpu."""
    folder = Path(os.environ.get("OUT") or ROOT / "outputs/gpu")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def sglang_args() -> dict[str, str]:
    """Extra arguments of SGLang, e.g. SGLANG_ARGS="attention_backend=triton sampling_backend=pytorch"."""
    return dict(pair.split("=", 1) for pair in os.environ.get("SGLANG_ARGS", "").split())


@pytest.fixture(scope="session")
def report(out: Path) -> Callable[[str, Any], None]:
    """Write what a test measured as OUT/NAME.json."""

    def write(name: str, data: Any) -> None:
        (out / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    return write
