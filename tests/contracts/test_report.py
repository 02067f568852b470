"""A real run's files and the report on them: two processes on a CPU, then resumed in one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import yaml

from nemo_eagle3_sglang.report.read import read_runs

pytestmark = pytest.mark.slow
pytest.importorskip("nemo_automodel", reason="the recipe is AutoModel's")
pytest.importorskip("matplotlib", reason="the extra `report`")

FOREIGN = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
STEPS, RESUMED = 4, 24


def command(*arguments: str | Path) -> str:
    env = {name: value for name, value in os.environ.items() if name not in FOREIGN} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "nemo_eagle3_sglang", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """24 epochs of one step in two processes, 12 of two in one process, and what both left."""
    folder = tmp_path_factory.mktemp("run")
    tiny_models.save_target(folder / "target")
    tiny_models.write_chat(folder / "train.jsonl", 8)
    tiny_models.write_chat(folder / "val.jsonl", 6)  # of the training's own rows
    config = {
        "recipe": "nemo_eagle3_sglang.training.recipe.TrainEagle3SGLangRecipe",
        "recipe_args": {
            "target_model_name_or_path": str(folder / "target"),
            "target_model_backend": "hf",
            "train_data_path": str(folder / "train.jsonl"),
            "val_data_path": str(folder / "val.jsonl"),
            "output_dir": str(folder / "out"),
            "seq_length": 64,
            "micro_batch_size": 4,
            "num_epochs": 36,
            "ttt_steps": STEPS,
            "log_every_steps": 6,
        },
        "optimizer": {"lr": 1.0e-2},
        "checkpoint": {"enabled": True, "checkpoint_dir": str(folder / "out/checkpoints")},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    command("train", path, "--recipe_args.num_epochs=24", "--nproc-per-node", "2")
    command("train", path, "--nproc-per-node", "1")
    return folder / "out"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("part", ["train", "val"])
def test_acceptance_by_position_adds_up_to_the_accept_length(out: Path, part: str):
    """In two processes the accept length is that of all ranks, and so must be its parts."""
    found = [line for line in lines(out / "metrics.jsonl") if f"{part}/loss" in line]
    assert len(found) >= 2
    for line in found:
        shares = [line[f"{part}/acceptance_{position}"] for position in range(1, STEPS + 1)]
        assert 1 + sum(shares) == pytest.approx(line[f"{part}/tau_sim"], rel=1e-6)
        assert shares == sorted(shares, reverse=True)
        assert f"{part}/acceptance_{STEPS + 1}" not in line
    learnt = [line["step"] for line in found if line[f"{part}/acceptance_1"] > 0]
    assert learnt, "or the sums above are of zeros"
    assert learnt[0] <= RESUMED < learnt[-1], "in two processes and in one"


def test_each_start_left_a_line(out: Path):
    first, second = lines(out / "run.jsonl")
    assert (first["step"], first["world_size"]) == (0, 2)
    assert (second["step"], second["world_size"]) == (RESUMED, 1)
    assert second["device"] == "cpu"
    assert second["trainer"] == "flat"
    for name in ("nemo-automodel", "torch", "transformers"):
        assert second["versions"][name] == metadata.version(name)
    assert first["config"]["recipe_args"]["num_epochs"] == 24
    assert second["config"]["recipe_args"]["num_epochs"] == 36
    assert set(second["memory"]["parts"]) > {"target weights", "supervision", "draft activations"}
    assert "KV pool" not in second["memory"]["parts"], "transformers has none"


def test_the_report_on_it(out: Path):
    said = command("report", out)
    assert said.startswith(f"Report on 1 run: {out / 'report.html'} (")
    text = (out / "report.html").read_text(encoding="utf-8")
    assert len(re.findall("<figure.*?</figure>", text, flags=re.DOTALL)) == 6
    assert "Nothing to draw" not in text
    assert "Notes on" not in text, "all that the run wrote is known and whole"
    assert re.search(rf"at step {RESUMED}: .*config\.recipe_args\.num_epochs: 24 → 36; world_size: 2 → 1<", text)
    (run,) = read_runs([out])
    steps = [point["step"] for point in run.points if "train/loss" in point]
    assert steps == sorted(set(steps))
    assert steps[-1] > RESUMED
