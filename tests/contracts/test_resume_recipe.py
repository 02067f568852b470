"""A run that is killed and started again goes on as if nothing had been, through the whole recipe on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models

# Seven runs after one import: a minute on an idle machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip("nemo_automodel", reason="the recipe is AutoModel's")

RUNS = Path(__file__).parents[1] / "resumed_runs.py"
# 19 rows are 7 micro-batches, the last of one row, and 4 optimizer steps, the last of one micro-batch.
ROWS, MICRO_BATCH, ACCUMULATION, EPOCHS = 19, 3, 2, 2
STEPS = 4 * EPOCHS
COMPARED = ("train/loss", "train/accuracy", "train/lr", "train/grad_norm", "train/epoch", "train/tau_sim", "tokens")


def config_of(folder: Path, out: str, **changes: Any) -> dict[str, Any]:
    recipe_args = {
        "target_model_name_or_path": str(folder / "target"),
        "target_model_backend": "hf",
        "train_data_path": str(folder / "train.jsonl"),
        "val_data_path": str(folder / "val.jsonl"),
        "output_dir": str(folder / out),
        "seq_length": 48,
        "micro_batch_size": MICRO_BATCH,
        "grad_accumulation_steps": ACCUMULATION,
        "num_epochs": EPOCHS,
        "ttt_steps": 2,
        "draft_vocab_size": 100,
        "log_every_steps": 1,
        "ckpt_every_steps": 2,
        **changes,
    }
    return {
        "recipe": "nemo_eagle3_sglang.training.recipe.TrainEagle3SGLangRecipe",
        "dist_env": {"backend": "gloo", "timeout_minutes": 2},
        "recipe_args": recipe_args,
        "optimizer": {"lr": 1.0e-2, "betas": [0.9, 0.95], "weight_decay": 0.01},
        "checkpoint": {"enabled": True, "checkpoint_dir": str(folder / out / "checkpoints")},
    }


def run(folder: Path, name: str, *plan: dict[str, Any]) -> tuple[list[list[int]], list[str]]:
    """Return the exit codes and the log of each run."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(plan))
    env = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, RUNS, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
        env=env | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    logs = done.stdout.split("\n=== ")
    return json.loads(logs[-1].partition("\n")[0]), logs


def points(folder: Path, out: str, kind: str = "train/loss") -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if kind in line]
    assert len({line["step"] for line in found}) == len(found), "no step is there twice"
    return {line["step"]: line for line in found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    tiny_models.save_target(folder / "target")
    tiny_models.write_chat(folder / "train.jsonl", ROWS)
    tiny_models.write_chat(folder / "val.jsonl", 3, seed=5)
    return folder


# Logged step at which the run dies -> the checkpoint that it is resumed from.
DEATHS = {3: "epoch_0_step_2", 5: "epoch_0_step_4", 7: "epoch_1_step_6"}


@pytest.fixture(scope="module")
def logs(folder: Path) -> dict[int, str]:
    plan = [{"config": config_of(folder, "whole"), "die_at": None, "ranks": 1}]
    for step in DEATHS:
        for die_at in (step, None):
            plan.append({"config": config_of(folder, f"killed{step}"), "die_at": die_at, "ranks": 1})
    # And one that has nothing left to do: its last checkpoint is of the last step, not of the last epoch's end.
    plan.append({"config": config_of(folder, "whole"), "die_at": None, "ranks": 1})
    codes, logs = run(folder, "plan", *plan)
    assert codes == [[0], *[[-signal.SIGKILL], [0]] * len(DEATHS), [0]], "\n".join(logs)[-6000:]
    return {step: logs[2 + 2 * i] for i, step in enumerate(DEATHS)} | {0: logs[1 + 2 * len(DEATHS)]}


@pytest.mark.parametrize("step", DEATHS)
def test_every_step_is_the_uninterrupted_runs(folder: Path, logs, step):
    assert f"Resuming from checkpoint: {folder}/killed{step}/checkpoints/{DEATHS[step]}" in logs[step]
    whole, found = points(folder, "whole"), points(folder, f"killed{step}")
    assert list(whole) == list(range(1, STEPS + 1))
    # A checkpoint is made before its step is logged; here every step was logged before the run died.
    assert list(found) == list(whole)
    for number in whole:
        assert {key: found[number][key] for key in COMPARED} == {key: whole[number][key] for key in COMPARED}, number


@pytest.mark.parametrize("step", DEATHS)
def test_so_is_every_evaluation(folder: Path, logs, step):
    whole, found = (points(folder, out, "val/loss") for out in ("whole", f"killed{step}"))
    assert [(number, point["val/loss"]) for number, point in whole.items()] == [
        (number, point["val/loss"]) for number, point in found.items()
    ]
    assert list(whole) == [STEPS // EPOCHS, STEPS]


def test_what_the_killed_run_logged_behind_its_checkpoint_is_kept_aside(folder: Path, logs):
    lines = (folder / "killed3/metrics.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3]


def test_the_log_says_where_the_data_go_on(logs):
    assert "Epoch 0 goes on behind its first 12 rows" in logs[3]
    assert f"Epoch 0 goes on behind its first {ROWS} rows" in logs[5], "only the evaluation of epoch 0 is left"
    assert "Epoch 1 goes on behind its first 12 rows" in logs[7]


def test_a_finished_run_trains_nothing_more(logs):
    assert f"Nothing was trained: all {EPOCHS} epochs were done before, at step {STEPS}" in logs[0]


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[str]:
    """Two ranks of one row each, three micro-batches a step; or one process with the rows of both."""
    # 10 micro-batches are 4 steps, the last of one.
    tiny_models.write_chat(folder / "even.jsonl", 20)
    changes = {"train_data_path": str(folder / "even.jsonl"), "grad_accumulation_steps": 3}

    def part(out: str, ranks: int, die_at: int | None = None) -> dict[str, Any]:
        config = config_of(folder, out, micro_batch_size=2 // ranks, **changes)
        return {"config": config, "die_at": die_at, "ranks": ranks}

    plan = [part("one", 1), part("two", 2)]
    for out, then in (("two_two", 2), ("two_one", 1)):
        plan += [part(out, 2, die_at=7), part(out, then)]
    codes, logs = run(folder, "ranks", *plan)
    dead = [-signal.SIGKILL] * 2
    assert codes == [[0], [0, 0], dead, [0, 0], dead, [0]], "\n".join(logs)[-6000:]
    return logs


@pytest.mark.parametrize(("out", "like"), [("two_two", "two"), ("two_one", "one"), ("two", "one")])
def test_ranks_go_on_together_or_as_one(folder: Path, ranks, out, like):
    whole, found = points(folder, like), points(folder, out)
    assert list(found) == list(whole) == list(range(1, STEPS + 1))
    for number, point in whole.items():
        for key in ("train/loss", "train/lr", "train/grad_norm"):
            # Two ranks add up in another order than one process.
            assert found[number][key] == pytest.approx(point[key], rel=2e-5 if out != "two_two" else 0), (number, key)


def test_ranks_go_on_in_the_middle_of_the_epoch(ranks):
    for log in (ranks[3], ranks[5]):
        assert "Epoch 1 goes on behind its first 12 rows" in log
        assert "trained on again" not in log
