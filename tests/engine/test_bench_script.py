"""scripts/bench_train_step.py on a CPU with tiny dimensions: it runs, and measures the same work for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nemo_automodel", reason="AutoModel's configurations are measured beside ours")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/bench_train_step.py"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )


@pytest.mark.slow
def test_a_round_beside_automodel(tmp_path):
    out = tmp_path / "step.json"
    names = ["automodel-packed", "ours-bf16"]
    done = bench(
        *("--target-dims", "tiny", "--device", "cpu", "--rounds", "1", "--tokens-per-round", "300", "--json", str(out)),
        *("--configs", *names),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    theirs, ours = json.loads(out.read_text())["rows"]
    assert [theirs["name"], ours["name"]] == names
    for row in (theirs, ours):
        assert row["real_tokens_per_s"] > 0
        assert set(row["ms"]) == {"target", "draft forward", "draft backward", "optimizer"}
    # The same chats, random weights: both losses are those of a draft that knows nothing.
    assert ours["real_tokens_per_step"] == theirs["real_tokens_per_step"]
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.2)


def test_growth_is_drawn_from_the_committed_report(tmp_path):
    target = tmp_path / "growth.png"
    done = bench("--plot-from", "docs/benchmarks/train_growth_h200.json", "--plot", str(target))
    assert done.returncode == 0, done.stderr
    assert target.read_bytes().startswith(b"\x89PNG")
