"""Jobs of two and four gloo ranks with the real engine: the losses are those of one process, whatever the layout.

One driver process imports AutoModel and SGLang, and forks ranks and targets of all runs (``rank_runs.py``).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_models

pytestmark = pytest.mark.slow
pytest.importorskip("nemo_automodel", reason="the recipe is AutoModel's")
pytest.importorskip("sglang", reason="the target runs in SGLang")

DRIVER = Path(__file__).parents[1] / "rank_runs.py"
ROWS, GLOBAL_BATCH, EPOCHS = 24, 8, 2
STEPS = ROWS // GLOBAL_BATCH * EPOCHS
LAYOUTS = {"one": (1, 1), "dp2": (2, 1), "tp2": (2, 2), "dp2_tp2": (4, 2)}
KILLED_RANK, KILLED_AT = 1, 3


def config_of(folder: Path, out: str, ranks: int, tp: int, **changes: Any) -> dict[str, Any]:
    recipe_args = {
        "target_model_name_or_path": str(folder / "target"),
        "target_model_backend": "sglang",
        "sglang_args": {"tp_size": tp},
        "train_data_path": str(folder / "train.jsonl"),
        "val_data_path": str(folder / "val.jsonl"),
        "output_dir": str(folder / out),
        "seq_length": 48,
        "micro_batch_size": GLOBAL_BATCH // ranks,
        "num_epochs": EPOCHS,
        "ttt_steps": 2,
        "draft_vocab_size": 100,
        "log_every_steps": 1,
        **changes,
    }
    return {
        "recipe": "nemo_eagle3_sglang.training.recipe.TrainEagle3SGLangRecipe",
        "dist_env": {"backend": "gloo", "timeout_minutes": 1},
        "recipe_args": recipe_args,
        "optimizer": {"lr": 1.0e-2, "betas": [0.9, 0.95], "weight_decay": 0.01},
        "checkpoint": {"enabled": True, "checkpoint_dir": str(folder / out / "checkpoints")},
    }


@dataclass
class Runs:
    """What the driver left: exit codes of each run's ranks, logs by run, and the folder."""

    codes: dict[str, list[int]]
    logs: dict[str, str]
    folder: Path

    def series(self, name: str, key: str) -> list[float]:
        lines = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        return [line[key] for line in lines if key in line]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_models.save_target(folder / "target")
    tiny_models.write_chat(folder / "train.jsonl", ROWS)
    tiny_models.write_chat(folder / "val.jsonl", 4, seed=5)
    plan = {
        # With the target one micro-batch ahead where it serves one rank, and where it serves two.
        name: {
            "config": config_of(folder, name, ranks, tp, target_prefetch_depth=int(name.startswith("dp2"))),
            "ranks": ranks,
        }
        for name, (ranks, tp) in LAYOUTS.items()
    }
    broken = {"config": config_of(folder, "killed", 2, 2, ckpt_every_steps=2), "ranks": 2}
    plan["killed"] = {**broken, "kill": [KILLED_RANK, KILLED_AT]}
    plan["resumed"] = broken
    (folder / "plan.json").write_text(json.dumps(list(plan.values())))
    env = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    with (folder / "log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, DRIVER, folder / "plan.json"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            assert driver.wait(280) == 0, (folder / "log").read_text()[-6000:]
        finally:
            left = members(driver.pid)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    assert not left, "processes outlived their job"
    parts = (folder / "log").read_text().split("\n=== ")
    codes = json.loads(parts[-1].partition(" s")[0].rpartition(" ")[0])
    return Runs(dict(zip(plan, codes, strict=True)), dict(zip(plan, parts, strict=False)), folder)


def members(session: int) -> list[int]:
    """Return the processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
@pytest.mark.parametrize("key", ["train/loss", "train/grad_norm", "train/accuracy", "val/loss", "train/tau_sim"])
def test_every_layout_trains_what_one_process_does(runs, layout, key):
    assert runs.codes[layout] == [0] * LAYOUTS[layout][0]
    one, ours = runs.series("one", key), runs.series(layout, key)
    assert len(one) == len(ours) == (EPOCHS if key == "val/loss" else STEPS)
    assert ours == pytest.approx(one, rel=1e-5)


def test_it_learns(runs):
    losses = runs.series("one", "train/loss")
    assert losses[-1] < losses[0] - 1.0


def test_a_killed_rank_ends_the_others_with_an_error(runs):
    codes = runs.codes["killed"]
    assert codes[KILLED_RANK] == -signal.SIGKILL
    assert all(code > 0 for code in codes if code != -signal.SIGKILL), codes
    assert "another one ended or did not come with its rows" in runs.logs["killed"]


def test_the_run_goes_on_from_its_checkpoint(runs):
    assert runs.codes["resumed"] == [0, 0]
    assert "epoch_0_step_2" in runs.logs["resumed"]
    assert runs.series("killed", "train/loss") == pytest.approx(runs.series("tp2", "train/loss"), rel=1e-6)
