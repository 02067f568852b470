"""The whole recipe on a CPU, through AutoModel's own `automodel` script and the real SGLang engine.

Three trainings of a tiny random target, each in its own process: a first run in the command's old form, the same run
resumed in today's form, and AutoModel's stock YAML, unchanged, on a Qwen3 target. What they left behind is looked at
file by file.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tiny_models
import torch
import yaml
from transformers import AutoConfig

pytestmark = pytest.mark.slow
pytest.importorskip("nemo_automodel", reason="the recipe is AutoModel's")
pytest.importorskip("sglang", reason="the target runs in SGLang")

AUTOMODEL = Path(sys.executable).with_name("automodel")
DRAFT_VOCAB, ROWS, MICRO_BATCH = 200, 20, 4
STEPS_PER_EPOCH = ROWS // MICRO_BATCH
FOREIGN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "NEMO_EAGLE3_SGLANG_NO_HOOK")


@dataclass
class Run:
    """A finished training: its output folder and what it said."""

    out: Path
    stdout: str
    log: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    @property
    def draft(self) -> Path:
        """The last checkpoint's folder for serving."""
        return Path(re.findall(r"^Draft: (.+)$", self.stdout, flags=re.MULTILINE)[-1])

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.draft / "config.json").read_text())

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {k: v for f in self.draft.glob("*.safetensors") for k, v in safetensors.torch.load_file(f).items()}


def automodel(out: Path, *args: str | Path) -> Run:
    env = {name: value for name, value in os.environ.items() if name not in FOREIGN} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [AUTOMODEL, *args], capture_output=True, text=True, timeout=280, cwd=out.parent, env=env, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return Run(out, done.stdout, done.stdout + done.stderr)


def write_config(folder: Path, recipe: str, recipe_args: Mapping[str, Any]) -> Path:
    """Write the YAML of a run in ``folder``, with the keys that every EAGLE-3 YAML has."""
    tiny_models.write_chat(folder / "train.jsonl", ROWS)
    tiny_models.write_chat(folder / "val.jsonl", 4, seed=5)
    config = {
        "recipe": recipe,
        "dist_env": {"backend": "nccl", "timeout_minutes": 5},
        "recipe_args": {
            "target_model_name_or_path": str(folder / "target"),
            "target_model_backend": "sglang",
            "train_data_path": str(folder / "train.jsonl"),
            "val_data_path": str(folder / "val.jsonl"),
            "output_dir": str(folder / "out"),
            "seq_length": 64,
            "micro_batch_size": MICRO_BATCH,
            "num_epochs": 3,
            "ttt_steps": 3,
            "draft_vocab_size": DRAFT_VOCAB,
            "log_every_steps": 2,
            **recipe_args,
        },
        "optimizer": {"lr": 1.0e-3, "betas": [0.9, 0.95], "weight_decay": 0.0},
        "checkpoint": {"enabled": True, "checkpoint_dir": str(folder / "out/checkpoints"), "save_consolidated": True},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A Llama target and the YAML of our own recipe."""
    folder = tmp_path_factory.mktemp("llama")
    tiny_models.save_target(folder / "target", "llama")
    return write_config(
        folder, "nemo_eagle3_sglang.training.recipe.TrainEagle3SGLangRecipe", {"aux_layer_ids": [5, 0, 3]}
    )


@pytest.fixture(scope="module")
def first(llama: Path) -> Run:
    """One epoch, in the form of the command that users know from AutoModel before 0.4."""
    return automodel(llama.parent / "out", "finetune", "llm", "-c", llama, "--recipe_args.num_epochs=1")


@pytest.fixture(scope="module")
def first_state(first: Run) -> tuple[list[dict[str, Any]], Path, dict[str, Any], dict[str, torch.Tensor]]:
    """What the first run left, read before the second goes on in the same folder."""
    return first.metrics, first.draft, first.config, first.weights


@pytest.fixture(scope="module")
def resumed(llama: Path, first_state: object) -> Run:
    """The same YAML as it stands (three epochs), in today's form of the command."""
    return automodel(llama.parent / "out", llama)


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Run:
    """AutoModel's stock YAML without a key of ours, on a Qwen3 target."""
    folder = tmp_path_factory.mktemp("qwen3")
    tiny_models.save_target(folder / "target", "qwen3")
    return automodel(folder / "out", write_config(folder, "TrainEagle3Recipe", {"num_epochs": 2}))


def train_points(run: Run) -> list[dict[str, Any]]:
    return [point for point in run.metrics if "train/loss" in point]


def test_first_run_trains(first: Run):
    points = train_points(first)
    assert [point["step"] for point in points] == [2, 4]
    for point in points:
        assert 0 < point["train/loss"] < 20
        assert 0 <= point["train/accuracy"] <= 1
        assert point["train/tau_sim"] >= 1
        assert point["train/tokens_per_second"] > 0
        assert point["tokens"] > 0
    (evaluation,) = [point for point in first.metrics if "val/loss" in point]
    assert math.isfinite(evaluation["val/loss"])
    for point in points:
        assert f"step={point['step']} train_loss={point['train/loss']:.6f}" in first.log
    assert "Resuming" not in first.log


def test_aux_ids_are_trained_in_the_order_of_serving(first: Run):
    assert "[5, 0, 3] are trained as [0, 3, 5]" in first.log


def test_the_progress_bar_shows_what_counts(first: Run):
    assert re.search(r"loss=\d+\.\d+, acc=\d\.\d+, accept=\d+\.\d+, tok/s=\d+", first.log)


def test_the_run_ends_with_where_it_is_and_how_to_serve(first: Run):
    tail = first.stdout[first.stdout.rindex("\nTrained: ") :]
    assert re.search(r"Trained: loss \d+\.\d+ -> \d+\.\d+, accuracy .* -> .*, simulated accept length", tail)
    assert f"--speculative-draft-model-path {first.draft}" in tail
    assert "--speculative-algorithm EAGLE3" in tail
    assert first.draft.is_dir()
    assert first.draft.is_relative_to(first.out)


def check_servable(config: dict[str, Any], draft: Path, aux_ids: list[int]) -> None:
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["num_hidden_layers"] == 1
    assert config["draft_vocab_size"] == DRAFT_VOCAB
    assert config["vocab_size"] == 500
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == aux_ids
    assert config["eagle_config"]["use_aux_hidden_state"] is True
    loaded = AutoConfig.from_pretrained(draft)
    assert loaded.num_hidden_layers == 1
    assert loaded.eagle_config["eagle_aux_hidden_state_layer_ids"] == aux_ids
    assert (draft / "tokenizer.json").is_file()


def test_draft_is_written_to_be_served(first_state):
    _, draft, config, _ = first_state
    check_servable(config, draft, [0, 3, 5])


def test_draft_vocabulary_is_in_the_weights(first_state, llama: Path):
    _, draft, _, weights = first_state
    meta = torch.load(draft.parents[1] / "eagle_meta.pt", weights_only=True)
    selected = meta["selected_token_ids"]
    assert selected.shape == (DRAFT_VOCAB,)
    assert torch.equal(weights["d2t"] + torch.arange(DRAFT_VOCAB), selected)
    assert torch.equal(weights["t2d"].nonzero().squeeze(-1), selected.sort().values)
    assert weights["lm_head.weight"].shape == (DRAFT_VOCAB, 64)
    target = safetensors.torch.load_file(llama.parent / "target/model.safetensors")
    assert torch.equal(weights["model.embed_tokens.weight"], target["model.embed_tokens.weight"]), "taken, and frozen"


def test_same_command_again_resumes(resumed: Run, first_state):
    before, draft, _, weights = first_state
    assert "Resuming from checkpoint" in resumed.log
    assert resumed.metrics[: len(before)] == before, "metrics.jsonl is appended to"
    steps = [point["step"] for point in train_points(resumed)]
    assert steps == sorted(set(steps))
    assert steps[len([p for p in before if "train/loss" in p])] > STEPS_PER_EPOCH
    assert steps[-1] > 2 * STEPS_PER_EPOCH
    assert f"global_step={3 * STEPS_PER_EPOCH}" in resumed.log
    assert resumed.draft != draft
    assert not torch.equal(resumed.weights["lm_head.weight"], weights["lm_head.weight"])
    assert torch.equal(resumed.weights["d2t"], weights["d2t"])


def test_resumed_draft_is_written_to_be_served(resumed: Run):
    check_servable(resumed.config, resumed.draft, [0, 3, 5])


def test_loss_falls(resumed: Run):
    points = train_points(resumed)
    assert points[-1]["train/loss"] < points[0]["train/loss"] - 0.1


def test_stock_yaml_trains_unchanged(stock: Run):
    assert len(train_points(stock)) == 2 * STEPS_PER_EPOCH // 2
    assert "SGLang target: Qwen3ForCausalLM, 8 layers" in stock.log


def test_qwen3_draft_is_written_to_be_served(stock: Run):
    """Its config has layer_types, of which transformers wants as many as there are layers."""
    check_servable(stock.config, stock.draft, [1, 3, 4])
    assert stock.config["layer_types"] == ["full_attention"]
