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
import yaml

from nemo_eagle3_sglang import backends
from nemo_eagle3_sglang.config import validate
from nemo_eagle3_sglang.contracts import TargetRunner
from nemo_eagle3_sglang.errors import ConfigError

pytest.importorskip("nemo_automodel", reason="the recipe is AutoModel's")

ENGINE = '''\
"""An engine that needs no weights: random embeddings that are mixed along the sequence."""

import torch

from nemo_eagle3_sglang.contracts import HiddenStates, TargetInfo
from nemo_eagle3_sglang.errors import ConfigError

VOCAB, HIDDEN, LAYERS = 500, 64, 8


class ToyRunner:
    def __init__(self, request, scale):
        self.info, self.device, self.dtype = TargetInfo(LAYERS, HIDDEN, VOCAB), request.device, request.dtype
        self.max_sequence_length = request.seq_length
        generator = torch.Generator().manual_seed(0)
        self.weight = (torch.randn(VOCAB, HIDDEN, generator=generator) * scale).to(self.device, self.dtype)

    def set_aux_layers(self, aux_layer_ids):
        print("toy: layers", list(aux_layer_ids))
        self.aux_layer_ids = list(aux_layer_ids)

    def forward(self, tokens, lengths):
        aux, last = [], []
        for sequence in tokens.to(self.device).split(list(lengths)):
            hidden, outputs = self.weight[sequence], []
            for _ in range(LAYERS):
                hidden = (hidden + hidden.cumsum(0) / torch.arange(1, len(hidden) + 1).unsqueeze(-1)) / 2
                outputs.append(hidden)
            aux.append(torch.cat([outputs[i] for i in self.aux_layer_ids], dim=-1))
            last.append(self.weight[sequence])
        return HiddenStates(aux=torch.cat(aux), last=torch.cat(last))

    def head(self):
        # The next token is the one that was just seen, which a draft learns at once.
        return lambda hidden: hidden @ self.weight.T

    def input_embeddings(self):
        return self.weight

    def close(self):
        print("toy: closed")


def build_runner(request):
    print("toy: options", dict(request.options), request.seq_length, request.micro_batch_size, request.dtype)
    return ToyRunner(request, **request.options)


def check_request(request):
    if unknown := set(request.options) - {"scale"}:
        raise ConfigError(f"recipe_args.toy_args: the toy engine has no {sorted(unknown)}; write scale")
'''


def install(site: Path) -> Path:
    """Lay out the distribution ``toy-engine`` as an installer leaves it, and return its folder."""
    info = site / "toy_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "toy_engine.py").write_text(ENGINE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{backends.GROUP}]\ntoy = toy_engine:build_runner\n")
    (info / "RECORD").write_text("")
    return site


@pytest.fixture
def toy(tmp_path: Path, monkeypatch) -> Path:
    """Install the toy engine for this process."""
    site = install(tmp_path / "site")
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
    site = install(tmp_path / "site")
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
