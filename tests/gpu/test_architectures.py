"""The targets of ``tests/architectures.py`` on a GPU: SGLang's own kernels, bf16, nothing put in their place.

    NEMO_EAGLE3_SGLANG_GPU_TESTS=1 SGLANG_ARGS="attention_backend=triton sampling_backend=pytorch" \
        python3 -m pytest tests/gpu/test_architectures.py -q

Writes ``targets_h200.json`` to $OUT; committed as ``docs/benchmarks/targets_h200.json`` it fills the GPU's column of
``docs/targets.md``. ``ZOO_DEVICE=cpu`` runs the same code in float32 where there is no GPU, to try the script.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pool
import pytest
from architectures import ARCHITECTURES, Architecture
from zoo_run import ON_CPU, SECONDS, WORKERS, circumstances

# All cases run while the first test is set up.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def zoo(request: pytest.FixtureRequest, out: Path, report: Any) -> dict[str, pool.Result]:
    """What was measured of each selected target; written out before anything is asserted."""
    chosen = [i.callspec.params["architecture"] for i in request.session.items if i.path == request.path]
    names = [architecture.name for architecture in chosen]
    results = pool.run_cases("zoo:measure", names, out / "zoo_logs", WORKERS, SECONDS)
    report("targets_cpu" if ON_CPU else "targets_h200", {**circumstances(), "targets": results})
    return results


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_against_transformers_and_what_is_served(architecture: Architecture, zoo: dict[str, pool.Result]):
    result = zoo[architecture.name]
    if error := result.get("error"):
        where = f"{result['stage']}: {error}"
        known = architecture.gpu_fails
        if known and not ON_CPU and result["stage"].startswith("stock") and known in error:
            pytest.xfail(f"SGLang's own forward fails here, {where}")
        pytest.fail(where + (f" (expected {known!r})" if known else ""))
    assert not (architecture.gpu_fails and not ON_CPU), "SGLang runs this one now: drop gpu_fails"
    assert not result["problems"], "\n".join(result["problems"])
