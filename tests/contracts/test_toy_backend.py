"""Another distribution adds an engine with no edit here: a toy one, installed next to this package, trains a draft."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import tiny_models
import torch
import toy_engine_dist
import yaml

from nemo_eagle3_sglang import backends
from nemo_eagle3_sglang.config import validate
from nemo_eagle3_sglang.contracts import TargetRunner
from nemo_eagle3_sglang.errors import ConfigError

pytest.importorskip("nemo_automodel", reason="the recipe is AutoModel's")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch) -> Path:
    """Install the toy engine for this process."""
    site = toy_engine_dist.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "toy_engine", raising=False)
    return site


def config_of(folder: Path, **changes: object) -> dict:
    recipe_args = {
        "target_model_name_or_path": str(folder / "target"),
        "target_model_backend": "toy",
        "toy_args": {"scale": 0.5},
        "train_data_path": str(folder / "train.jsonl"),
        "output_dir": str(folder / "out"),
        "seq_length": 48,
        "micro_batch_size": 4,
        "num_epochs": 2,
        "ttt_steps": 2,
        "draft_vocab_size": 100,
        "log_every_steps": 2,
    }
    return {
        "recipe": "nemo_eagle3_sglang.training.recipe.TrainEagle3SGLangRecipe",
        "recipe_args": recipe_args | changes,
        "optimizer": {"lr": 3.0e-3},
    }


def test_registered_by_metadata_alone(toy: Path):
    assert backends.is_registered("toy")
    assert backends.registered()["toy"].dist.name == "toy-engine"
    assert "toy_engine" not in sys.modules, "looking at the names imports no engine"
    args = validate(config_of(toy)).recipe_args
    assert args.backend_options() == {"scale": 0.5}
    from nemo_eagle3_sglang.contracts import BackendRequest

    runner = backends.load("toy")(BackendRequest("t", torch.device("cpu"), torch.float32, options={"scale": 1}))
    assert isinstance(runner, TargetRunner)


def test_an_unknown_name_lists_the_known_ones(toy: Path):
    with pytest.raises(ConfigError) as caught:
        backends.check_name("toyy")
    message = str(caught.value)
    assert "recipe_args.target_model_backend: 'toyy' is not a target backend (did you mean 'toy'?)" in message
    assert message.endswith("Known here: colocated, hf, remote, sglang, toy, vllm.")
    with pytest.raises(ConfigError, match=r"recipe_args.target_model_backend.*Known here: colocated, hf"):
        validate(config_of(toy, target_model_backend="nemo"))


def test_its_options_are_unknown_without_it(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        validate(config_of(tmp_path, target_model_backend="sglang"))
    assert "recipe_args.toy_args" in str(caught.value)
    assert "no backend 'toy' takes options" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "words"), [("no_such_module:build", "No module named 'no_such_module'"), ("json:build", "build")]
)
def test_a_broken_registration_names_its_owner(toy: Path, value, words):
    entry_points = toy / "toy_engine-1.0.dist-info/entry_points.txt"
    entry_points.write_text(f"[{backends.GROUP}]\ntoy = {value}\n")
    with pytest.raises(ConfigError) as caught:
        backends.load("toy")
    assert f"target backend 'toy' ({value}, registered by toy-engine) cannot be loaded" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.slow
def test_a_draft_is_trained_through_it(tmp_path: Path):
    site = toy_engine_dist.install(tmp_path / "site")
    tiny_models.save_target(tmp_path / "target")
    (tmp_path / "target/model.safetensors").unlink()  # the toy reads no weights
    tiny_models.write_chat(tmp_path / "train.jsonl", 24)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config_of(tmp_path)))
    env = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    path = os.pathsep.join([str(site), *filter(None, [env.get("PYTHONPATH")])])
    done = subprocess.run(
        [Path(sys.executable).with_name("nemo-eagle3-sglang"), "train", "run.yaml", "--recipe_args.num_epochs=3"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env=env | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    assert "toy: options {'scale': 0.5} 48 4 torch.float32" in done.stdout
    assert "toy: layers [1, 3, 4]" in done.stdout
    assert "toy: closed" in done.stdout

    metrics = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    losses = [point["train/loss"] for point in metrics if "train/loss" in point]
    assert len(losses) == 24 // 4 * 3 // 2
    assert losses[-1] < losses[0] - 0.1
    draft = Path(re.findall(r"^Draft: (.+)$", done.stdout, flags=re.MULTILINE)[-1])
    eagle = json.loads((draft / "config.json").read_text())["eagle_config"]
    assert eagle["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    (file,) = draft.glob("*.safetensors")
    embeddings = safetensors.torch.load_file(file)["model.embed_tokens.weight"]
    expected = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)) * 0.5
    assert torch.equal(embeddings, expected), "the draft starts from the toy's own embeddings"
