"""Quantised checkpoints on a GPU, in SGLang's own kernels, against transformers with the dequantised weights.

    NEMO_EAGLE3_SGLANG_GPU_TESTS=1 SGLANG_ARGS="attention_backend=triton sampling_backend=pytorch" \
        python3 -m pytest tests/gpu/test_quantised.py -q

Writes ``quantised_h200.json`` to $OUT. ``ZOO_DEVICE=cpu`` runs the cases that have a substitute on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pool
import pytest
from quantised import QUANTISED, Quantised
from zoo_run import ON_CPU, SECONDS, WORKERS, circumstances

pytestmark = pytest.mark.timeout(1200)

CASES = [q for q in QUANTISED if q.substitute or not ON_CPU]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, out: Path, report: Any) -> dict[str, pool.Result]:
    """What was measured of each selected case; written out before anything is asserted."""
    names = [i.callspec.params["case"].name for i in request.session.items if i.path == request.path]
    # Marlin's kernels are compiled by nvcc when first used, minutes where nothing is cached.
    found = pool.run_cases("zoo:measure_quantised", names, out / "quantised_logs", WORKERS, 2 * SECONDS)
    report("quantised_cpu" if ON_CPU else "quantised_h200", {**circumstances(), "targets": found})
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda q: q.name)
def test_against_the_dequantised_weights(case: Quantised, results: dict[str, pool.Result]):
    result = results[case.name]
    assert "error" not in result, f"{result['stage']}: {result['error']}"
    assert not result["problems"], "\n".join(result["problems"])
